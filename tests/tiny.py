"""Real diffusers models at tiny size with random weights, and codebooks for them; no download."""

from dataclasses import replace

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    MotionAdapter,
    StableDiffusionAdapterPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    T2IAdapter,
    UNet2DConditionModel,
)
from peft import LoraConfig
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from avq_diffusers import gather_codebooks, select_layers
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.codebooks import PROJECTION_PARAMETERS, AVQCodebooks

LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"  # the first one
LORA = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
CONFIG = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0, 1), codewords="stored")


SD15_BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
}


def tiny_tokenizer() -> CLIPTokenizer:
    """Byte-level vocabulary without merges: every letter is a token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(moved))]
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=77
    )


def tiny_unet(**overrides) -> UNet2DConditionModel:
    """Four levels as SD1.5; self-attention at levels 0 and 1 with head dims 8 and 16, and in the
    middle, at level 3, with 32; one layer in a block down, two in a block up: 7 in all.
    """
    torch.manual_seed(0)
    arguments = {
        "sample_size": 16,
        "layers_per_block": 1,
        "block_out_channels": (16, 32, 64, 64),
        "cross_attention_dim": 32,
        "attention_head_dim": 2,
        "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock2D",) * 2 + ("DownBlock2D",) * 2,
        "up_block_types": ("UpBlock2D",) * 2 + ("CrossAttnUpBlock2D",) * 2,
    }
    unet = UNet2DConditionModel(**arguments | overrides).eval()
    # Untrained keys and queries make attention an average; these make it choose.
    with torch.no_grad():
        for layer in select_layers(unet):
            layer.attn.to_q.weight.mul_(4)
            layer.attn.to_k.weight.mul_(4)
    return unet


def two_level_unet(**overrides) -> UNet2DConditionModel:
    """Levels 0 and 1: a layer with self-attention down at both, and two up at level 0."""
    return tiny_unet(
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        mid_block_type=None,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **overrides,
    )


def three_level_unet(**overrides) -> UNet2DConditionModel:
    """`two_level_unet`, and a level 2 with self-attention in the middle only."""
    return tiny_unet(
        block_out_channels=(16, 32, 32),
        down_block_types=("CrossAttnDownBlock2D",) * 2 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) * 2 + ("CrossAttnUpBlock2D",),
        **overrides,
    )


def small_unet() -> UNet2DConditionModel:
    """Level 0 only, one layer in its block down, two up: Dynamo traces it in a second or so."""
    return tiny_unet(
        block_out_channels=(16,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
    )


def traced_unet() -> UNet2DConditionModel:
    """The least that has self-attention, for tests of compilers and wrappers."""
    return tiny_unet(
        block_out_channels=(16,),
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
    )


def sdxl_unet(**overrides) -> UNet2DConditionModel:
    """SDXL's topology: three levels, none at 0, several transformer blocks, linear projections."""
    arguments = {
        "block_out_channels": (16, 32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 3),
        "attention_head_dim": (2, 4, 8),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }
    return tiny_unet(**arguments | overrides)


def two_level_sdxl_unet(**overrides) -> UNet2DConditionModel:
    """`two_level_unet` of SDXL's kind: no self-attention at level 0."""
    arguments = {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "attention_head_dim": (2, 4),
    }
    return sdxl_unet(**arguments | overrides)


def traced_sdxl_unet() -> UNet2DConditionModel:
    """`traced_unet` of SDXL's kind: two self-attentions, both at level 1."""
    return two_level_sdxl_unet(mid_block_type=None, up_block_types=("UpBlock2D",) * 2)


def sd2_unet() -> UNet2DConditionModel:
    """SD2's differences to SD1.5: heads per level, linear projections, upcast attention."""
    return tiny_unet(
        attention_head_dim=(1, 2, 4, 4), use_linear_projection=True, upcast_attention=True
    )


def text_config(**changes) -> CLIPTextConfig:
    """For a text encoder on the tiny tokenizer's vocabulary."""
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes | changes,
    )


def tiny_encoders() -> dict:
    """The text encoder and the VAE of a Stable Diffusion pipeline; the VAE scales by 8."""
    torch.manual_seed(1)
    text_encoder = CLIPTextModel(text_config())
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        sample_size=128,
    )
    return {"text_encoder": text_encoder.eval(), "vae": vae.eval()}


def tiny_components(unet: UNet2DConditionModel | None = None, encoders: dict | None = None) -> dict:
    """The components of a Stable Diffusion pipeline."""
    return {
        **(tiny_encoders() if encoders is None else encoders),
        "unet": tiny_unet() if unet is None else unet,
        "tokenizer": tiny_tokenizer(),
        "scheduler": DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            clip_sample=False,
            set_alpha_to_one=False,
        ),
        "safety_checker": None,
        "feature_extractor": None,
    }


def active(controlnet):
    """The ControlNet, its residuals not zero, as they are so that training starts gently."""
    for name, weight in controlnet.named_parameters():
        if name.startswith("controlnet_"):
            nn.init.normal_(weight, std=0.1)
    return controlnet


def motion_adapter() -> MotionAdapter:
    """AnimateDiff's motion modules for `tiny_unet`."""
    return MotionAdapter(
        block_out_channels=(16, 32, 64, 64),
        motion_layers_per_block=1,
        motion_num_attention_heads=2,
        motion_norm_num_groups=8,
    )


class CalledLinear(nn.Linear):
    """A layer of another class, as quantization and LoRA put in place of `nn.Linear`."""


def let_answer_calls_only(unet):
    """Make every projection of self-attention one whose weight AVQ does not read."""
    for layer in select_layers(unet):
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            layer.attn.get_submodule(name).__class__ = CalledLinear
    return unet


def tiny_pipe(unet: UNet2DConditionModel | None = None, cls=StableDiffusionPipeline, **components):
    """A pipeline of class `cls` around a tiny UNet."""
    return quiet(cls(**tiny_components(unet), **components, requires_safety_checker=False))


def adapter_pipe():
    """With a T2I-Adapter, which needs cross-attention at all levels but the last."""
    torch.manual_seed(4)
    adapter = T2IAdapter(channels=[16, 32, 64, 64], num_res_blocks=1, downscale_factor=8)
    unet = tiny_unet(**SD15_BLOCKS)
    return tiny_pipe(unet, StableDiffusionAdapterPipeline, adapter=adapter.eval())


def two_level_pipe():
    return tiny_pipe(two_level_unet())


def sdxl_text_encoder(cls, width: int):
    """A text encoder of class `cls` with `width` channels."""
    torch.manual_seed(width)
    return cls(text_config(hidden_size=width, projection_dim=32)).eval()


def sdxl_pipe(unet=None, cls=StableDiffusionXLPipeline, **components):
    """SDXL's pipeline; the states of both text encoders lie side by side."""
    components = {
        **tiny_components(sdxl_unet() if unet is None else unet),
        "text_encoder": sdxl_text_encoder(CLIPTextModel, 16),
        "text_encoder_2": sdxl_text_encoder(CLIPTextModelWithProjection, 16),
        **components,
    }
    del components["safety_checker"]
    return quiet(cls(**components, tokenizer_2=components["tokenizer"], add_watermarker=False))


def quiet(pipe):
    """The pipeline, without progress bars."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def random_image(*size: int) -> Tensor:
    """A batch of one image in [0, 1]."""
    height, width = size * 2 if len(size) == 1 else size
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(5))


def draw(pipe, seed: int = 0, **arguments) -> Tensor:
    """The latents of a two-step 128 x 128 image."""
    defaults = {"height": 128, "width": 128, "num_inference_steps": 2, "output_type": "latent"}
    if "image" in arguments:
        del defaults["height"], defaults["width"]
    generator = torch.Generator().manual_seed(seed)
    return pipe("a red fox", generator=generator, **defaults | arguments).images


def predict(unet, height: int = 16, width: int = 16, batch: int = 1, **arguments) -> Tensor:
    """The UNet's output for fixed inputs of latent size height x width."""
    generator = torch.Generator().manual_seed(2)
    sample = torch.randn(batch, 4, height, width, generator=generator)
    text = torch.randn(batch, 5, 32, generator=generator)
    with torch.no_grad():
        return unet(sample, 10, text, return_dict=False, **arguments)[0]


def random_codebooks(unet, config: AVQConfig = CONFIG, seed: int = 0, **arguments) -> AVQCodebooks:
    """Codebooks in the paper's form, of random codewords whose children average to their parent."""
    config = replace(config, codewords="stored")
    generator = torch.Generator().manual_seed(seed)
    codebooks = {}
    for layer in select_layers(unet, config.levels, config.exact):
        sizes = config.for_layer(layer.name, layer.level)
        parents = torch.randn(
            layer.num_heads, sizes.num_parents, layer.head_dim, generator=generator
        )
        shape = (layer.num_heads, sizes.num_parents, sizes.num_children, layer.head_dim)
        offsets = torch.randn(shape, generator=generator)
        offsets -= offsets.mean(2, keepdim=True)
        codebooks[layer.name] = Codebook(parents, parents[:, :, None] + 0.5 * offsets)
    return gather_codebooks(unet, config, codebooks, **arguments)


def random_changes(unet, config: AVQConfig = CONFIG) -> dict[str, dict[str, Tensor]]:
    """Changes of the projections of the layers of `config`: noise of half the weights' size."""
    generator = torch.Generator().manual_seed(0)
    changes = {}
    for layer in select_layers(unet, config.levels, config.exact):
        own = {name: layer.attn.state_dict()[name] for name in PROJECTION_PARAMETERS}
        changes[layer.name] = {
            name: 0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator)
            for name, tensor in own.items()
        }
    return changes


def own_codebooks(unet, config: AVQConfig = CONFIG, **facts) -> AVQCodebooks:
    """`random_changes` for own codewords."""
    config = replace(config, codewords="means")
    changes = random_changes(unet, config)
    return gather_codebooks(unet, config, None, projection_changes=changes, **facts)


def tuned_codebooks(unet, config: AVQConfig = CONFIG, **arguments) -> AVQCodebooks:
    """`random_codebooks` with `random_changes`."""
    return random_codebooks(
        unet, config, projection_changes=random_changes(unet, config), **arguments
    )

"""AVQ beside LoRA, textual inversion and IP-Adapters.

The marker `feature` names the feature of `eval/results/features.md` that a test stands for.
"""

import pytest
import torch
from checks import check_on_and_off, differ, kinds
from diffusers import StableDiffusionPipeline
from peft import get_peft_model_state_dict
from tiny import LORA, draw, let_answer_calls_only, tiny_pipe, tiny_unet, tuned_codebooks

from avq_diffusers import apply_avq, remove_avq

feature = pytest.mark.feature


@feature("LoRA (load/fuse/unfuse)")
class TestLoRA:
    """With changes of projections AVQ also reads weights, which a LoRA changes."""

    def test_is_seen(self, pipe):
        """Catches raw weights read instead of projections called, and AVQ that only lets go of the
        modules it was applied to."""
        exact, codebooks = draw(pipe), tuned_codebooks(pipe.unet)
        plain = draw(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(LORA)
        adapted = draw(pipe)
        assert differ(adapted, plain)
        assert kinds(pipe) == {"AVQ"}
        assert torch.equal(draw(apply_avq(pipe, codebooks)), adapted)
        hooked = apply_avq(tiny_pipe(), codebooks)
        let_answer_calls_only(hooked.unet)  # as a layer with a LoRA does
        assert torch.equal(draw(pipe, cross_attention_kwargs={"scale": 0.0}), draw(hooked))
        torch.testing.assert_close(draw(hooked), plain, rtol=1e-3, atol=1e-3)
        assert differ(draw(pipe, cross_attention_kwargs={"scale": 0.5}), adapted)
        remove_avq(pipe).unload_lora_weights()
        assert torch.equal(draw(pipe), exact)

    def test_fuse(self, pipe):
        """Catches an adapter that AVQ loses when it is fused or taken out again, and weights of the
        base model in place of those that a LoRA was fused into."""
        codebooks = tuned_codebooks(pipe.unet)
        plain = draw(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(LORA)
        adapted = draw(pipe)
        assert differ(plain, adapted)
        for change in (pipe.fuse_lora, pipe.unfuse_lora, pipe.fuse_lora, pipe.unload_lora_weights):
            change()
            torch.testing.assert_close(draw(pipe), adapted, rtol=1e-2, atol=1e-2)
        assert kinds(pipe) == {"AVQ"}
        again = draw(apply_avq(remove_avq(pipe), codebooks))
        torch.testing.assert_close(again, adapted, rtol=1e-2, atol=1e-2)

    @feature("LoRA hot-swap")
    def test_hot_swap(self, pipe, tmp_path):
        """Catches AVQ that keeps the weights of the LoRA it met first."""
        codebooks = tuned_codebooks(pipe.unet)
        for seed in (1, 2):
            source = tiny_unet()
            torch.manual_seed(seed)
            source.add_adapter(LORA)
            StableDiffusionPipeline.save_lora_weights(
                tmp_path / str(seed), unet_lora_layers=get_peft_model_state_dict(source)
            )
        plain = draw(apply_avq(pipe, codebooks))
        pipe.load_lora_weights(tmp_path / "1", adapter_name="default_0")
        first = draw(pipe)
        pipe.load_lora_weights(tmp_path / "2", adapter_name="default_0", hotswap=True)
        second = draw(pipe)
        assert differ(first, plain)
        assert differ(second, first)
        assert kinds(pipe) == {"AVQ"}
        expected = tiny_pipe()
        expected.load_lora_weights(tmp_path / "2")
        assert torch.equal(second, draw(apply_avq(expected, codebooks)))
        pipe.unload_lora_weights()
        assert torch.equal(draw(pipe), plain)


@feature("textual inversion")
def test_textual_inversion(pipe, codebooks):
    generator = torch.Generator().manual_seed(8)
    vectors = {"<fox>": 3 * torch.randn(2, 32, generator=generator)}
    pipe.load_textual_inversion(vectors, token="<fox>")
    _, avq = check_on_and_off(pipe, codebooks, negative_prompt="<fox>")
    apply_avq(pipe, codebooks)
    pipe.unload_textual_inversion()
    assert differ(draw(pipe, negative_prompt="<fox>"), avq)


@feature("IP-Adapter")
class TestIPAdapter:
    """Layers of cross-attention hold IP-Adapter's processors and get (text, image) states."""

    def load(self, pipe):
        generator = torch.Generator().manual_seed(6)
        # Diffusers numbers the layers down, up, mid, with every self-attention in between.
        names = [n for n in pipe.unet.attn_processors if n.endswith("attn2.processor")]
        weights = {}
        for index, name in enumerate(names):
            width = pipe.unet.get_submodule(name.removesuffix(".processor")).inner_dim
            for part in ("to_k_ip", "to_v_ip"):
                key = f"{2 * index + 1}.{part}.weight"
                weights[key] = torch.randn(width, 32, generator=generator)
        image_proj = {
            "proj.weight": torch.randn(4 * 32, 24, generator=generator),  # four tokens
            "proj.bias": torch.zeros(4 * 32),
            "norm.weight": torch.ones(32),
            "norm.bias": torch.zeros(32),
        }
        pipe.unet._load_ip_adapter_weights([{"image_proj": image_proj, "ip_adapter": weights}])
        return pipe

    def draw(self, pipe):
        image = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(7))
        embeds = torch.cat([torch.zeros_like(image), image])
        return draw(pipe, ip_adapter_image_embeds=[embeds])

    def test_loaded_before(self, pipe, codebooks):
        """Catches IP-Adapter's processors replaced: the image would have no effect."""
        _, avq = check_on_and_off(self.load(pipe), codebooks, self.draw)
        pipe.set_ip_adapter_scale(0.3)
        assert differ(self.draw(apply_avq(pipe, codebooks)), avq)
        pipe.set_ip_adapter_scale(1.0)
        assert torch.equal(self.draw(pipe), avq)

    def test_loaded_afterwards(self, pipe, codebooks):
        """Catches codebooks lost when IP-Adapter rebuilds processors as `type(p)()`."""
        apply_avq(pipe, codebooks)
        without_adapter = draw(pipe)
        avq = self.draw(self.load(pipe))
        assert kinds(pipe) == {"AVQ"}
        expected = self.load(tiny_pipe())
        exact = self.draw(expected)
        assert torch.equal(avq, self.draw(apply_avq(expected, codebooks)))
        pipe.unload_ip_adapter()
        assert torch.equal(draw(pipe), without_adapter)
        assert torch.equal(self.draw(remove_avq(self.load(pipe))), exact)

"""A pytest plugin that runs diffusers' own tests with AVQ in every model that a test builds.

In a checkout of diffusers, of the installed version, with REPO the root of this repository:

    export PYTHONPATH=REPO:REPO/tests/reliability HF_HUB_OFFLINE=1
    tests="tests/models/unets/test_models_unet_2d_condition.py tests/pipelines/stable_diffusion"
    pytest -p diffusers_suite $tests --junitxml plain.xml
    pytest -p diffusers_suite $tests --junitxml avq.xml --avq
    python -m diffusers_suite plain.xml avq.xml

The last line prints the tests that only AVQ fails. DIFFUSERS_TEST_DEVICE=cuda selects the GPU.

AVQ runs with a threshold of 0, which is exact attention up to rounding. So a test that fails shows
something that AVQ broke, not the error of quantized keys. Two things differ from a user's
`apply_avq`:

- `set_default_attn_processor` refuses foreign processors, so a user calls `remove_avq` first. The
  plugin does so, and applies AVQ again.
- `from_pretrained` applies AVQ once the weights are there.
"""

import functools
import os
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

from avq_diffusers import apply_avq, remove_avq, select_layers
from avq_diffusers.mini import MINI_SD

UNETS = ("UNet2DConditionModel", "UNetMotionModel", "UNet3DConditionModel")
TRANSFORMERS = (
    *("SD3Transformer2DModel", "FluxTransformer2DModel", "Flux2Transformer2DModel"),
    *("QwenImageTransformer2DModel", "ZImageTransformer2DModel", "WanTransformer3DModel"),
    *("LTXVideoTransformer3DModel", "SD3ControlNetModel"),
)
EVERY_KEY = "M4C2T0"
TINY_CLIP = ("hf-internal-testing/tiny-random-clip", "peft-internal-testing/tiny-clip-text-2")
TINY_T5 = ("hf-internal-testing/tiny-random-t5",)
TINY_QWEN = ("hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration",)
QWEN_TOKENS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
TINY_TEXT_ENCODER = {
    **{"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 37, "projection_dim": 32},
    **{"num_hidden_layers": 5, "num_attention_heads": 4},
}


def pytest_addoption(parser) -> None:
    parser.addoption("--avq", action="store_true", help="Apply AVQ to every model.")


def pytest_configure(config) -> None:
    torch.set_num_threads(1)
    if os.environ.get("DIFFUSERS_TEST_DEVICE") == "cuda":
        # TF32 differs between batch sizes by as much as some tests allow.
        torch.backends.cudnn.allow_tf32 = False
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        stand_in_for_hub()
    if config.getoption("--avq"):
        for name in (*UNETS, *TRANSFORMERS):
            apply_when_built(getattr(diffusers, name))


def stand_in_for_hub() -> None:
    """Serve the Hub's tiny CLIP, T5 and Qwen, which pipeline tests load, without the Hub."""
    load_tokenizer = transformers.CLIPTokenizer.from_pretrained.__func__

    def tokenizer(cls):
        return load_tokenizer(transformers.CLIPTokenizer, MINI_SD, subfolder="tokenizer")

    def text_encoder(cls):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return cls(transformers.CLIPTextConfig(**TINY_TEXT_ENCODER)).eval()

    def t5_config(cls):
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 5, "num_heads": 4}
        return transformers.T5Config(vocab_size=1000, **sizes)

    def qwen_tokenizer(cls):
        letters = sorted(ByteLevel.alphabet())
        vocabulary = {letter: index for index, letter in enumerate(letters)} | QWEN_TOKENS
        return cls(vocab=vocabulary, merges=[], extra_special_tokens=[*QWEN_TOKENS])

    def stand_in_for(cls: type, stand_in: Callable, names: tuple[str, ...] = TINY_CLIP) -> None:
        load = cls.from_pretrained.__func__

        @functools.wraps(load)
        def from_pretrained(cls, name, *args, **kwargs):
            return stand_in(cls) if name in names else load(cls, name, *args, **kwargs)

        cls.from_pretrained = classmethod(from_pretrained)

    stand_in_for(transformers.CLIPTokenizer, tokenizer)
    stand_in_for(transformers.CLIPTextModel, text_encoder)
    stand_in_for(transformers.CLIPTextModelWithProjection, text_encoder)
    stand_in_for(transformers.AutoConfig, t5_config, TINY_T5)
    stand_in_for(transformers.AutoTokenizer, tokenizer, TINY_T5)
    stand_in_for(transformers.Qwen2Tokenizer, qwen_tokenizer, TINY_QWEN)


def apply(model: nn.Module) -> None:
    """Apply AVQ in all layers, unless the weights are still to come."""
    is_empty = next(model.parameters()).device.type == "meta"
    if is_empty or has_avq(model) or not (layers := select_layers(model)):
        return
    levels = tuple({layer.level for layer in layers})
    apply_avq(model, EVERY_KEY, levels=levels, route="always")


def apply_when_built(model_class: type) -> None:
    build, load = model_class.__init__, model_class.from_pretrained.__func__

    @functools.wraps(build)
    def init(model, *args, **kwargs):
        build(model, *args, **kwargs)
        apply(model)

    @functools.wraps(load)
    def from_pretrained(cls, *args, **kwargs):
        loaded = load(cls, *args, **kwargs)
        apply(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    model_class.__init__ = init
    model_class.from_pretrained = classmethod(from_pretrained)
    if not hasattr(model_class, "set_default_attn_processor"):
        return
    set_default = model_class.set_default_attn_processor

    @functools.wraps(set_default)
    def set_default_attn_processor(model):
        had_avq = has_avq(model)
        set_default(remove_avq(model))
        if had_avq:
            apply(model)

    model_class.set_default_attn_processor = set_default_attn_processor


def has_avq(model: nn.Module) -> bool:
    return any("_avq" in vars(module) for module in model.modules())


def passed(junit: str) -> set[str]:
    return {
        f"{case.get('classname')}::{case.get('name')}"
        for case in ElementTree.parse(junit).iter("testcase")
        if not {child.tag for child in case} & {"failure", "error", "skipped"}
    }


if __name__ == "__main__":
    plain, avq = map(passed, sys.argv[1:])
    print(f"Of {len(plain)} tests that pass without AVQ, these fail with AVQ:")
    print(*sorted(plain - avq), sep="\n")
    sys.exit(bool(plain - avq))

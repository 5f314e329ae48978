"""The pytest plugin of `eval.diffusers_suite`: AVQ in every UNet of a test, outcomes in a file.

AVQ runs with codebooks that are exact: in each call, every key is a parent with one child equal to
it. Assignment, importance, refinement and the attention over codewords all run, and the result is
exact attention's up to rounding. So tests that compare numbers hold with AVQ as without it, and one
that fails tells of something that AVQ broke and not of quantized keys. The layers, levels, hooks,
processors and everything else are those of `apply_avq`.

Only three things differ from a user's `apply_avq`:

- `avq_attention` gets those codebooks in place of the installed ones, which are empty.
- `set_default_attn_processor` raises ValueError for every processor that is not diffusers' own, so
  that a user calls `remove_avq` first. Tests call it to choose the exact attention: here it does,
  and AVQ is applied over that.
- `from_pretrained` applies AVQ when the weights are there, as a user would.
"""

import functools
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import Tensor, nn

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    AVQProcessor,
    apply_avq,
    avq_attention,
    remove_avq,
    select_layers,
)
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.files import atomic_write
from avq_diffusers.mini import MINI_SD
from eval.diffusers_suite import RUNNING

UNETS = ("UNet2DConditionModel", "UNetMotionModel", "UNet3DConditionModel")
NUM_REFINED = 16
# A session that ends so has outcomes of some of its tests only.
STOPPED = (
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.USAGE_ERROR,
)
TINY_CLIP = ("hf-internal-testing/tiny-random-clip", "peft-internal-testing/tiny-clip-text-2")
TINY_TEXT_ENCODER = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "projection_dim": 32,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("AVQ")
    group.addoption("--outcomes", type=Path, help="JSON file that the outcomes are written to.")
    group.addoption("--avq", action="store_true", help="Install AVQ in every UNet.")
    group.addoption("--died", action="append", default=[], help="Test that is left out.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.nodeid not in config.getoption("--died")]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if os.environ.get("DIFFUSERS_TEST_DEVICE") == "cuda":
        # TF32 differs between batch sizes by as much as some tests allow.
        torch.backends.cudnn.allow_tf32 = False
        # Tests set CUDA_LAUNCH_BLOCKING, after which processes that share a GPU wait for each
        # other at every kernel; once CUDA has started it has no effect.
        torch.zeros(1, device="cuda")
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        stand_in_for_hub()
    outcomes = Outcomes(config.getoption("--outcomes"))
    config.pluginmanager.register(outcomes)
    if config.getoption("--avq"):
        install_avq(outcomes.layer_calls.append)


class Outcomes:
    """Collect the outcome of every test, and what the AVQ layers did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running = path.with_suffix(RUNNING)
        self.tests: dict[str, dict[str, str]] = {}
        self.layer_calls: list[Counter[str]] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.write_text(nodeid)  # read where the process dies in this test

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = {"outcome": "failed", "error": _error(report)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = {"outcome": "failed", "error": _error(report)}
        elif report.skipped or report.when == "call":
            self.tests[report.nodeid] = {"outcome": report.outcome}

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in STOPPED:
            return
        calls = sum(self.layer_calls, Counter())
        text = json.dumps({"tests": self.tests, "calls": calls}, indent=1) + "\n"
        with atomic_write(self.path) as temporary:
            temporary.write_text(text)


def stand_in_for_hub() -> None:
    """Serve the Hub's tiny CLIP, which nearly every pipeline test loads, without the Hub.

    The tokenizer is mini-sd's, whose vocabulary is smaller; the text encoder has random weights.
    """

    def tokenizer(cls):
        return load_tokenizer(MINI_SD, subfolder="tokenizer")

    def text_encoder(cls):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return cls(transformers.CLIPTextConfig(**TINY_TEXT_ENCODER)).eval()

    load_tokenizer = transformers.CLIPTokenizer.from_pretrained
    for name, stand_in in (
        ("CLIPTokenizer", tokenizer),
        ("CLIPTextModel", text_encoder),
        ("CLIPTextModelWithProjection", text_encoder),
    ):
        cls = getattr(transformers, name)
        cls.from_pretrained = _unless_tiny(cls.from_pretrained, stand_in)


def install_avq(report_calls: Callable[[Counter[str]], None]) -> None:
    """Apply AVQ to every UNet that this process builds from now on.

    Args:
        report_calls: gets the counter of calls of every AVQ layer.
    """
    inspect.getmodule(AVQProcessor).avq_attention = every_key_attention

    def apply(unet: nn.Module) -> None:
        on_meta = next(unet.parameters()).device.type == "meta"  # from_pretrained is not done yet
        if on_meta or not select_layers(unet) or _has_avq(unet):
            return
        apply_avq(unet, empty_codebooks(unet), route="always")
        for layer in select_layers(unet):
            report_calls(layer.avq_state.calls)

    for name in UNETS:
        _apply_when_built(getattr(diffusers, name), apply)


def every_key_attention(
    query: Tensor, key: Tensor, value: Tensor, codebook: Codebook, **arguments
) -> Tensor:
    """`avq_attention` where each element of the batch has a codebook of all its keys.

    One codebook serves a batch, but one head of it one head, so all heads become one element's.
    """
    batch = query.shape[0]
    query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
    parents = key[0].detach().to(torch.promote_types(key.dtype, torch.float32))
    every_key = Codebook(parents, parents[:, :, None], check_finite=False)
    num_refined = min(NUM_REFINED, every_key.num_parents)
    arguments |= {"num_refined": num_refined, "backend": "auto"}
    output = avq_attention(query, key, value, every_key, **arguments)
    return output[0].unflatten(0, (batch, -1))


def empty_codebooks(unet: nn.Module) -> AVQCodebooks:
    """One codeword at zero for every self-attention layer of `unet`."""
    layers = select_layers(unet)
    levels = tuple({layer.level for layer in layers})
    codebooks = {
        layer.name: Codebook(
            torch.zeros(layer.num_heads, 1, layer.head_dim),
            torch.zeros(layer.num_heads, 1, 1, layer.head_dim),
        )
        for layer in layers
    }
    config = AVQConfig(num_parents=1, num_children=1, num_refined=1, levels=levels)
    return AVQCodebooks.from_codebooks(config, codebooks, unet)


def _unless_tiny(load: Callable, stand_in: Callable[[type], Any]) -> classmethod:
    @functools.wraps(load.__func__)
    def from_pretrained(cls, name, *args, **kwargs):
        return stand_in(cls) if name in TINY_CLIP else load.__func__(cls, name, *args, **kwargs)

    return classmethod(from_pretrained)


def _apply_when_built(unet_class: type, apply: Callable[[nn.Module], None]) -> None:
    build, load = unet_class.__init__, unet_class.from_pretrained
    set_default = unet_class.set_default_attn_processor

    @functools.wraps(build)
    def init(unet, *args, **kwargs):
        build(unet, *args, **kwargs)
        apply(unet)

    @functools.wraps(load.__func__)
    def from_pretrained(cls, *args, **kwargs):
        loaded = load.__func__(cls, *args, **kwargs)
        apply(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @functools.wraps(set_default)
    def set_default_attn_processor(unet):
        had_avq = _has_avq(unet)
        set_default(remove_avq(unet))
        if had_avq:
            apply(unet)

    unet_class.__init__ = init
    unet_class.from_pretrained = classmethod(from_pretrained)
    unet_class.set_default_attn_processor = set_default_attn_processor


def _has_avq(unet: nn.Module) -> bool:
    return any(isinstance(layer.attn.processor, AVQProcessor) for layer in select_layers(unet))


def _error(report: pytest.CollectReport | pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(report.longrepr).splitlines()[-1] if crash is None else crash.message
    return " ".join(message.split())

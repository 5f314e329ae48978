"""Attention timed on its own: AVQ and its rivals.

Each contender is first checked against an oracle: exact attention in fp32, or AVQ on another
backend. A contender with wrong output is not timed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from avq_diffusers import avq_attention
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.tensors import Tensors, mean_columns
from eval.benchmarks.inputs import Inputs, Shape
from eval.benchmarks.timing import Effort, over, time_in_turns
from eval.keys.calls import relative_error
from eval.methods.avq import config_label, method_name
from eval.methods.registry import parse_method

Row = dict[str, Any]

DEFAULT_SDPA = "default SDPA"
FORCED = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Far above the effect of fp16 and of near-ties between parents, far below that of another method.
TOLERANCE = 0.05
CHECKED_QUERIES = 64
PROFILED_CALLS = 20


@dataclass(frozen=True)
class Contender:
    """What one row times.

    Attributes:
        name: name of the row.
        run: attends on input set i and returns (B, H, N, D).
        expected: returns the right output for the first set, or only for its first queries; None
            leaves the output unchecked.
        facts: other fields of the row.
        stored: name of the row with stored codewords to compare with, if any.
        has_stages: whether the row includes the times of both stages, on CUDA.
    """

    name: str
    run: Callable[[int], Any]
    expected: Callable[[], Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stored: str | None = None
    has_stages: bool = False


@dataclass(frozen=True)
class Bench:
    """Runs and times contenders on one device, in `cuda_dtype` on CUDA and float32 elsewhere."""

    device: torch.device
    effort: Effort
    cuda_dtype: torch.dtype = torch.float16

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return self.cuda_dtype if self.cuda else torch.float32

    def inputs(self, shape: Shape, count: int | None = None) -> Inputs:
        """`count` sets; by default enough to overflow the L2 cache three times, at most 32."""
        if count is None and self.cuda:
            elements = shape.batch * shape.num_heads * shape.num_tokens * shape.head_dim
            bytes_moved = 4 * elements * self.dtype.itemsize
            l2_size = torch.cuda.get_device_properties(self.device).L2_cache_size
            count = min(32, math.ceil(3 * l2_size / bytes_moved))
        return Inputs(shape, self.dtype, self.device, count or 2)

    def exact(self, inputs: Inputs, num_sinks: int = 0) -> list[Contender]:
        """Default SDPA, FlashAttention-2 and cuDNN, including the keys of text tokens."""
        sets = inputs.joint(num_sinks) if num_sinks else inputs.sets

        def expected() -> Tensor:
            query, key, value = (tensor.float() for tensor in sets[0])
            logits = query[:, :, :CHECKED_QUERIES] @ key.transpose(2, 3)
            return (logits * query.shape[-1] ** -0.5).softmax(-1) @ value

        def default(index: int) -> Tensor:
            return F.scaled_dot_product_attention(*sets[index])

        def forced(name: str, index: int) -> Tensor:
            if not self.cuda:
                raise RuntimeError(f"{name} needs a CUDA device")
            with sdpa_kernel(FORCED[name]):
                return default(index)

        runs = {name: partial(forced, name) for name in FORCED}
        return [
            Contender(name, run, expected) for name, run in ({DEFAULT_SDPA: default} | runs).items()
        ]

    def avq(
        self, inputs: Inputs, name: str, *, in_order: bool = False, num_sinks: int = 0
    ) -> Contender:
        """AVQ with a configuration.

        Args:
            inputs: the inputs.
            name: name of the configuration.
            in_order: whether to pass a query order.
            num_sinks: number of text keys that every query attends to.
        """
        method = parse_method(name, (0,))
        config, own = method.config, method.own
        codebook = None if own else inputs.codebook(config)
        order = inputs.order if in_order else None
        timed, oracle = backends(self.device)

        def tensors(index: int, dtype: torch.dtype) -> Row:
            sinks = inputs.sinks(num_sinks)[index] if num_sinks else (None, None)
            names = ("query", "key", "value", "sink_key", "sink_value")
            pairs = zip(names, (*inputs.sets[index], *sinks), strict=True)
            tokens = {name: None if x is None else x.to(dtype) for name, x in pairs}
            return tokens | {"codebook": codebook, "query_order": order}

        def attended(index: int, dtype: torch.dtype, backend: str) -> Tensor:
            given = tensors(index, dtype)
            return avq_attention(**given, **asdict(config.spec), backend=backend)

        def expected() -> Tensor:
            return attended(0, torch.float32, oracle)

        def run(index: int) -> Tensor:
            return attended(index, self.dtype, timed)

        columns = config.columns
        if columns is None:
            call = Tensors.of(**tensors(0, self.dtype))
            columns = mean_columns(attend(call, config.spec, timed).shown)

        suffix = f", {num_sinks} sinks" if num_sinks else ""
        has_stored = own and config.num_refined is not None
        stored = replace(config, codewords="stored") if has_stored else None
        return Contender(
            method_name(config, own=own) + suffix,
            run,
            expected,
            {
                "config": config_label(config, own=own),
                "effective_codewords": columns,
                "sinks": num_sinks,
            },
            method_name(stored) + suffix if stored else None,
            has_stages=not num_sinks and config.num_refined is not None,
        )

    @torch.no_grad()
    def rows(self, contenders: Sequence[Contender], inputs: Inputs) -> list[Row]:
        """Check every contender's output, then time the correct ones in turns."""
        rows: list[Row] = []
        timed: list[tuple[Row, Contender]] = []
        shape = inputs.shape
        for contender in contenders:
            row: Row = {
                "method": contender.name,
                "batch": shape.batch,
                "heads": shape.num_heads,
                "tokens": shape.num_tokens,
                "head_dim": shape.head_dim,
                "dtype": str(self.dtype).removeprefix("torch."),
                "input_sets": inputs.count,
                "ms": None,
                **contender.facts,
            }
            rows.append(row)
            try:
                row |= _checked(contender)
            except (RuntimeError, ValueError) as error:
                row["note"] = str(error).splitlines()[0]
            else:
                timed.append((row, contender))
        runs = [contender.run for _, contender in timed]
        timings = time_in_turns(runs, inputs.count, self.device, self.effort)
        for (row, contender), timing in zip(timed, timings, strict=True):
            row |= timing
            if self.cuda and contender.has_stages:
                row |= stage_times(contender.run, inputs.count)
        for row, contender in timed:
            row["over_sdpa"] = over(row, rows, DEFAULT_SDPA)
            row["over_stored"] = over(row, rows, contender.stored)
        return rows


def backends(device: torch.device) -> tuple[str, str]:
    """The backend that is timed, and the oracle that it is checked against."""
    return ("triton", "torch") if device.type == "cuda" else ("torch", "reference")


def _checked(contender: Contender) -> Row:
    """The largest error of a contender's outputs.

    Raises:
        RuntimeError: the error is too large, or the contender cannot run.
    """
    found = contender.run(0)
    if contender.expected is None:
        return {}
    expected = contender.expected()
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    errors = [relative_error(x[:, :, : y.shape[2]], y) for x, y in pairs]
    error = torch.tensor(errors).max().item()  # Python's max drops NaN
    if not error <= TOLERANCE:
        raise RuntimeError(f"wrong output: relative error {error:.3g}")
    return {"error": error}


def stage_times(run: Callable[[int], Any], num_sets: int) -> Row:
    """Mean kernel time of both stages in ms, without gaps between launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for index in range(PROFILED_CALLS):
            run(index % num_sets)
        torch.cuda.synchronize()
    stages = {"precompute_ms": 0.0, "attention_ms": 0.0}
    for kernel in profiler.key_averages():
        is_attention = kernel.key.startswith(("select_kernel", "attend_kernel"))
        stage = "attention_ms" if is_attention else "precompute_ms"
        stages[stage] += kernel.device_time_total / 1e3 / PROFILED_CALLS
    return stages

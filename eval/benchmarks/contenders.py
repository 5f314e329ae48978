"""What is timed alone: AVQ and the attention that it rivals.

Each contender is first checked against its own oracle: exact attention in fp32, or AVQ by another
backend. A contender with wrong output gets no time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from avq_diffusers import avq_attention
from avq_diffusers.attention.orders import query_order
from eval.benchmarks.inputs import KeySource, Shape
from eval.benchmarks.timing import Effort, time_in_turns
from eval.benchmarks.unfused import flat_kernel, flat_sdpa, unfused_precompute
from eval.names import MethodName, config_label, method_name, parse_method

Row = dict[str, Any]
Pair = tuple[Tensor, Tensor]
InputSets = Sequence[tuple[Tensor, Tensor, Tensor]]

DEFAULT_SDPA = "default SDPA"
FUSED_SDPA = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Far above what fp16 and a near-tie between parents cost, far below what another method gives.
TOLERANCE = 0.05
CHECKED_QUERIES = 64
PROFILED_CALLS = 20


@dataclass(frozen=True)
class Contender:
    """What one row times.

    Attributes:
        name: name of the row.
        run: attends on input set i and returns (B, H, N, D).
        expected: returns the right output for the first set, or for its first queries only; None
            leaves the output unchecked.
        facts: further fields of the row.
        stored: name of the row of stored codewords that this one is compared to, if any.
        has_stages: whether the row has the times of both stages on CUDA.
    """

    name: str
    run: Callable[[int], Any]
    expected: Callable[[], Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stored: str | None = None
    has_stages: bool = False


class Bench:
    """Build and time contenders on one device, in `dtype` on CUDA and in float32 elsewhere."""

    def __init__(
        self, device: torch.device, effort: Effort, dtype: torch.dtype = torch.float16
    ) -> None:
        self.device, self.effort = device, effort
        self.cuda = device.type == "cuda"
        self.dtype = dtype if self.cuda else torch.float32
        self.backend, self.oracle = ("triton", "torch") if self.cuda else ("torch", "reference")
        self._sources: dict[tuple[int, int], KeySource] = {}

    def source(self, shape: Shape) -> KeySource:
        sizes = shape.num_heads, shape.head_dim
        if sizes not in self._sources:
            self._sources[sizes] = KeySource(*sizes, self.device)
        return self._sources[sizes]

    def input_sets(self, shape: Shape, hot_share: float = 0.0) -> InputSets:
        """As many input sets as overflow the L2 cache three times over, at most 32."""
        count = 2
        if self.cuda:
            elements = shape.batch * shape.num_heads * shape.num_tokens * shape.head_dim
            bytes_moved = 4 * elements * self.dtype.itemsize
            l2_size = torch.cuda.get_device_properties(self.device).L2_cache_size
            count = min(32, math.ceil(3 * l2_size / bytes_moved))
        source = self.source(shape)
        return [source.inputs(shape, self.dtype, hot_share) for _ in range(count)]

    def sinks(self, shape: Shape, count: int, num_sets: int) -> list[Pair]:
        """`count` keys and values for each input set, as those of text."""
        text = replace(shape, num_tokens=count)
        return [self.source(shape).inputs(text, self.dtype)[1:] for _ in range(num_sets)]

    def order(self, shape: Shape) -> Tensor:
        """Gilbert order on a square grid where N is a square, else on a row."""
        side = math.isqrt(shape.num_tokens)
        grid = (side, side) if side * side == shape.num_tokens else (1, shape.num_tokens)
        return query_order(*grid, "gilbert", self.device)

    def exact(self, sets: InputSets) -> list[Contender]:
        """Default SDPA, FlashAttention-2 and cuDNN."""

        @cache
        def expected() -> Tensor:
            query, key, value = (tensor.float() for tensor in sets[0])
            logits = query[:, :, :CHECKED_QUERIES] @ key.transpose(2, 3)
            return (logits * query.shape[-1] ** -0.5).softmax(-1) @ value

        def default(index: int) -> Tensor:
            return F.scaled_dot_product_attention(*sets[index])

        def fused(name: str, index: int) -> Tensor:
            if not self.cuda:
                raise RuntimeError(f"{name} needs a CUDA device")
            with sdpa_kernel(FUSED_SDPA[name]):
                return default(index)

        runs = {DEFAULT_SDPA: default, **{name: partial(fused, name) for name in FUSED_SDPA}}
        return [Contender(name, run, expected) for name, run in runs.items()]

    def avq(
        self,
        shape: Shape,
        sets: InputSets,
        method: str | MethodName,
        order: Tensor | None = None,
        *,
        sinks: Sequence[Pair] = (),
    ) -> Contender:
        """The operation by a configuration: codewords are stored, or with `/own` the call's keys.

        Its row has the times of both stages where it has kernels and neither sinks nor exact keys.
        """
        method = parse_method(method, (0,)) if isinstance(method, str) else method
        config, own = method.config, method.own
        codebook = None if own else self.source(shape).codebook(config)
        attend = partial(
            avq_attention, codebook=codebook, query_order=order, **config.attention_arguments
        )

        def sink_tensors(index: int) -> dict[str, Tensor]:
            return dict(zip(("sink_key", "sink_value"), sinks[index], strict=True)) if sinks else {}

        @cache
        def expected() -> Tensor:
            text = {name: tensor.float() for name, tensor in sink_tensors(0).items()}
            return attend(*(tensor.float() for tensor in sets[0]), **text, backend=self.oracle)

        def run(index: int) -> Tensor:
            return attend(*sets[index], **sink_tensors(index), backend=self.backend)

        num_sinks = sinks[0][0].shape[2] if sinks else 0
        return Contender(
            method_name(config, own=own) + (f", {num_sinks} sinks" if sinks else ""),
            run,
            expected,
            {
                "config": config_label(config, own=own),
                "effective_codewords": config.effective_codewords,
                "sinks": num_sinks,
            },
            method_name(replace(config, codewords="stored", num_updates=0)) if own else None,
            has_stages=not num_sinks and not config.exact_keys,
        )

    def unfused(self, shape: Shape, sets: InputSets, method: str) -> list[Contender]:
        """Compiled precompute in PyTorch, attention by our kernel (paper, Tab. speed_scaling).

        Off CUDA, nothing is compiled and SDPA attends.
        """
        fused, config = self.avq(shape, sets, method), parse_method(method, (0,)).config
        codebook = self.source(shape).codebook(config)
        codewords = codebook.parents.to(self.dtype)
        bias = -0.5 * codewords.float().square().sum(-1)[:, None]
        facts: Row = {"effective_codewords": config.effective_codewords}
        precompute, attend = unfused_precompute, partial(flat_sdpa, codebook)
        if self.cuda:
            precompute = torch.compile(unfused_precompute, dynamic=False)
            attend = flat_kernel(config, codebook, self.dtype)
        else:
            facts["note"] = "precompute not compiled; attention by SDPA"

        def run(one_hot: bool, index: int) -> Tensor:
            query, key, value = sets[index]
            return attend(query, *precompute(key, value, codewords, bias, one_hot=one_hot))

        return [
            Contender(f"unfused {fused.name} ({way})", partial(run, one_hot), fused.expected, facts)
            for way, one_hot in (("one-hot", True), ("scatter", False))
        ]

    @torch.no_grad()
    def rows(self, shape: Shape, contenders: Sequence[Contender], num_sets: int) -> list[Row]:
        """Check the output of every contender, then time those that are right in turns."""
        rows: list[Row] = []
        timed: list[tuple[Row, Contender]] = []
        for contender in contenders:
            row: Row = {
                "method": contender.name,
                "batch": shape.batch,
                "heads": shape.num_heads,
                "tokens": shape.num_tokens,
                "head_dim": shape.head_dim,
                "dtype": str(self.dtype).removeprefix("torch."),
                "input_sets": num_sets,
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
        timings = time_in_turns(runs, num_sets, self.device, self.effort)
        times = {
            row["method"]: timing["ms"] for (row, _), timing in zip(timed, timings, strict=True)
        }
        for (row, contender), timing in zip(timed, timings, strict=True):
            row |= timing
            if self.cuda and contender.has_stages:
                row |= stage_times(contender.run, num_sets)
            for name, other in (("over_stored", contender.stored), ("over_sdpa", DEFAULT_SDPA)):
                if other in times:
                    row[name] = row["ms"] / times[other]
        return rows


def _checked(contender: Contender) -> Row:
    """The largest error of a contender's outputs.

    Raises:
        RuntimeError: it is too large, or the contender cannot run.
    """
    found = contender.run(0)
    if contender.expected is None:
        return {}
    expected = contender.expected()
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    errors = [relative_error(x[:, :, : y.shape[2]], y) for x, y in pairs]
    error = torch.tensor(errors).max().item()  # Python's maximum loses NaN
    if not error <= TOLERANCE:
        raise RuntimeError(f"wrong output: relative error {error:.3g}")
    return {"error": error}


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Root mean square error over the root mean square of what is expected."""
    expected = expected.float()
    return float((output.float() - expected).norm() / expected.norm())


def stage_times(run: Callable[[int], Any], num_sets: int) -> Row:
    """Mean time in ms of the kernels of both stages, without what passes between launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for index in range(PROFILED_CALLS):
            run(index % num_sets)
        torch.cuda.synchronize()
    stages = {"precompute_ms": 0.0, "attention_ms": 0.0}
    for kernel in profiler.key_averages():
        stage = "attention_ms" if kernel.key.startswith("attention_kernel") else "precompute_ms"
        stages[stage] += kernel.device_time_total / 1e3 / PROFILED_CALLS
    return stages

"""The contenders of `python -m eval bench kernels`: AVQ and the attention that it rivals.

Each contender is first checked against its own oracle: exact attention in fp32, or AVQ by another
backend. A contender with wrong output gets no time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from avq_diffusers import AVQConfig, avq_attention
from avq_diffusers.attention.spec import Spec, Tensors
from avq_diffusers.attention.triton import codewords as tables
from avq_diffusers.codebook.codebook import Codebook
from eval.benchmarks.inputs import KeySource, Shape
from eval.benchmarks.timing import Effort, time_in_turns
from eval.names import config_label, method_name

Row = dict[str, Any]
InputSets = Sequence[tuple[Tensor, Tensor, Tensor]]
Pair = tuple[Tensor, Tensor]

DEFAULT_SDPA = "default SDPA"
FUSED_SDPA = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Far above what fp16 and a near-tie between parents cost, far below what another method gives.
TOLERANCE = 0.05
CHECKED_QUERIES = 64


@dataclass(frozen=True)
class Contender:
    """What one row times.

    Attributes:
        name: name of the row.
        run: attends on input set i and returns (B, H, N, D).
        expected: returns the right output for the first set, or for its first queries only.
        facts: further fields of the row.
        stored: name of the row of stored codewords that this one is compared to, if any.
        stages: parts of `run` to time as well, by field of the row.
    """

    name: str
    run: Callable[[int], Tensor]
    expected: Callable[[], Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    stored: str | None = None
    stages: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)


class Bench:
    """Build and time contenders on one device, in `dtype` on CUDA and in float32 elsewhere."""

    def __init__(
        self, device: torch.device, effort: Effort, dtype: torch.dtype = torch.float16
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.dtype = dtype if self.cuda else torch.float32
        self.backend, self.oracle = ("triton", "torch") if self.cuda else ("torch", "reference")
        self.effort = effort
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
        source = self.source(shape)
        return [source.inputs(text, self.dtype)[1:] for _ in range(num_sets)]

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
                return F.scaled_dot_product_attention(*sets[index])

        return [
            Contender(DEFAULT_SDPA, default, expected),
            *(Contender(name, partial(fused, name), expected) for name in FUSED_SDPA),
        ]

    def avq(
        self,
        shape: Shape,
        sets: InputSets,
        config: AVQConfig,
        order: Tensor | None = None,
        *,
        own: bool = False,
        sinks: Sequence[Pair] = (),
    ) -> Contender:
        """The operation, and its two stages where it has kernels and neither sinks nor exact keys.

        Codewords are stored ones, or with `own` from the keys of the call.
        """
        codebook = None if own else self.source(shape).codebook(config)
        attend = partial(
            avq_attention,
            codebook=codebook,
            query_order=order,
            **config.attention_arguments,
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
        has_stages = self.cuda and not num_sinks and not config.exact_keys
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
            kernel_stages(sets, config, codebook, order) if has_stages else {},
        )

    def unfused(
        self, shape: Shape, sets: InputSets, config: AVQConfig, expected: Callable[[], Tensor]
    ) -> list[Contender]:
        """Compiled precompute in PyTorch, attention by our kernel (paper, Tab. speed_scaling).

        Off CUDA, nothing is compiled and SDPA attends.
        """
        codebook = self.source(shape).codebook(config)
        codewords = codebook.parents.to(self.dtype)
        bias = -0.5 * codewords.float().square().sum(-1)[:, None]
        facts: Row = {"effective_codewords": config.effective_codewords}
        if self.cuda:
            precompute = torch.compile(unfused_precompute, dynamic=False)
            attend = flat_kernel(config, codebook, self.dtype)
        else:
            precompute = unfused_precompute
            attend = partial(_flat_sdpa, codebook)
            facts["note"] = "precompute not compiled; attention by SDPA"

        def run(one_hot: bool, index: int) -> Tensor:
            query, key, value = sets[index]
            return attend(query, *precompute(key, value, codewords, bias, one_hot=one_hot))

        name = f"unfused {method_name(config)}"
        return [
            Contender(f"{name} (one-hot)", partial(run, True), expected, facts),
            Contender(f"{name} (scatter)", partial(run, False), expected, facts),
        ]

    @torch.no_grad()
    def rows(self, shape: Shape, contenders: Sequence[Contender], num_sets: int) -> list[Row]:
        """Check the output of every contender, then time those that are right in turns."""
        rows: list[Row] = []
        timed: list[tuple[Row, str, Callable[[int], Any]]] = []
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
                output, expected = contender.run(0), contender.expected()
            except (RuntimeError, ValueError) as error:
                row["note"] = str(error).splitlines()[0]
                continue
            row["error"] = relative_error(output[:, :, : expected.shape[2]], expected)
            if not row["error"] <= TOLERANCE:
                row["note"] = f"wrong output: relative error {row['error']:.3g}"
                continue
            timed.append((row, "ms", contender.run))
            timed += [(row, name, stage) for name, stage in contender.stages.items()]
        timings = time_in_turns([run for *_, run in timed], num_sets, self.device, self.effort)
        for (row, name, _), timing in zip(timed, timings, strict=True):
            row.update(timing if name == "ms" else {name: timing["ms"]})
        times = {row["method"]: row["ms"] for row in rows}
        for row, contender in zip(rows, contenders, strict=True):
            if row["ms"] and times.get(contender.stored):
                row["over_stored"] = row["ms"] / times[contender.stored]
        return rows


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Root mean square error over the root mean square of what is expected."""
    expected = expected.float()
    return float((output.float() - expected).norm() / expected.norm())


def kernel_stages(
    sets: InputSets, config: AVQConfig, codebook: Codebook | None, order: Tensor | None
) -> dict[str, Callable[[int], Any]]:
    """The two kernel stages apart, on the codewords that the operation packs or on own ones."""
    from avq_diffusers.attention.triton.attention import attention_launch
    from avq_diffusers.attention.triton.launch import Plan, address
    from avq_diffusers.attention.triton.precompute import precompute_launches
    from avq_diffusers.attention.triton.problem import Problem, addresses_of, readable

    device, dtype = sets[0][0].device, sets[0][0].dtype
    stored = None if codebook is None else _packed(codebook, dtype)

    @cache
    def stages(index: int) -> tuple[dict[str, Any], Plan, Plan]:
        key_order = order if stored is None else None
        tensors = readable(Tensors(*sets[index], *(None,) * 4, order, key_order))
        problem = Problem.of(tensors, stored, None, _spec(config, tensors.query.shape[-1]))
        first = precompute_launches(problem)
        second = attention_launch(problem, first.pointers)
        plans = Plan(first.parts, first.launches), Plan(second.parts, [second.launch])
        return addresses_of(tensors, stored, None), *plans

    def aggregate(index: int) -> Tensor:
        given, plan, _ = stages(index)
        return plan.run(given, device)

    # Filled by the calls before the graph is captured, which reads what they leave here.
    aggregates = cache(aggregate)

    def attend(index: int) -> Tensor:
        given, first, plan = stages(index)
        left = {name: address(first.part(aggregates(index), name)) for name in first.parts}
        output = torch.empty_like(sets[index][0].transpose(1, 2).contiguous())
        plan.run(given | left | {"output": address(output)}, device)
        return output.transpose(1, 2)

    return {"precompute_ms": aggregate, "attention_ms": attend}


def _spec(config: AVQConfig, head_dim: int) -> Spec:
    return Spec(
        **asdict(config.sizes),
        num_updates=0,
        query_tile=config.query_tile,
        means=config.codewords == "means",
        scale=head_dim**-0.5,
    )


def unfused_precompute(
    key: Tensor, value: Tensor, codewords: Tensor, bias: Tensor, *, one_hot: bool
) -> tuple[Tensor, Tensor]:
    """Flat VQ in plain PyTorch: assign each key to its nearest codeword, then average the values.

    Args:
        key, value: (B, H, N, D).
        codewords: (H, M, D) of the same dtype.
        bias: (H, 1, M) fp32, minus half the squared norms of the codewords.
        one_hot: multiply by one-hot assignments instead of scattering.

    Returns:
        means: (B, H, M, D), dtype of `value`, zero for codewords without keys.
        counts: (B, H, M) fp32.
    """
    num_codewords, head_dim = codewords.shape[1:]
    logits = (key @ codewords.transpose(1, 2)).float() + bias
    assignment = logits.argmax(-1)
    if one_hot:
        hot = assignment[..., None] == torch.arange(num_codewords, device=key.device)
        counts = hot.sum(2, dtype=torch.float32)
        sums = (hot.to(value.dtype).transpose(2, 3) @ value).float()
    else:
        counts = logits.new_zeros(*assignment.shape[:2], num_codewords)
        counts = counts.scatter_add(2, assignment, torch.ones_like(assignment, dtype=counts.dtype))
        sums = counts.new_zeros(*counts.shape, head_dim)
        sums = sums.scatter_add(2, assignment[..., None].expand_as(value), value.float())
    return (sums / counts.clamp(min=1)[..., None]).to(value.dtype), counts


def flat_kernel(
    config: AVQConfig, codebook: Codebook, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Our kernel's attention of queries over means (B, H, M, D) and counts (B, H, M)."""
    from avq_diffusers.attention.triton.attention import attention_launch
    from avq_diffusers.attention.triton.launch import Plan, address
    from avq_diffusers.attention.triton.precompute import precompute_launches
    from avq_diffusers.attention.triton.problem import Problem, addresses_of, readable

    stored = _packed(codebook, dtype)
    spec = _spec(config, codebook.head_dim)._replace(means=False, num_children=0, num_refined=0)

    def attend(query: Tensor, means: Tensor, counts: Tensor) -> Tensor:
        tensors = readable(Tensors(query, query, query, *(None,) * 6))
        problem = Problem.of(tensors, stored, None, spec)
        first = precompute_launches(problem)
        second = attention_launch(problem, first.pointers)
        # Rows of the kernel: every parent, padding, then what stays with parents, unread here.
        (_, _, rows, columns), _ = first.parts["mean_values"]
        (_, _, num_counts), _ = first.parts["log_counts"]
        means = F.pad(means.to(dtype), (0, columns - means.shape[3]), value=1.0)
        means = F.pad(means, (0, 0, 0, rows - means.shape[2]))
        log_counts = F.pad(counts.log2(), (0, num_counts - counts.shape[2]), value=-math.inf)
        output = torch.empty_like(query.transpose(1, 2).contiguous())
        given = {"mean_values": means, "log_counts": log_counts, "output": output}
        addresses = {name: address(x.contiguous()) for name, x in given.items()}
        plan = Plan(second.parts, [second.launch])
        plan.run(addresses_of(tensors, stored, None) | addresses, query.device)
        return output.transpose(1, 2)

    return attend


def _flat_sdpa(codebook: Codebook, query: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    keys = codebook.parents.to(query.dtype).expand(len(query), -1, -1, -1)
    log_counts = counts.log().to(query.dtype)[:, :, None]
    return F.scaled_dot_product_attention(query, keys, means, attn_mask=log_counts)


def _packed(codebook: Codebook, dtype: torch.dtype) -> tables.StoredCodes:
    """The codewords as the operation packs them for inputs of `dtype`."""
    return tables.pack(
        codebook.parents,
        codebook.children,
        scale=codebook.head_dim**-0.5,
        dtype=dtype,
    )

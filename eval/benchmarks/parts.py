"""The parts of `python -m eval bench kernels` and `bench attention`, as data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.benchmarks.contenders import Bench, Contender, Row
from eval.benchmarks.inputs import Inputs, Shape

MOST_EXACT_TOKENS = 16384  # for unchecked parts, which may run on a CPU
TEXT = 512  # text tokens of Flux


@dataclass(frozen=True)
class Sizes:
    """What a part runs: every method at every shape."""

    shapes: Sequence[Shape]
    methods: Sequence[str]


@dataclass(frozen=True)
class BenchmarkPart:
    """How a part runs its methods.

    Attributes:
        texts: numbers of text tokens, which are sinks; methods run with each, exact attention with
            the last.
        in_order: whether queries are in Gilbert order.
        cuda_dtype: dtype on CUDA, in place of the bench's.
        has_gradients: whether gradients of query, key and value are timed, on one set of inputs.
        is_checked: whether outputs are checked; if not, one set of inputs is timed, and of exact
            attention only PyTorch's default.
    """

    texts: Sequence[int] = (0,)
    in_order: bool = False
    cuda_dtype: torch.dtype | None = None
    has_gradients: bool = False
    is_checked: bool = True

    def contenders(self, bench: Bench, methods: Sequence[str], inputs: Inputs) -> list[Contender]:
        found = bench.exact(inputs, self.texts[-1])
        if not self.is_checked:
            found = found[:1] if inputs.shape.num_tokens <= MOST_EXACT_TOKENS else []
        for method in methods:
            for num_sinks in self.texts:
                way = {"num_sinks": num_sinks, "in_order": self.in_order}
                found.append(bench.avq(inputs, method, **way))
        if self.has_gradients or not self.is_checked:
            found = [replace(x, has_stages=False) for x in found]
        return found if self.is_checked else [replace(x, expected=None) for x in found]


PARTS = {
    "table": BenchmarkPart(),  # the paper's Tab. speed_scaling
    "sd15": BenchmarkPart(in_order=True),
    "joint": BenchmarkPart(texts=(0, TEXT), in_order=True, cuda_dtype=torch.bfloat16),  # Flux
    "gradients": BenchmarkPart(in_order=True, has_gradients=True),
    # The definition would take longer than everything timed.
    "attention": BenchmarkPart(in_order=True, is_checked=False),
}
KERNEL_PARTS = "table", "sd15", "joint", "gradients"
FULL = {
    "table": Sizes(
        [Shape(4, 12, num_tokens, 64) for num_tokens in (1024, 4096, 16384, 65536)],
        (
            *("M256/stored", "M512/stored", "M64P8C8/stored", "M64P16C8/stored", "M64P16C8"),
            *("M128P8C8/stored", "M128P16C8/stored"),
        ),
    ),
    "sd15": Sizes(
        [Shape(2, 8, n, 40) for n in (4096, 16384, 65536)]
        + [Shape(2, 8, n, 80) for n in (4096, 16384)],
        ("M64P16C8/stored", "M64P16C8"),
    ),
    "joint": Sizes([Shape(1, 24, n, 128) for n in (4096, 16384)], ("M64P16C8", "M64C8T1e-4")),
    # SD1.5 at 512 px: level 0 with 4 and 12 images, level 1 with 12. Then level 0 at 1024 px, level
    # 1 of SDXL, and a DiT.
    "gradients": Sizes(
        [
            *(Shape(4, 8, 4096, 40), Shape(12, 8, 4096, 40), Shape(12, 8, 1024, 80)),
            *(Shape(4, 8, 16384, 40), Shape(4, 10, 4096, 64), Shape(2, 24, 4096, 128)),
        ],
        ("M64P16C8", "M64C8T1e-4", "M128P32C8"),
    ),
}
TINY = dict.fromkeys(
    FULL,
    Sizes([Shape(1, 2, 64, 16), Shape(1, 2, 150, 16)], ("M8/stored", "M4P2C2/stored", "M4P2C2")),
)


def part_rows(bench: Bench, name: str, sizes: Mapping[str, Sizes]) -> Iterator[list[Row]]:
    """Time a part at its sizes, one list of rows per shape."""
    part, methods = PARTS[name], sizes[name].methods
    bench = replace(bench, cuda_dtype=part.cuda_dtype or bench.cuda_dtype)
    is_single = part.has_gradients or not part.is_checked
    for shape in sizes[name].shapes:
        inputs = bench.inputs(shape, 1 if is_single else None)
        contenders = part.contenders(bench, methods, inputs)
        rows = gradient_rows if part.has_gradients else Bench.rows
        yield rows(bench, contenders, inputs)


def gradient_rows(bench: Bench, contenders: Sequence[Contender], inputs: Inputs) -> list[Row]:
    """Time forward passes, then passes with gradients; exact attention's are not checked."""
    (tensors,) = inputs.sets
    grad = torch.randn_like(tensors[0])
    for tensor in tensors:
        tensor.requires_grad_()

    def with_gradients(contender: Contender) -> Contender:
        @torch.enable_grad()
        def run(index: int) -> tuple[Tensor, ...]:
            return torch.autograd.grad(contender.run(index), tensors, grad)

        @torch.enable_grad()
        def expected() -> tuple[Tensor, ...]:
            return torch.autograd.grad(contender.expected(), tensors, grad.float())

        return replace(contender, run=run, expected=contender.expected and expected)

    forward = [x if "config" in x.facts else replace(x, expected=None) for x in contenders]
    before = bench.rows(forward, inputs)
    after = bench.rows([with_gradients(contender) for contender in forward], inputs)
    return [{**row, "forward_ms": x["ms"]} for x, row in zip(before, after, strict=True)]

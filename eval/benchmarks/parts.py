"""The parts of `python -m eval bench kernels`, `bench attention` and `bench gradients`.

A part yields the rows of one size after the other. Its sizes and methods are data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.benchmarks.contenders import Bench, Contender, InputSets, Row
from eval.benchmarks.inputs import Shape
from eval.names import parse_method

HOT_SHARE = 0.3
SKEWED = ", skewed keys"
MOST_EXACT_TOKENS = 16384  # of `attention`, which also runs on a CPU
NUM_SINKS = 512  # the text of Flux


@dataclass(frozen=True)
class Sizes:
    """What a part runs: every method at every shape."""

    shapes: Sequence[Shape]
    methods: Sequence[str]


def _paper_shapes(*tokens: int) -> list[Shape]:
    return [Shape(4, 12, num_tokens, 64) for num_tokens in tokens]


FLAT_SIZES = ("M64", "M128", "M160", "M256", "M512")
ADAPTIVE_SIZES = ("M32P8C8", "M64P8C8", "M64P16C8", "M128P16C8", "M128P32C8")
FULL = {
    "table": Sizes(
        _paper_shapes(1024, 4096, 16384, 65536),
        ("M256", "M512", "M64P8C8", "M64P16C8", "M64P16C8/own", "M128P8C8", "M128P16C8"),
    ),
    "sd15": Sizes(
        [Shape(2, 8, n, 40) for n in (4096, 16384, 65536)]
        + [Shape(2, 8, n, 80) for n in (4096, 16384)],
        ("M64P16C8", "M64P16C8/own"),
    ),
    "joint": Sizes(
        [Shape(1, 24, n, 128) for n in (4096, 16384)], ("M64P16C8/own", "M64P16C8E256/own")
    ),
    "codewords": Sizes(_paper_shapes(4096, 16384, 65536), FLAT_SIZES + ADAPTIVE_SIZES),
    "tokens": Sizes(_paper_shapes(*(2**power for power in range(12, 19))), ("M64P16C8", "M256")),
    # SD1.5 at 512 px: level 0 with 4 and 12 images, level 1 with 12. Level 0 at 1024 px, level 1
    # of SDXL, and a DiT.
    "gradients": Sizes(
        [
            *(Shape(4, 8, 4096, 40), Shape(12, 8, 4096, 40), Shape(12, 8, 1024, 80)),
            *(Shape(4, 8, 16384, 40), Shape(4, 10, 4096, 64), Shape(2, 24, 4096, 128)),
        ],
        ("M64P16C8/own", "M64P16C8E256/own", "M128P32C8/own"),
    ),
}
TINY = {
    "table": Sizes([Shape(1, 2, 64, 16), Shape(1, 2, 150, 16)], ("M8", "M4P2C2", "M4P2C2/own")),
    "sd15": Sizes([Shape(2, 2, 64, 40)], ("M4P2C2", "M4P2C2/own")),
    "joint": Sizes([Shape(1, 2, 64, 32)], ("M4P2C2/own", "M4P2C2E8/own")),
    "codewords": Sizes([Shape(1, 2, 64, 16)], ("M4", "M16", "M4P2C2", "M8P4C2")),
    "tokens": Sizes([Shape(1, 2, 64, 16), Shape(1, 2, 256, 16)], ("M4P2C2",)),
    "gradients": Sizes([Shape(1, 2, 64, 16)], ("M4P2C2/own",)),
}


def table_part(bench: Bench, sizes: dict[str, Sizes]) -> Iterator[list[Row]]:
    """The paper's Tab. speed_scaling, one list of rows per N."""
    for shape in sizes["table"].shapes:
        torch.compiler.reset()  # the unfused baseline is compiled for every size
        sets = bench.input_sets(shape)
        contenders = bench.exact(sets)
        for method in sizes["table"].methods:
            contenders.append(bench.avq(shape, sets, method))
            if not parse_method(method, (0,)).config.num_children:
                contenders += bench.unfused(shape, sets, method)
        yield bench.rows(shape, contenders, len(sets))


def sd15_part(bench: Bench, sizes: dict[str, Sizes]) -> Iterator[list[Row]]:
    """SD1.5's self-attention in Gilbert order, stored and own codewords, even and skewed keys."""
    for shape in sizes["sd15"].shapes:
        order = bench.order(shape)
        even, hot = bench.input_sets(shape), bench.input_sets(shape, HOT_SHARE)
        contenders = bench.exact(even)
        for method in sizes["sd15"].methods:
            for sets, keys, suffix in ((even, "uniform", ""), (hot, "skewed", SKEWED)):
                one = bench.avq(shape, sets, method, order)
                stored = one.stored and f"{one.stored}{suffix}"
                facts = {**one.facts, "keys": keys}
                contenders.append(
                    replace(one, name=f"{one.name}{suffix}", facts=facts, stored=stored)
                )
        yield bench.rows(shape, contenders, len(even))


def joint_part(bench: Bench, sizes: dict[str, Sizes]) -> Iterator[list[Row]]:
    """Image queries of Flux in Gilbert order, in bf16: with the text's keys as sinks and without.

    Exact attention has the keys of image and text.
    """
    bench = Bench(bench.device, bench.effort, torch.bfloat16)
    for shape in sizes["joint"].shapes:
        order, sets = bench.order(shape), bench.input_sets(shape)
        sinks = bench.sinks(shape, NUM_SINKS, len(sets))
        joint = [
            (query, *(torch.cat(pair, 2) for pair in zip((key, value), text, strict=True)))
            for (query, key, value), text in zip(sets, sinks, strict=True)
        ]
        contenders = bench.exact(joint)
        for method in sizes["joint"].methods:
            for text in ((), sinks):
                one = bench.avq(shape, sets, method, order, sinks=text)
                contenders.append(replace(one, stored=None))
        yield bench.rows(shape, contenders, len(sets))


def scaling_part(bench: Bench, sizes: dict[str, Sizes]) -> Iterator[list[Row]]:
    """Time against effective codewords, then against N."""
    for against in ("codewords", "tokens"):
        for shape in sizes[against].shapes:
            sets = bench.input_sets(shape)
            contenders = [bench.avq(shape, sets, method) for method in sizes[against].methods]
            rows = bench.rows(shape, contenders, len(sets))
            yield [{"against": against, **row} for row in rows]


def attention_part(bench: Bench, sizes: dict[str, Sizes]) -> Iterator[list[Row]]:
    """AVQ of stored and of own codewords and default SDPA, on one set of inputs.

    Outputs are not checked: the definition would take longer than all that is timed.
    """
    for shape in sizes["attention"].shapes:
        sets, order = bench.input_sets(shape)[:1], bench.order(shape)
        contenders = bench.exact(sets)[:1] if shape.num_tokens <= MOST_EXACT_TOKENS else []
        contenders += [bench.avq(shape, sets, x, order) for x in sizes["attention"].methods]
        unchecked = [replace(one, expected=None, has_stages=False) for one in contenders]
        yield bench.rows(shape, unchecked, 1)


def gradients_part(bench: Bench, sizes: dict[str, Sizes]) -> Iterator[list[Row]]:
    """Forward passes, then those with the gradients of query, key and value."""
    for shape in sizes["gradients"].shapes:
        order = bench.order(shape)
        sets = [tuple(x.requires_grad_() for x in bench.input_sets(shape)[0])]
        grad = torch.randn_like(sets[0][0])
        exact = [replace(one, expected=None) for one in bench.exact(sets)]
        own = [bench.avq(shape, sets, method, order) for method in sizes["gradients"].methods]
        forward = [replace(one, stored=None, has_stages=False) for one in (*exact, *own)]
        both = [_with_gradients(one, sets, grad) for one in forward]
        rows = zip(bench.rows(shape, forward, 1), bench.rows(shape, both, 1), strict=True)
        yield [{**after, "forward_ms": before["ms"]} for before, after in rows]


def _with_gradients(contender: Contender, sets: InputSets, grad: Tensor) -> Contender:
    """The contender's output and its gradients."""

    @torch.enable_grad()
    def run(index: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(contender.run(index), sets[0], grad)

    @torch.enable_grad()
    def expected() -> tuple[Tensor, ...]:
        return torch.autograd.grad(contender.expected.__wrapped__(), sets[0], grad.float())

    return replace(contender, run=run, expected=contender.expected and expected)


PARTS = {
    "table": table_part,
    "sd15": sd15_part,
    "joint": joint_part,
    "scaling": scaling_part,
    "attention": attention_part,
    "gradients": gradients_part,
}
KERNEL_PARTS = ("table", "sd15", "joint", "scaling")

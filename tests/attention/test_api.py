"""`avq_attention` at its boundary: refusals, choice of backend, transforms, autocast."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import THRESHOLD, call_of, make_case, relative_error, stored_attention
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from avq_diffusers import avq_attention
from avq_diffusers.attention import limits, reference
from avq_diffusers.attention.api import BACKENDS, attend, resolve_backend
from avq_diffusers.attention.limits import obstacles
from avq_diffusers.attention.schema import arguments_of
from avq_diffusers.codebook.codebook import Codebook

QUERY, KEY, VALUE, CODEBOOK = make_case(dtype=torch.float32)
OWN_SIZES = {"codebook": None, "codewords": "means", "num_parents": 6, "num_children": 3}
# Those of a `Spec` are in `test_config.py`.
REFUSALS = {
    TypeError: [
        ({"query": [1.0]}, "query must be a tensor, but got list."),
        (
            {"value": VALUE.int()},
            "value must be float16, bfloat16, float32 or float64, but got torch.int32.",
        ),
        ({"codebook": CODEBOOK.parents}, "codebook must be a Codebook, but got Tensor."),
        (
            {"key": KEY.half()},
            "key must have the dtype of query, torch.float32, but got torch.float16.",
        ),
        ({"query_order": "gilbert"}, "query_order must be a tensor, but got str."),
        (
            {"query_order": torch.arange(50.0)},
            "query_order must be int32 or int64, but got torch.float32.",
        ),
        ({"num_refined": 2.0}, "num_refined must be an int, but got 2.0 (float)."),
        ({"scale": "1"}, "scale must be a number or None, but got str."),
    ],
    ValueError: [
        (
            {"key": KEY[0]},
            "key must have shape (batch, heads, tokens, head_dim), but got (2, 50, 8).",
        ),
        ({"query": QUERY[:, :, :0]}, "query must not be empty, but got shape (2, 2, 0, 8)."),
        ({"value": VALUE.to("meta")}, "value must be on the device of query, cpu, but got meta."),
        ({"key": KEY[:1]}, "key must have the batch size of query, 2, but got 1."),
        ({"value": VALUE[:, :1]}, "value must have the number of heads of query, 2, but got 1."),
        ({"key": KEY[..., :7]}, "key must have the head dim of query, 8, but got 7."),
        ({"value": VALUE[:, :, :40]}, "value must have as many tokens as key, 50, but got 40."),
        ({"sink_key": KEY}, "sink_key and sink_value must be given together."),
        (
            {"sink_key": KEY, "sink_value": VALUE[:, :, :40]},
            "sink_value must have as many tokens as sink_key, 50, but got 40.",
        ),
        (
            {"codebook": CODEBOOK.to("meta")},
            "codebook must be on the device of query, cpu, but got meta.",
        ),
        (
            {"codebook": Codebook(CODEBOOK.parents[:1], CODEBOOK.children[:1])},
            "codebook must have the number of heads of query, 2, but got 1.",
        ),
        (
            {"codebook": Codebook(CODEBOOK.parents[..., :7], CODEBOOK.children[..., :7])},
            "codebook must have the head dim of query, 8, but got 7.",
        ),
        (
            {"query_order": torch.arange(49)},
            "query_order must have shape (50,), one entry per query, but got (49,).",
        ),
        (
            {"key_order": torch.arange(49)},
            "key_order must have shape (50,), one entry per key, but got (49,).",
        ),
        ({"num_refined": 7}, "num_refined must be at most num_parents, 6, but got 7."),
        ({"scale": math.inf}, "scale must be finite, but got inf."),
        ({"codebook": None}, 'codewords="stored" needs a codebook.'),
        *(
            (
                OWN_SIZES | sizes,
                f"{sizes['num_parents']} parents with {sizes['num_children']} children each need "
                f"at least {least} keys, one for 16 codewords, but got 50.",
            )
            for sizes, least in (
                ({"num_parents": 2**31 - 1, "num_children": 0, "num_refined": 0}, 2**27),
                ({"num_parents": 6, "num_children": 133}, 51),
            )
        ),
        ({"backend": "cuda"}, f"backend must be one of {', '.join(BACKENDS)}, but got 'cuda'."),
    ],
}


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [(error, *case) for error, cases in REFUSALS.items() for case in cases],
)
def test_refusals(error, changes, message):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "codebook": CODEBOOK}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        stored_attention(**{"num_refined": 2} | arguments | changes)


def test_a_codebook_of_other_sizes_is_refused():
    """Catches options that a codebook silently overrules."""
    tensors, spec = call_of(QUERY, KEY, VALUE, CODEBOOK)
    with pytest.raises(ValueError, match="codebook must have 5 parents with 3 children each, but"):
        attend(tensors, replace(spec, num_parents=5))


def test_limits_of_the_kernels_are_said_together():
    tensors, spec = call_of(
        torch.zeros(1, 1, 4, 36), *torch.zeros(2, 1, 1, 4, 36), None, codewords="means"
    )
    spec = replace(spec, query_tile=200, num_children=40)
    reasons = "; ".join(obstacles("triton", tensors, spec))
    for reason in ("8 up to 128, but is 36", "query_tile .* is 200", "num_children .* is 40"):
        assert re.search(reason, reasons)
    assert not obstacles("torch", tensors, spec)


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((7, 5), None, "the GPU's compute capability is below 8.0"),
        ((8, 0), "6.4", "the kernels have only been tried on NVIDIA GPUs"),
        ((8, 6), None, None),
    ],
)
def test_gpus_that_the_kernels_do_not_serve(capability, hip, reason, monkeypatch):
    """Catches a GPU without the instructions, and one of another vendor."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    with FakeTensorMode():
        tokens = torch.empty(1, 1, 4, 40, device="cuda")
        call = call_of(tokens, tokens, tokens, None, codewords="means")
        assert obstacles("triton", *call) == [reason] * (reason is not None)
        assert resolve_backend("auto", *call) == ("torch" if reason else "triton")


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("codebook_dtype", [torch.float16, torch.float64])
def test_dtypes_of_inputs_and_codebook_may_differ(backend, dtype, codebook_dtype):
    query, key, value = (x.to(dtype) for x in (QUERY, KEY, VALUE))
    codebook = CODEBOOK.to(dtype=codebook_dtype)
    output = stored_attention(query, key, value, codebook, num_refined=6, backend=backend)
    assert output.dtype == dtype
    expected = stored_attention(
        *(x.double() for x in (query, key, value)),
        codebook.to(dtype=torch.float64),
        num_refined=6,
        backend="reference",
    )
    assert relative_error(output, expected) < 4 * torch.finfo(dtype).eps


def custom_op_arguments(codebook=CODEBOOK, **options):
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    options = {"query_order": order, "scale": 0.3} | options
    tensors, spec = call_of(QUERY, KEY, VALUE, codebook, **options)
    return arguments_of(tensors, spec)


OWN = {"codebook": None, "codewords": "means"}
SINKS = {"sink_key": KEY[:, :, :7] + 1, "sink_value": VALUE[:, :, :7]}
RESOLVED = OWN | THRESHOLD | SINKS


NO_GRAD, ALL_GRAD, SOME_GRAD = (False,) * 5, (True,) * 5, (False, True, False, True, False)


@pytest.mark.parametrize(
    ("options", "needs_grad"),
    [
        ({"query_order": None, "num_refined": 0}, ALL_GRAD),
        (OWN, SOME_GRAD),
        (RESOLVED, NO_GRAD),
    ],
    ids=lambda x: str(list(x)),
)
def test_opcheck(options, needs_grad):
    arguments = custom_op_arguments(**options)
    tokens = [
        None if x is None else x.detach().requires_grad_(needed)
        for x, needed in zip(arguments[:5], needs_grad, strict=True)
    ]
    torch.library.opcheck(torch.ops.avq_diffusers.attention, (*tokens, *arguments[5:]))


@pytest.mark.parametrize(
    ("options", "needs_grad"),
    [
        ({}, (True, True, True)),
        (OWN, (True, False, True)),
        (RESOLVED, (True, True, True)),
    ],
    ids=lambda x: str(list(x)),
)
def test_opcheck_of_the_gradients(needs_grad, options):
    needed = (*needs_grad, *(needs_grad[1:] if "sink_key" in options else (False, False)))
    arguments = (torch.ones_like(QUERY), *custom_op_arguments(**options), needed, False)
    torch.library.opcheck(torch.ops.avq_diffusers.attention_backward, arguments)


def test_the_fake_kernel_has_the_layout_of_the_real_one():
    contiguous = QUERY.contiguous()
    for query in (QUERY, contiguous, contiguous[:, :, ::2], contiguous[:1].expand(2, -1, -1, -1)):
        arguments = (query, *custom_op_arguments(query_order=None, key_order=None)[1:])
        real = torch.ops.avq_diffusers.attention(*arguments)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = torch.ops.avq_diffusers.attention(mode.from_tensor(query), *arguments[1:])
        for x, y in zip(fake, real, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_autocast_does_not_change_the_definition():
    backend = "reference"
    arguments = (QUERY, KEY, VALUE, CODEBOOK)
    expected = stored_attention(*arguments, num_refined=2, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = stored_attention(*arguments, num_refined=2, backend=backend)
        assert (QUERY @ KEY.mT).dtype == torch.bfloat16
    assert torch.equal(output, expected)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_forward_mode_is_refused(backend):
    """Custom operators drop tangents: catches derivatives that are zero."""

    def run(value):
        return stored_attention(QUERY, KEY, value, CODEBOOK, num_refined=2, backend=backend)

    with pytest.raises(NotImplementedError, match="avq_attention has no forward-mode derivatives"):
        torch.func.jvp(run, (VALUE,), (torch.ones_like(VALUE),))
    with forward_ad.dual_level():  # of other tensors
        assert run(VALUE).isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_output_may_be_changed_in_place(backend):
    """As that of `scaled_dot_product_attention`."""

    def run(value, change):
        value = value.detach().requires_grad_()
        output = stored_attention(QUERY, KEY, value, CODEBOOK, num_refined=2, backend=backend)
        (grad,) = torch.autograd.grad(change(output).square().sum(), value)
        return grad

    expected = run(VALUE, lambda output: 2 * output)
    assert torch.equal(run(VALUE, lambda output: output.mul_(2)), expected)
    assert torch.equal(run(VALUE, lambda output: output.transpose(1, 2).mul_(2)), expected)


def test_transforms_are_refused():
    """Catches PyTorch's messages, which tell a user to change the library."""

    def run(value, backend="torch"):
        options = {"num_refined": 2, "backend": backend}
        return stored_attention(QUERY, KEY, value, CODEBOOK, **options).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(NotImplementedError, match="does not run inside torch"):
            transform(run)(VALUE)
    value = VALUE.detach().requires_grad_()
    (expected,) = torch.autograd.grad(run(value), value, create_graph=True)
    with pytest.raises(NotImplementedError, match="avq_attention is only once differentiable"):
        expected.square().sum().backward()
    grad = torch.func.grad(partial(run, backend="reference"))(VALUE)
    assert relative_error(grad, expected.detach()) < 1e-5


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_is_refused():
    """Catches a trace that keeps the tokens' order and number of its example."""
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace cannot record AVQ"):
        torch.jit.trace(
            lambda *x: stored_attention(*x, CODEBOOK, num_refined=2), (QUERY, KEY, VALUE)
        )


@pytest.mark.parametrize("options", [{}, {"num_refined": 0}, THRESHOLD], ids=str)
def test_what_tiles_show(options):
    """Catches sinks and empty codewords that count, tiles in the order of queries, and columns that
    are called keys."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    call = call_of(QUERY, KEY, VALUE, CODEBOOK, **SINKS | {"query_order": order} | options)
    found = reference.quantized(*call)
    spreads = [
        reference.spread(KEY, x, y)
        for x, y in ((found.cell, found.parents), (found.leaf, found.leaves))
    ]
    holds = [
        torch.nn.functional.one_hot(x, n).sum(2) for x, n in ((found.cell, 6), (found.leaf, 24))
    ]
    parent = torch.cat([torch.arange(6), torch.arange(6).repeat_interleave(3)])
    expected = []
    for tile in order.split(16):
        query = call[0].scale * QUERY[:, :, tile]
        refined, exact = reference.levels(query, found, *spreads, *call)
        leaves = refined[:, :, parent] & ~exact & (holds[1] > 0)
        codewords = (~refined & (holds[0] > 0)).sum(-1) + leaves.sum(-1)
        expected.append(torch.stack([codewords, (holds[1] * exact).sum(-1)], dim=-1))
    shown = attend(*call, "torch").shown
    assert torch.equal(shown, torch.stack(expected, dim=2).int())
    assert attend(*call, "reference").shown is None


class TestFlops:
    """`FlopCounterMode` counts what the operators compute."""

    def count(self, run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    @pytest.mark.parametrize(("num_children", "num_refined"), [(2, 3), (0, 0), (2, None)])
    @pytest.mark.parametrize("num_sinks", [0, 5])
    def test_by_hand(self, num_children, num_refined, num_sinks):
        """Catches operators without a formula, sinks left out, and heads or batch."""
        batch, heads, num_tokens, dim = 2, 3, 100, 8
        shape = batch, heads, num_tokens, dim
        query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
        sinks = torch.randn(batch, heads, num_sinks, dim) if num_sinks else None

        def run():
            return avq_attention(
                query, key, value, codewords="means", num_parents=4, num_children=num_children,
                num_refined=num_refined, sink_key=sinks, sink_value=sinks,
            )  # fmt: skip

        entries = batch * heads * num_tokens * dim
        assignment = 2 * entries * (4 + num_children)
        product = 2 * entries * (4 + (num_refined or 0) * num_children + num_sinks)
        term = 2 * entries * dim * 2
        assert self.count(run) == assignment + 2 * product + term
        both = 2 * assignment + 7 * product + 4 * term
        assert self.count(lambda: run().sum().backward()) == both

    def test_of_stored_codewords(self):
        """By hand; catches a backward pass without the moments, which are most of it."""
        key, numel, dim = KEY.clone().requires_grad_(), QUERY.numel(), QUERY.shape[3]

        def run():
            return stored_attention(QUERY, key, KEY, CODEBOOK, num_refined=2)

        assignment, product = 2 * KEY.numel() * (6 + 3), 2 * numel * (6 + 2 * 3)
        assert self.count(run) == assignment + 2 * product
        moments = 2 * numel // dim * (6 + 2 * 3) * (1 + dim) ** 2 + 2 * KEY.numel() * (1 + dim)
        both = 2 * assignment + 7 * product + moments
        assert self.count(lambda: run().sum().backward()) == both

"""Kernels that go wrong, or exceed the resources of unverified GPUs."""

import math
import re
from operator import itemgetter

import pytest
import torch
from cases import unchecked_call

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from avq_diffusers import avq_attention
from avq_diffusers.attention import limits, operators, self_check, settled
from avq_diffusers.attention.schema import arguments_of
from avq_diffusers.attention.triton import call, launch, select, tuning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"num_parents": 8, "num_children": 4, "num_refined": 2, "query_tile": 64}
TOKENS = [
    torch.randn(2, 1, 100, 16, generator=torch.Generator().manual_seed(i)).to(DEVICE)
    for i in range(3)
]


@pytest.fixture(autouse=True)
def unverified_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(self_check, "is_verified", lambda device: False)
    monkeypatch.setattr(self_check, "folder", tmp_path / "checks")
    monkeypatch.setattr(self_check, "_passed", set())
    monkeypatch.setattr(
        settled, "_settled", {}
    )  # else calls repeat launches that have been checked
    yield
    limits.faults.clear()
    call.reductions.clear()


def attention(backend: str = "triton", **options) -> torch.Tensor:
    return avq_attention(*TOKENS, **OPTIONS | options, backend=backend)


def spoil(monkeypatch, kernel: str, find, change) -> None:
    """Change what lies at a pointer after every launch of a kernel, as a wrong kernel would."""
    launch_it = launch.Launch.__call__

    def spoiled(self, addresses, stream):
        launch_it(self, addresses, stream)
        if self.kernel.__name__ == kernel:
            change(addresses[find(self.arguments).index])

    monkeypatch.setattr(launch.Launch, "__call__", spoiled)


def fill(value, *place):
    return lambda tensor: tensor.__setitem__(place, value)


def swap(tensor):
    tensor[..., 40:42, :] = tensor[..., 40:42, :].flip(-2)


def roll(tensor):
    tensor.copy_(tensor.roll(1, -1))


ALL = slice(None)
WRONG_OUTPUTS = {
    "a row is missing": fill(0, ALL, ALL, 7),
    "a number is NaN": fill(torch.nan, -1, 0, 3, 5),
    "two rows change places": swap,
    "channels are shifted": roll,
    "the last rows are missing": fill(0, ALL, ALL, slice(96, None)),
    "a quarter too much": lambda x: x.mul_(1.25),
    "an element is that of another": lambda x: x[0].copy_(x[1]),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_wrong_outputs_are_far_off(name):
    expected = attention("torch")
    found = expected.clone()
    WRONG_OUTPUTS[name](found)
    assert self_check.distance(found, expected) > self_check.LARGEST_ERROR


OUTPUT = itemgetter("output_ptr")


def part(group, name):
    return lambda arguments: getattr(arguments[group], name)


GRAD_VALUE = part("grads", "value")


WRONG_KERNELS = {
    "a number is NaN": ("attend_kernel", OUTPUT, WRONG_OUTPUTS["a number is NaN"]),
    "mean values are missing": (
        "aggregate_kernel",
        part("tables", "mean_values"),
        fill(0, ALL, ALL, slice(4)),
    ),
    "counts are of others": ("aggregate_kernel", part("tables", "log_counts"), roll),
    "codes are of others": (
        "aggregate_kernel",
        part("tables", "codes"),
        lambda x: x.copy_(x.roll(1, -2)),
    ),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="reaches into interpreted kernels")
@pytest.mark.parametrize("fault", WRONG_KERNELS.values(), ids=[*WRONG_KERNELS])
def test_wrong_kernels_change_no_output(monkeypatch, fault):
    expected = attention("torch")
    spoil(monkeypatch, *fault)
    with pytest.warns(UserWarning, match="a wrong result on this GPU .* Please report this line: "):
        assert torch.equal(attention(), expected)
    with pytest.raises(ValueError, match="the kernels gave a wrong result on this GPU"):
        attention()
    assert not self_check.folder.exists()


@pytest.mark.skipif(DEVICE != "cpu", reason="reaches into interpreted kernels")
def test_compiled_code_does_not_repeat_wrong_kernels(monkeypatch):
    """Catches a second call whose fault is known already, taken for one without."""
    expected = attention("torch")
    spoil(monkeypatch, *WRONG_KERNELS["a number is NaN"])
    monkeypatch.setattr(operators, "_is_repeatable", lambda *call: True)
    arguments = arguments_of(*unchecked_call(*TOKENS, **OPTIONS))
    for _ in range(3):
        with pytest.warns(UserWarning, match="a wrong result on this GPU"):
            output, _ = torch.ops.avq_diffusers.kernel_attention.default(*arguments)
        assert torch.equal(output, expected)
        assert all(call.repeat is None for call in settled._settled.values())


def gradients(backend: str) -> list[torch.Tensor]:
    tokens = [x.half().requires_grad_() for x in TOKENS]
    output = avq_attention(*tokens, **OPTIONS, backend=backend)
    output.backward(tokens[1].detach())  # other numbers for every element
    return [x.grad for x in tokens]


@pytest.mark.skipif(DEVICE != "cpu", reason="reaches into interpreted kernels")
def test_right_gradients_pass_once_and_are_those_of_the_kernels(monkeypatch):
    """Catches gradients that PyTorch's replace, and a check that compares different elements."""
    right = gradients("triton")
    spoil(monkeypatch, "key_gradients_kernel", GRAD_VALUE, lambda x: x.mul_(1.25))
    torch.testing.assert_close(gradients("triton")[2], 1.25 * right[2])


def lack(tensor):
    raise launch.UnfitError("out of resource: shared memory")


@pytest.mark.skipif(DEVICE != "cpu", reason="reaches into interpreted kernels")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.mul_(1.25), "a wrong result on this GPU .* gradients, error"),
        (lack, "AVQ runs in PyTorch for calls like this one: out of"),
    ],
)
def test_gradients_that_are_wrong_or_do_not_fit_come_from_pytorch(monkeypatch, change, message):
    """Catches a check of the forward pass only, and one gradient that passes for all."""
    spoil(monkeypatch, "key_gradients_kernel", GRAD_VALUE, change)
    with pytest.warns(UserWarning, match=message):
        found = gradients("triton")
    assert all(map(torch.equal, found, gradients("torch")))


@pytest.mark.skipif(DEVICE != "cpu", reason="reaches into interpreted kernels")
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_data_that_are_not_finite_say_nothing_of_kernels(monkeypatch, number):
    """Catches a fault for what PyTorch gives, too, such as a gradient that overflows, and a check
    that such data pass for the calls after them."""
    *others, value = TOKENS
    value = value.clone()
    value[-1, 0, 3] = number
    found, expected = (
        avq_attention(*others, value, **OPTIONS, backend=x) for x in ("triton", "torch")
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not limits.faults
    spoil(monkeypatch, *WRONG_KERNELS["a number is NaN"])
    with pytest.warns(UserWarning, match="a wrong result on this GPU"):
        attention()


@pytest.mark.parametrize("size", [1.0, 1e25])
def test_distance_is_relative(size):
    """Catches squares that overflow."""
    expected = size * TOKENS[0]
    assert self_check.distance(expected * (1 + 1e-6), expected) < 1e-5
    assert self_check.distance(1.5 * expected, expected) > 0.4


@pytest.mark.parametrize("options", [{}, {"num_refined": None}])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        *(pytest.param(x, marks=pytest.mark.gpu) for x in (torch.float32, torch.bfloat16)),
    ],
)
def test_right_kernels_pass_once(monkeypatch, options, dtype):
    """Also for a later process, which reads the folder, and without one in this process. Rounding
    is far from what counts."""
    tokens = [x.to(dtype) for x in TOKENS]
    errors, distance = [], self_check.distance
    monkeypatch.setattr(
        self_check, "distance", lambda *pair: errors.append(distance(*pair)) or errors[-1]
    )
    avq_attention(*tokens, **OPTIONS | options, backend="triton")
    for process in ("the same", "a later one"):
        avq_attention(*(x[:1] for x in tokens), **OPTIONS | options, backend="triton")
        assert len(errors) == 1, process
        self_check._passed.clear()
        settled._settled.clear()
    monkeypatch.setattr(self_check, "folder", None)
    for batch in (2, 1):
        avq_attention(*(x[:batch] for x in tokens), **OPTIONS | options, backend="triton")
    assert len(errors) == 2
    assert max(errors) < self_check.LARGEST_ERROR / 5


@pytest.mark.parametrize(
    ("num_tiles", "error", "is_right"),
    [(2, 0.14, True), (3, 0.14, False), (1, 0.6, False), (2000, 0.09, True)],
)
def test_few_tiles_may_choose_other_codewords(num_tiles, error, is_right):
    """Of 2000 tiles. An H200 chose so in one of 20,000: a layer of Wan with 256 exact keys."""
    expected = torch.randn(1, 1, 2000 * self_check.TILE, 16)
    found = expected.clone()
    found[:, :, -num_tiles * self_check.TILE :] *= 1 + error
    assert (self_check.distance(found, expected) <= self_check.LARGEST_ERROR) == is_right


def test_a_threshold_is_no_kind_of_its_own():
    """Catches a check, and a search for tilings, at every move of the dial."""
    kinds = {
        limits.kind_of_call(*unchecked_call(*TOKENS, **options))
        for options in ({"threshold": 0}, {"threshold": math.inf}, {"num_refined": 2})
    }
    assert len(kinds) == 2


@pytest.mark.parametrize("failures", [1, 2])
def test_a_gpu_with_less_memory_gets_smaller_tilings(monkeypatch, failures):
    """Catches one that is tried again at every call."""
    expected, plans, run = attention(), [], launch.Plan.run

    def limited(plan, inputs, device):
        plans.append(plan)
        if len(plans) <= failures:
            raise launch.UnfitError("out of resource: shared memory")
        return run(plan, inputs, device)

    monkeypatch.setattr(launch.Plan, "run", limited)
    settled._settled.clear()
    for _ in range(2):
        torch.testing.assert_close(attention(), expected)
    assert len({*plans}) == failures + 1
    assert len(plans) == failures + 2
    assert [*call.reductions.values()] == [failures]


def test_a_gpu_with_far_less_memory_gets_pytorch(monkeypatch):
    expected, plans = attention("torch"), []

    def never(plan, inputs, device):
        plans.append(plan)
        raise launch.UnfitError("out of resource: shared memory")

    monkeypatch.setattr(launch.Plan, "run", never)
    with pytest.warns(UserWarning, match="AVQ runs in PyTorch for calls like this one: out of"):
        assert torch.equal(attention(), expected)
    assert len(plans) == 1 + tuning.MOST_REDUCED
    with pytest.raises(ValueError, match="cannot make the kernels for this GPU: out of resource"):
        attention()
    assert attention(num_refined=3, backend="torch").isfinite().all()


@pytest.mark.parametrize(
    "error", [OutOfResources(200_000, 100_000, "shared memory"), RuntimeError("PassManager failed")]
)
def test_what_the_compiler_raises_means_that_kernels_do_not_fit(monkeypatch, error):
    """Its passes raise a RuntimeError, with which a call would fail instead of running PyTorch."""

    def fail(*arguments):
        raise error

    monkeypatch.setattr(launch, "direct_launch", fail)
    pointers = dict.fromkeys(select.select_kernel.arg_names, 1)
    with pytest.raises(launch.UnfitError, match=re.escape(str(error))):
        _ = launch.Launch(select.select_kernel, (1, 1, 1), pointers).direct

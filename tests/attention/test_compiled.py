"""Kernels compiled for GPUs that are not there: no spills, little memory, wide loads.

This file also runs as a script, in a process of its own that does not interpret kernels.
"""

import json
import os
import subprocess
import sys
from itertools import product

import pytest

pytest.importorskip("triton")

# Compute capability, head dim, (M0, P, C), source and form of codewords, exact keys, sinks.
SMALL, LARGE = (64, 16, 8), (128, 32, 8)
SOME = [(86, 80, SMALL, "own", 0, 0)]
ALL = [
    *product((86, 90), (40, 64, 80, 128), (SMALL, LARGE), ("stored", "means", "own"), [0], [0]),
    *product((80, 89), (40, 80), [SMALL], ("stored", "own"), [0], [0]),  # kin of 86
    *product((80, 90), [64], [(64, 16, 32), (192, 0, 0)], ["own"], [0], [0]),
    *product((86, 90), (40, 64, 128), [SMALL], ["own"], [256, 0], [333]),
]
# Shares of instructions that may spill, by kernel and where queries meet keys.
MOST_SPILLED = {"attention_kernel": 0.025, "column_gradients_kernel": 0.05}


@pytest.mark.parametrize(
    "cases",
    [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.long)],
)
def test_kernels_compile_to_what_was_meant(cases):
    """On Hopper a limit on registers makes room for more programs; what it spills is little."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, json.dumps(cases)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) == sum(map(num_kernels, cases))
    for case, kernel, result in results:
        capability, *_, form, exact_keys, num_sinks = case
        meets_keys, is_backward = exact_keys or num_sinks, "gradients" in kernel
        is_hopper = capability == 90
        if is_backward:
            assert result["spilled"] <= MOST_SPILLED.get(kernel, 0.03), (case, kernel)
            assert result["shared"] <= (227 if is_hopper else 99) * 1024, (case, kernel)
        elif kernel == "attention_kernel":
            most = 0.01 if meets_keys else MOST_SPILLED[kernel]
            assert result["spilled"] <= (most if is_hopper else 0), (case, kernel)
            assert (result["hopper_products"] > 0) == is_hopper, (case, kernel)
        else:
            # An address may wait in memory while a piece is summed, and some in an update.
            most = 0 if form == "stored" else 16 if "cell" in kernel else 8
            assert result["stack"] <= most or exact_keys, (case, kernel, result["stack"])
        if not is_backward:
            assert result["shared"] <= 99 * 1024, (case, kernel)
        # Shares of a few parents are read twice.
        few = 2 if kernel == "attention_kernel" else 0
        assert result["narrow_loads"] <= few or meets_keys, (case, kernel)


def num_kernels(case: tuple) -> int:
    """Of the forward pass, the updates and the gradients."""
    *_, form, exact_keys, _ = case
    has_order = exact_keys > 0
    return 3 + has_order + 2 * (form == "own") + 3 * (form != "stored")


def compile_kernels(case: tuple) -> None:
    """Compile the kernels exactly as they are launched, and print what they cost."""
    import torch
    from compile_only import compile_launch

    from avq_diffusers.attention.spec import Spec
    from avq_diffusers.attention.triton import call, gradients, problem, updates

    capability, head_dim, (parents, refined, children), form, exact_keys, num_sinks = case
    problem.capability_of = lambda device: divmod(capability, 10)
    own, device, order = form == "own", torch.device("cpu"), torch.int64
    tokens, sinks = (
        problem.Layout(
            torch.Size((2, 8, number, head_dim)), (number * 8 * head_dim, head_dim, 8 * head_dim, 1)
        )
        for number in (4096, num_sinks)
    )
    spec = Spec(parents, children, refined, exact_keys, 0, 128, form != "stored", 0.1)
    orders = order, order if own else None
    layouts = tokens, tokens, tokens, (sinks, sinks) if num_sinks else None
    found = problem.Problem(device, torch.float16, *layouts, *orders, not own, False, spec)
    for plan in (call._plan, gradients._plan):
        plan.cache_clear()
    launches = list(call._plan(found).launches)
    if own:
        launches += updates._plan(device, torch.float16, tokens, order, False, spec).launches
    if form != "stored":
        launches += gradients._plan(found, tokens).launches[-3:]
    for launch in launches:
        info = compile_launch(launch, capability=capability)
        result = {
            "spilled": info.count("LDL", "STL") / len(info.instructions()),
            "stack": info.stack,
            "shared": info.shared,
            "narrow_loads": info.count("LDG.E.U16"),
            "hopper_products": info.count("HGMMA"),
        }
        print(json.dumps([case, launch.kernel.__name__, result]), flush=True)


if __name__ == "__main__":
    for given in json.loads(sys.argv[1]):
        compile_kernels(given)

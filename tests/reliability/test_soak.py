"""Random problems, as many as fit the minutes of SOAK_MINUTES: `pytest -m long` on this file.

The tests of `attention/test_fuzz.py` draw the same problems. The number of a case is enough to
draw it again.
"""

import os
import time
from itertools import count
from random import Random

import pytest
import torch
from problems import draw_problem, solve

KERNELS = torch.cuda.is_available()
DEVICE = torch.device("cuda" if KERNELS else "cpu")


@pytest.mark.long
def test_random_problems_are_solved_within_the_budget():
    end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "0.5"))
    beyond, compared = [], 0.0
    backend = "triton" if KERNELS else "torch"
    for case in count():
        most = 2000 if KERNELS else 300
        problem = draw_problem(Random(f"0 {case}"), backend=backend, device=DEVICE, most=most)
        outcome = solve(problem, backend)
        compared += outcome.compared
        if not outcome.error <= 1:
            beyond.append(f"case {case}, {outcome.error:.3g}: {problem}")
        if time.monotonic() > end:
            break
    assert not beyond, f"{len(beyond)} of {case + 1} problems:\n" + "\n".join(beyond)
    assert compared > 0.75 * (case + 1)

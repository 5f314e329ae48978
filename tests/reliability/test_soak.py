"""Random problems, as many as fit the minutes of SOAK_MINUTES: `pytest -m long` on this file.

The tests of `attention/test_fuzz.py` draw the same problems. The number of a case is enough to
draw it again. As there, gradients are not compared where keys tie between parents: some CPUs round
the distances to equal parents differently.
"""

import os
import time
from itertools import count
from random import Random

import pytest
import torch
from problems import codewords_of, draw_problem, error_over_budget, gradient_over_budget

KERNELS = torch.cuda.is_available()
DEVICE = torch.device("cuda" if KERNELS else "cpu")


@pytest.mark.long
def test_random_problems_are_solved_within_the_budget():
    end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "0.5"))
    beyond = []
    for case in count():
        rng = Random(f"0 {case}")
        problem = draw_problem(rng, kernels=KERNELS, device=DEVICE, most=2000 if KERNELS else 300)
        errors = [error_over_budget(problem, "triton" if KERNELS else "torch")]
        is_wide = problem.query.dtype == torch.float64
        if is_wide and codewords_of(problem, "torch").is_clear.all():
            errors.append(gradient_over_budget(problem))
        if not max(errors) <= 1:
            beyond.append(f"case {case}, {max(errors):.3g}: {problem}")
        if time.monotonic() > end:
            break
    assert not beyond, f"{len(beyond)} of {case + 1} problems:\n" + "\n".join(beyond)

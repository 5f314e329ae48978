"""What tests of several folders check: that AVQ runs, changes the image, and leaves nothing."""

from functools import partial

import torch
from tiny import draw
from torch import Tensor

from avq_diffusers import apply_avq, avq_disabled, remove_avq, summary


def differ(output: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by more than rounding."""
    return bool((output - other).norm() > 1e-3 * other.norm())


def close(output: Tensor, expected: Tensor) -> bool:
    """Whether an output is another up to rounding, as with all keys exact."""
    return bool((output - expected).norm() < 1e-5 * expected.norm())


def contents(model) -> dict:
    """The objects that modules hold, their processors and configs, and what hooks there are."""
    found = {}
    for path, module in model.named_modules():
        found[path, "class"] = type(module)
        owners = (module, getattr(module, "processor", None), getattr(module, "config", None))
        for place, owner in enumerate(owners):
            for name, value in getattr(owner, "__dict__", {}).items():
                for key, one in value.items() if isinstance(value, dict) else [("", value)]:
                    found[path, place, name, key] = one
    return found


def are_same(found: dict, before: dict) -> bool:
    return found.keys() == before.keys() and all(found[key] is before[key] for key in before)


def calls(model) -> list[dict[str, int]]:
    """Of the layers with AVQ."""
    return [row.calls for row in summary(model).rows if row.config]


def kinds(pipe) -> set[str]:
    """Every kind of call that any layer has seen."""
    return {kind for row in summary(pipe).rows for kind in row.calls}


def runs(pipe) -> set[str]:
    """What the layers with codebooks run."""
    return {row.runs for row in summary(pipe).rows if row.config}


draw_once = partial(draw, num_inference_steps=1)


def check_on_and_off(pipe, codebooks, draw=draw_once, **arguments) -> tuple[Tensor, Tensor]:
    """AVQ runs in every layer, changes the image, and leaves nothing when off.

    Returns the exact output and the one with AVQ.
    """
    exact = draw(pipe, **arguments)
    avq = draw(apply_avq(pipe, codebooks, route="always"), **arguments)
    calls = {row.name: set(row.calls) for row in summary(pipe).rows if row.config}
    assert calls == {name: {"AVQ"} for name in codebooks.layer_specs}
    assert differ(avq, exact)
    with avq_disabled(pipe):
        assert torch.equal(draw(pipe, **arguments), exact)
    assert torch.equal(draw(remove_avq(pipe), **arguments), exact)
    return exact, avq

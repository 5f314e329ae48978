"""No object outlives AVQ, and memory does not grow."""

import gc
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import combinations
from statistics import median

import psutil
import pytest
import torch

from avq_diffusers import apply_avq, remove_avq, set_num_refined

IMAGES_PER_APPLY = 3
# Bytes per image that an allocator may still be settling by; the codebooks of mini-sd, if one
# apply leaked them, would be 9 times this.
SETTLING = 20_000
IMAGE = {
    "prompt": "a red fox",
    "height": 64,
    "width": 64,
    "num_inference_steps": 1,
    "output_type": "latent",
}


@pytest.fixture
def only_new_objects():
    """Leaves what is there out of collections and of `gc.get_objects`, which are slow with it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def objects() -> int:
    """New objects that hold tensors, and those of this package."""
    kinds = Counter(type(thing) for thing in gc.get_objects())
    return sum(
        count
        for kind, count in kinds.items()
        if issubclass(kind, torch.Tensor | torch.nn.Module)
        or str(kind.__module__).startswith("avq_diffusers")
    )


def measured(pipe, codebooks, images: int, measure: Callable[[], int], **arguments) -> list[int]:
    """`measure` after each of many rounds: apply AVQ, generate three images, remove AVQ."""
    found = []
    for start in range(0, images, IMAGES_PER_APPLY):
        apply_avq(pipe, codebooks, route="always")
        for index in range(start, start + IMAGES_PER_APPLY):
            set_num_refined(pipe, index % IMAGES_PER_APPLY)
            pipe(**arguments, generator=torch.Generator().manual_seed(index))
        remove_avq(pipe)
        gc.collect()
        found.append(measure())
    return found


def test_images_between_apply_and_remove_leave_nothing_behind(pipe, codebooks, only_new_objects):
    """Catches a hook, a state or a packed codebook that outlives `remove_avq`."""
    assert len(set(measured(pipe, codebooks, 9, objects, **IMAGE)[1:])) == 1


def test_a_leak_is_seen(pipe, codebooks, only_new_objects):
    """The control: what is kept of every third image shows."""
    kept = []

    class Leaking:
        """The pipeline, which keeps a copy of the codebooks whenever the first seed comes."""

        unet, config = pipe.unet, pipe.config

        def __call__(self, **arguments):
            if arguments["generator"].initial_seed() % IMAGES_PER_APPLY == 0:
                kept.append(deepcopy(codebooks))

    found = measured(Leaking(), codebooks, 9, objects)
    assert found[-1] > found[1]
    assert len(kept) == 3


@pytest.mark.long
def test_memory_does_not_grow(pipe, codebooks):
    """Catches a leak outside of Python's objects, by the median slope of the later half."""
    found = measured(pipe, codebooks, 500, lambda: psutil.Process().memory_info().rss, **IMAGE)
    pairs = combinations(enumerate(found[len(found) // 2 :]), 2)
    assert median((y - x) / (j - i) for (i, x), (j, y) in pairs) <= SETTLING * IMAGES_PER_APPLY

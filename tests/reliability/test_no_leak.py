"""No object outlives AVQ, and pipelines in threads do not see each other.

`python -m eval soak` watches the memory of a process.
"""

import gc
from collections import Counter
from copy import deepcopy

import pytest
import torch
from tiny import draw, random_codebooks, tiny_pipe

from avq_diffusers import apply_avq
from eval.soak import generation_growth, threads_agree

PICTURE = {
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


def test_pictures_between_apply_and_remove_leave_nothing_behind(pipe, codebooks, only_new_objects):
    """Catches a hook, a state or a packed codebook that outlives `remove_avq`."""
    growth = generation_growth(pipe, codebooks, 40, {"objects": objects}, **PICTURE)
    assert len(set(growth["objects"].memory[1:])) == 1


def test_a_leak_is_seen(pipe, codebooks, only_new_objects):
    """The control: what is kept of every fifth picture shows."""
    kept = []

    class Leaking:
        """The pipeline, which keeps a copy of the codebooks whenever the first seed comes."""

        unet = pipe.unet

        def __call__(self, **arguments):
            if arguments["generator"].initial_seed() % 5 == 0:
                kept.append(deepcopy(codebooks))

    growth = generation_growth(Leaking(), codebooks, 30, {"objects": objects})
    assert growth["objects"].memory[-1] > growth["objects"].memory[1]
    assert len(kept) == 6


def test_pipelines_with_other_codebooks_in_threads(pipe, codebooks):
    """Catches codewords, orders or counts that two pipelines share."""
    other = apply_avq(tiny_pipe(), random_codebooks(pipe.unet, seed=1))
    apply_avq(pipe, codebooks)
    assert not torch.equal(draw(pipe), draw(other))
    assert threads_agree([lambda: draw(pipe), lambda: draw(other, height=256)], rounds=4)

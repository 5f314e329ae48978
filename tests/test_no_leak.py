"""Memory stays flat while AVQ comes and goes, and pipelines in threads do not see each other."""

import gc
from collections import Counter
from copy import deepcopy

import pytest
import torch
from tiny import draw, random_codebooks, tiny_pipe

from avq_diffusers import AVQConfig, apply_avq
from eval.soak import FLAT, generation_growth, resident_bytes, threads_agree

# A megabyte of codewords, so that the memory of the process shows one copy for each apply.
LARGE = AVQConfig(256, 8, 2, query_tile=16, levels=(0, 1))
PICTURE = {
    "prompt": "a red fox",
    "height": 64,
    "width": 64,
    "num_inference_steps": 1,
    "output_type": "latent",
}


@pytest.fixture
def large(pipe):
    return random_codebooks(pipe.unet, LARGE)


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


def test_pictures_with_avq_applied_and_removed_leave_nothing_behind(pipe, large, only_new_objects):
    """Catches a hook, a state or a packed codebook that outlives `remove_avq`."""
    assert sum(x.numel() * 4 for x in large.parameters()) > 25 * FLAT
    measure = {"memory": resident_bytes, "objects": objects}
    growth = generation_growth(pipe, large, 40, measure, **PICTURE)
    assert growth["memory"].bytes_per_generation < FLAT
    assert len(set(growth["objects"].memory[1:])) == 1


def test_a_leak_is_seen(pipe, large, only_new_objects):
    """The control: what is kept of every fifth picture shows in both figures."""
    kept = []

    class Leaking:
        """The pipeline, which keeps a copy of the codebooks whenever the first seed comes."""

        unet = pipe.unet

        def __call__(self, **arguments):
            if arguments["generator"].initial_seed() % 5 == 0:
                kept.append(deepcopy(large))

    measure = {"memory": resident_bytes, "objects": objects}
    growth = generation_growth(Leaking(), large, 30, measure)
    assert growth["memory"].bytes_per_generation > 4 * FLAT
    assert growth["objects"].memory[-1] > growth["objects"].memory[1]
    assert len(kept) == 6


def test_pipelines_with_other_codebooks_in_threads(pipe, codebooks):
    """Catches codewords, orders or counts that two pipelines share."""
    other = apply_avq(tiny_pipe(), random_codebooks(pipe.unet, seed=1))
    apply_avq(pipe, codebooks)
    assert not torch.equal(draw(pipe), draw(other))
    assert threads_agree([lambda: draw(pipe), lambda: draw(other, height=256)], rounds=4)

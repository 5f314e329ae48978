"""Broken samples, workers, the order of samples, and their noise."""

import gc
import multiprocessing
import os
from dataclasses import replace
from io import BytesIO
from itertools import islice

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset
from toy_data import (
    SCENES,
    SIZE,
    arguments,
    assert_same,
    encoder,
    make_stream,
    pictures,
    png,
    source,
    take,
)

from distill.data.batches import add_noise, sample_seed
from distill.data.sources import open_samples
from distill.data.stream import load_batches, sample_order
from distill.exceptions import DataError

pytestmark = pytest.mark.usefixtures("no_traces")


def test_a_broken_image_is_named_and_replaced(tmp_path):
    config = source("folder txt", tmp_path)  # in the order a, b, d, e, test_c
    encoded = take(make_stream(config, batch_size=5, seed=3), 1)
    order = next(sample_order(5, **arguments(batch_size=5, seed=3)))
    (tmp_path / "data" / "a.png").write_bytes(png(pictures()[1])[:400])
    (tmp_path / "data" / "e.png").write_text("no picture")
    told = r"sample {} of .*{}\.png\) cannot be read: .*; the next sample takes its place"
    with (
        pytest.warns(UserWarning, match=told.format(0, "a")),
        pytest.warns(UserWarning, match=told.format(3, "e")),
    ):
        repaired = take(make_stream(config, batch_size=5, seed=3), 1)
    for place, index in enumerate(order):
        expected = order.index({0: 1, 3: 4}.get(index, index))
        for name in encoded:
            assert torch.allclose(repaired[name][place], encoded[name][expected], atol=1e-5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"picture": None, "text": "a"},
            r"^sample 0 of .*data cannot be read: there is no image; ",
        ),
        (
            {"text": None},
            "^the caption of sample 0 of .*data must be text, but is None; the next",
        ),
        ({"text": 5}, "^the caption of sample 0 of .*data must be text, but is 5; the next"),
    ],
)
def test_a_row_without_image_or_text_is_a_broken_sample(row, message, tmp_path):
    samples = open_samples(source("huggingface", tmp_path), SIZE)
    whole = samples.rows[1]
    samples.rows = [whole | row, whole]
    with pytest.warns(UserWarning, match=message):
        assert samples[0]["caption"] == whole["text"]


def test_a_broken_disk_stops_the_run(tmp_path):
    """Catches a worker's error, which comes with a traceback in its message."""
    config = replace(source("folder", tmp_path), workers=1)
    for path in (tmp_path / "data").rglob("*.png"):
        path.write_text("no picture")
    batches = make_stream(config)
    with pytest.raises(DataError, match=r"^16 samples in a row are broken, the last: sample"):
        next(batches)


def test_a_broken_avif_is_replaced(tmp_path):
    """Catches the RuntimeError of its decoder, which is no killed worker's."""
    file = BytesIO()
    pictures()[0].save(file, "avif")
    head, pixels = file.getvalue().split(b"mdat")
    config = source("folder", tmp_path)
    (tmp_path / "data" / "a.png").write_bytes(head + b"mdat" + bytes(len(pixels)))
    with pytest.warns(UserWarning, match=r"a\.png\) cannot be read: Failed to decode .*; the next"):
        take(make_stream(config, batch_size=5), 1)


class Unreadable(Dataset):
    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("the disk is gone"), r"the disk is gone"),
        (RuntimeError("a mistake"), r"(Caught RuntimeError in DataLoader worker .*)?a mistake\n?"),
    ],
)
def test_what_a_worker_raises_is_not_taken_for_its_death(error, message, workers):
    """Catches advice to use fewer workers, and a traceback in a message that is one sentence."""
    samples = Unreadable()
    samples.error = error
    with pytest.raises(type(error), match=rf"(?s)\A{message}\Z"):
        next(load_batches(samples, [[0]], workers, torch.device("cpu")))


class Garbage:
    """Part of a cycle that only the garbage collector frees."""

    def __init__(self, path):
        self.path, self.itself = path, self

    def __del__(self):
        self.path.write_text(str(os.getpid()))


class Collecting(Dataset):
    def __getitem__(self, index):
        gc.collect()
        return index


def test_workers_leave_the_garbage_of_the_main_process(tmp_path):
    """Catches a worker that ends an image decoder and waits for its threads, which it lacks."""
    gc.disable()
    try:
        Garbage(tmp_path / "collected by")
        assert next(load_batches(Collecting(), [[0]], 1, torch.device("cpu"))) == 0
        assert not [*tmp_path.iterdir()]
    finally:
        gc.enable()


def test_a_killed_worker_ends_in_one_sentence():
    """Catches a traceback where memory ran out."""
    others = {*multiprocessing.active_children()}
    batches = make_stream(replace(SCENES, workers=1))
    next(batches)
    (worker,) = {*multiprocessing.active_children()} - others
    worker.kill()
    with pytest.raises(DataError, match=r"^a data worker died .* continue with --resume"):
        take(batches, 20)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 5), st.integers(0, 200)
)
def test_epochs_are_permutations_over_all_processes(num, batch_size, processes, seed, first):
    """Catches samples lost or repeated at the end of an epoch, between processes, by a resume."""
    streams = [
        sample_order(
            num,
            **arguments(
                batch_size=batch_size,
                seed=seed,
                first_sample=first,
                process_index=index,
                num_processes=processes,
            ),
        )
        for index in range(processes)
    ]
    drawn = []
    while len(drawn) < 3 * num:
        drawn += [index for batches in streams for index in next(batches)]
    alone = sample_order(num, **arguments(batch_size=first + len(drawn), seed=seed))
    whole = next(alone)
    assert whole[first:] == drawn
    epochs = [whole[start : start + num] for start in range(0, len(whole) - num + 1, num)]
    assert all(sorted(epoch) == list(range(num)) for epoch in epochs)


def test_epochs_and_seeds_differ():
    one = next(sample_order(50, **arguments(batch_size=100)))
    other = next(sample_order(50, **arguments(batch_size=100, seed=2)))
    assert one[:50] != one[50:] != other[50:] != other[:50] != one[:50] != list(range(50))


def test_stream_gives_what_its_order_says():
    samples, parts = open_samples(SCENES, SIZE), encoder()
    batches = sample_order(20, **arguments())
    for found, indices in islice(zip(make_stream(parts=parts), batches, strict=False), 8):
        chosen = [samples[index] for index in indices]
        pixels = torch.stack([sample["image"] for sample in chosen])
        assert_same(found, parts.encode(pixels, [sample["caption"] for sample in chosen]))


def test_stream_resumes_and_does_not_depend_on_workers():
    """21 samples are past the end of the first epoch of 20."""
    parts = encoder()
    state = torch.get_rng_state()
    whole = take(make_stream(parts=parts), 9)
    assert_same(take(make_stream(replace(SCENES, workers=2), parts), 9), whole)
    resumed = take(make_stream(parts=parts, first_sample=21), 2)
    assert_same(resumed, {name: value[21:] for name, value in whole.items()})
    assert torch.equal(torch.get_rng_state(), state)  # the loop may use torch's own generator


# Noise


def encoded(samples=6):
    generator = torch.Generator().manual_seed(0)
    moments = torch.randn(samples, 8, 4, 4, generator=generator)
    return {"moments": moments, "text_states": torch.randn(samples, 5, 32, generator=generator)}


def schedule(prediction_type):
    return DDPMScheduler(beta_schedule="scaled_linear", prediction_type=prediction_type)


def test_both_predictions_are_of_one_latent_sample():
    """Catches targets of the other type, a latent that is not sampled, and a missing scale."""
    batch, seeds = encoded(), list(range(6))
    noise = add_noise(batch, seeds, schedule("epsilon"), 0.2)
    velocity = add_noise(batch, seeds, schedule("v_prediction"), 0.2)
    assert torch.equal(noise["noisy_latents"], velocity["noisy_latents"])
    assert torch.equal(noise["timesteps"], velocity["timesteps"])
    alpha = schedule("epsilon").alphas_cumprod[noise["timesteps"]].view(-1, 1, 1, 1)
    signal, sigma = alpha.sqrt(), (1 - alpha).sqrt()
    latents = signal * velocity["noisy_latents"] - sigma * velocity["target"]
    torch.testing.assert_close(
        noise["noisy_latents"], signal * latents + sigma * noise["target"], rtol=1e-4, atol=1e-5
    )
    posterior = DiagonalGaussianDistribution(batch["moments"])
    sample = (latents / 0.2 - posterior.mean) / posterior.std
    assert 0.8 < sample.std() < 1.2
    correlation = torch.corrcoef(torch.stack([sample.flatten(), noise["target"].flatten()]))
    assert correlation[0, 1].abs() < 0.2


def test_draws_depend_on_the_sample_only():
    """Catches one draw for the batch, and draws that depend on the place in it."""
    batch, seeds = encoded(), list(range(6))
    whole = add_noise(batch, seeds, schedule("epsilon"), 1.0)
    part = {name: value[2:4] for name, value in batch.items()}
    half = add_noise(part, seeds[2:4], schedule("epsilon"), 1.0)
    for name, value in half.items():
        assert torch.equal(value, whole[name][2:4])
    assert len({tuple(x.flatten().tolist()) for x in whole["target"]}) == 6


def test_runs_of_neighbouring_seeds_share_no_draw():
    """Catches a sum of seed and number, which sample 1 of seed 0 shares with sample 0 of seed 1."""
    seeds = {sample_seed(seed, number) for seed in range(8) for number in range(1000)}
    assert len(seeds) == 8000
    assert 0 <= min(seeds) <= max(seeds) < 2**63


def test_timesteps_are_uniform():
    """Catches a last timestep, of the most noise, that is never drawn."""
    moments = torch.zeros(1, 2, 1, 1).expand(4000, -1, -1, -1)
    batch = {"moments": moments, "text_states": moments}
    drawn = add_noise(batch, list(range(4000)), schedule("epsilon"), 1.0)["timesteps"]
    assert (drawn.min(), drawn.max()) == (0, 999)
    shares = torch.histc(drawn.float(), bins=10, min=0, max=1000) / 4000
    assert (shares - 0.1).abs().max() < 0.02

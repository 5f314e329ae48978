"""Data for training: sources, the encoder and its cache, the order of samples, their noise."""

import gc
import json
import multiprocessing
import os
import tarfile
from dataclasses import replace
from io import BytesIO
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny import tiny_encoders, tiny_tokenizer, two_level_pipe
from torch.utils.data import Dataset

from distill.data import DataError
from distill.data.batches import add_noise, sample_seed
from distill.data.config import DataConfig
from distill.data.encoder import Encoder
from distill.data.images import crop, linfusion
from distill.data.sources import open_samples
from distill.data.stream import EncodedSamples, load_batches, sample_order
from distill.scenes import TRAINING_SEEDS, render, sample_scene

pytestmark = pytest.mark.usefixtures("no_traces")

SIZE = 64
NAMES = ("b", "a", "test_c", "d", "e")  # "test" in a name means a split to `datasets`
CAPTIONS = tuple(f"a picture of {name}, grüße" for name in NAMES)
SCENES = DataConfig(source="scenes", num_samples=20, workers=0)


def encoder():
    return Encoder(**tiny_encoders(), tokenizer=tiny_tokenizer())


def pictures():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40, 90, 3), np.uint8)) for _ in NAMES]


def png(picture):
    file = BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def folder(root):
    (root / "deeper [1]").mkdir(parents=True)
    (root / "._a.png").write_bytes(b"of the system")
    paths = [root / ("deeper [1]" if name == "d" else "") / f"{name}.png" for name in NAMES]
    for path, picture, caption in zip(paths, pictures(), CAPTIONS, strict=True):
        path.write_bytes(png(picture))
        path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")


def tar(path):
    """A webdataset tar whose captions lie in a mapping of JSON."""
    path.parent.mkdir()
    with tarfile.open(path, "w") as file:
        for name, picture, caption in zip(NAMES, pictures(), CAPTIONS, strict=True):
            fields = json.dumps({"caption": caption, "error_message": None, "width": 90}).encode()
            for ending, content in (("png", png(picture)), ("json", fields)):
                info = tarfile.TarInfo(f"{name}.{ending}")
                info.size = len(content)
                file.addfile(info, BytesIO(content))


def parquet(path):
    path.parent.mkdir(parents=True)
    rows = {"picture": [{"bytes": png(picture), "path": None} for picture in pictures()]}
    rows = datasets.Dataset.from_dict(rows | {"text": CAPTIONS, "unused": [1] * 5})
    rows.cast_column("picture", datasets.Image()).to_parquet(path)


def source(kind, root):
    """A configuration whose samples are NAMES in some order."""
    name, _, captions = kind.partition(" ")
    data = root / "data"
    changes = {"source": name, "path": str(data), "num_samples": None}
    if name == "folder":
        folder(data)
    elif captions == "tar":
        tar(data / "0.tar")
        changes |= {"split": "train", "image_column": "png", "caption_column": "json.caption"}
    else:
        parquet(data / "train.parquet")
        changes |= {"split": "train", "image_column": "picture"}
        changes |= {"caption_column": None if captions else "text"}
    if captions in ("json", "txt"):
        listed = root / f"captions.{captions}"
        text = json.dumps(CAPTIONS) if captions == "json" else "\n".join(CAPTIONS) + "\n"
        listed.write_text(text, encoding="utf-8")
        changes |= {"captions": str(listed)}
    return replace(SCENES, **changes)


def arguments(**changes):
    defaults = {"batch_size": 3, "seed": 1, "first_sample": 0, "process_index": 0}
    return {**defaults, "num_processes": 1, **changes}


def make_stream(config=SCENES, parts=None, size=SIZE, process_index=0, num_processes=1, **changes):
    ranks = {"process_index": process_index, "num_processes": num_processes}
    samples = EncodedSamples(open_samples(config, size), config, size, parts or encoder(), **ranks)
    return samples.batches(**arguments(**ranks, **changes))


def take(batches, count):
    found = list(islice(batches, count))
    return {name: torch.cat([batch[name] for batch in found]) for name in found[0]}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


# Sources


@pytest.mark.parametrize(
    "kind",
    ["folder", "folder txt", "huggingface", "huggingface json", "huggingface tar"],
)
def test_sources_give_images_with_their_captions(kind, tmp_path):
    """Catches rows out of step with captions, lost rows and images of another preprocessing."""
    config = source(kind, tmp_path)
    by_path = [1, 0, 3, 4, 2]  # a, b, deeper [1]/d, e, test_c
    order = by_path if kind.startswith("folder") else range(5)
    texts = [CAPTIONS[i] for i in (range(5) if kind == "folder txt" else order)]
    for preprocessing, function in (("crop", crop), ("linfusion", linfusion)):
        samples = open_samples(replace(config, preprocessing=preprocessing), SIZE)
        assert len(samples) == 5
        for index, (text, i) in enumerate(zip(texts, order, strict=True)):
            assert samples[index]["caption"] == text
            assert torch.equal(samples[index]["image"], function(pictures()[i], SIZE))
    assert len(open_samples(replace(config, num_samples=2), SIZE)) == 2


def test_linked_folders_are_refused_where_datasets_does_not_read_them(tmp_path):
    """Catches training on the images outside linked subfolders only."""
    config = source("huggingface", tmp_path)
    (tmp_path / "data" / "more").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ValueError, match="more is a link to a folder, which datasets does not"):
        open_samples(config, 16)


def test_scenes_are_the_training_scenes():
    samples = open_samples(SCENES, SIZE)
    assert len(samples) == 20
    scene = sample_scene(TRAINING_SEEDS[7])
    assert samples[7]["caption"] == scene.caption
    assert np.array_equal(samples[7]["image"].permute(1, 2, 0), render(scene, SIZE))
    assert open_samples(SCENES, 2 * SIZE).fingerprint != samples.fingerprint


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("folder", {"path": None}, "source folder needs path"),
        ("folder", {"split": "train"}, "source folder takes no split, but got 'train'"),
        ("huggingface json", {"caption_column": "a"}, "captions and caption_column exclude"),
        ("huggingface", {"caption_column": None}, "needs caption_column or captions"),
        ("huggingface", {"num_samples": 6}, "num_samples is 6, but .* has 5 samples"),
        ("huggingface", {"image_column": "image"}, "in the column image: .*'image'"),
        ("huggingface", {"caption_column": "caption"}, "'caption'.*not in"),
        ("huggingface", {"image_column": "unused"}, "images in the column unused: .*int64"),
        ("huggingface", {"split": "test"}, "as source huggingface .*: Unknown split"),
        (
            "huggingface json",
            {"captions": "{root}/short.txt"},
            "per row of .*, 5, but has 2",
        ),
        ("huggingface json", {"captions": "{root}/bad.json"}, "bad.json is not JSON"),
        ("folder", {"path": "{root}/none"}, "there are no images in the folder .*none"),
        ("huggingface", {"path": "{root}/none"}, "none cannot be loaded as source huggingface"),
    ],
)
def test_refusals(kind, changes, message, tmp_path):
    (tmp_path / "short.txt").write_text("a\nb\n")
    (tmp_path / "bad.json").write_text('["a",')
    changes = {
        key: value.format(root=tmp_path) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    config = source(kind, tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_samples(replace(config, **changes), SIZE)


def test_an_image_without_caption_is_named(tmp_path):
    config = source("folder", tmp_path)
    (tmp_path / "data" / "e.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 5 images have no caption .*e\.txt"):
        open_samples(config, SIZE)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_samples": 10_000_001}, SIZE, "num_samples must be at most 10000000"),
        ({}, 72, "multiple of 64"),
        ({"num_samples": 5}, SIZE, "takes 3 x 2 samples, but the data has 5"),
    ],
)
def test_refusals_of_scenes(changes, size, message):
    """Catches an error that only appears in a worker, or at the first batch."""
    with pytest.raises(ValueError, match=message):
        make_stream(replace(SCENES, **changes), size=size, num_processes=2)


def test_crop_takes_the_middle_square():
    columns = np.zeros((2, 4, 3), np.uint8)
    columns[:, 1], columns[:, 2] = (0, 255, 0), (0, 0, 255)
    expected = [[[0, 0]] * 2, [[255, 0]] * 2, [[0, 255]] * 2]
    assert crop(Image.fromarray(columns), 2).tolist() == expected
    assert crop(Image.fromarray(columns.swapaxes(0, 1)), 2)[1].tolist() == [[255, 255], [0, 0]]


def test_crop_is_antialiased():
    """At a third of the side LinFusion's samples are single pixels; a mean is not."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8))
    assert crop(picture, 32).float().std() < 0.6 * linfusion(picture, 32).float().std()


def test_linfusion_is_opencv():
    """`cv2.resize(grey, (4, 4), interpolation=cv2.INTER_CUBIC)` gave these figures."""
    grey = (np.arange(35) ** 2 * 31 % 256).astype(np.uint8).reshape(5, 7)
    expected = torch.tensor(
        [[28, 127, 226, 53], [219, 137, 110, 133], [122, 0, 154, 122], [218, 217, 12, 243]]
    )
    found = linfusion(Image.fromarray(grey).convert("RGB"), 4)
    assert (found.int() - expected).abs().max() <= 1  # OpenCV has 11 bits for a weight
    # By hand: at half the side the weights are a/8 = -3/32 and (5 + ...)/8 = 19/32, edges repeat.
    line = Image.fromarray(np.array([[0, 200, 0, 0]] * 4, np.uint8)).convert("RGB")
    assert linfusion(line, 2)[0].tolist() == [[round(200 * 19 / 32), 0]] * 2


# The encoder and its cache


def test_encoder_is_the_pipeline():
    """Catches other pixel ranges, scaled latents, another layer of the text encoder."""
    pipe = two_level_pipe()
    parts = Encoder(pipe.vae, pipe.text_encoder, pipe.tokenizer)
    captions = ["a red fox", "", "a fox " * 40]  # 77 tokens hold less than 40 foxes
    images = [picture.resize((64, 64)) for picture in pictures()[:3]]
    pixels = torch.stack([crop(image, 64) for image in images])
    found = parts.encode(pixels, captions)
    with torch.no_grad():
        expected = pipe.vae.encode(pipe.image_processor.preprocess(images)).latent_dist
        states, _ = pipe.encode_prompt(captions, "cpu", 1, False)
    assert torch.allclose(found["text_states"], states, atol=1e-6)
    posterior = DiagonalGaussianDistribution(found["moments"])
    assert torch.allclose(posterior.mean, expected.mean, atol=1e-5)
    assert torch.allclose(posterior.std, expected.std, atol=1e-5)
    assert not any(value.requires_grad for value in found.values())
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_encoder_keeps_the_dtype_of_its_parts():
    parts = encoder()
    expected = parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])
    parts.vae.bfloat16()
    parts.text_encoder.bfloat16()
    found = parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])
    for name in found:
        assert not torch.equal(found[name], expected[name])
        assert torch.allclose(found[name], expected[name], rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_encoder_computes_in_half_precision_on_cuda():
    """Also catches pinned batches that are overwritten before they are copied."""
    samples, parts = open_samples(SCENES, SIZE), encoder()
    order = next(sample_order(20, **arguments(batch_size=60)))
    pixels = torch.stack([samples[index]["image"] for index in order])
    expected = parts.encode(pixels, [samples[index]["caption"] for index in order])
    parts.vae.cuda()
    parts.text_encoder.cuda()
    found = take(make_stream(replace(SCENES, workers=2), parts), 20)
    for name in found:
        assert found[name].device.type == "cuda"
        error = (found[name].cpu() - expected[name]).norm() / expected[name].norm()
        assert 1e-5 < error < 1e-2


def test_cache_equals_no_cache(tmp_path):
    config = replace(SCENES, cache=str(tmp_path / "cache"))
    parts = encoder()
    expected = take(make_stream(parts=parts), 9)
    found = take(make_stream(config, parts), 9)
    for name in found:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], found[name].half().float())
        assert torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-4)
    # 20 samples in shards of 8.
    shards = sorted(path.name for path in (tmp_path / "cache").rglob("*.safetensors"))
    assert shards == [f"shard-00000{number}.safetensors" for number in range(3)]

    parts.encode = None  # a complete cache needs no encoder
    resumed = take(make_stream(replace(config, workers=2), parts, first_sample=15), 4)
    assert_same(resumed, {name: value[15:] for name, value in found.items()})


def change_encoder(parts, key):
    if key == "vae":
        with torch.no_grad():
            parts.vae.encoder.conv_in.weight[0, 0, 0, 0] += 0.01
    elif key == "text_encoder":
        parts.text_encoder.config.hidden_act = "gelu"
    else:
        parts.tokenizer.add_tokens(["fox"])


def folders(root):
    return len([*root.iterdir()])


def test_another_encoder_gets_a_cache_of_its_own(tmp_path):
    """Catches a fingerprint without one of the three, and one of the state that a call leaves."""
    config = replace(SCENES, cache=str(tmp_path), num_samples=4)
    make_stream(config)
    parts = encoder()
    parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])  # leaves padding behind
    make_stream(config, parts)
    assert folders(tmp_path) == 1
    for count, key in enumerate(("vae", "text_encoder", "tokenizer"), 2):
        parts = encoder()
        change_encoder(parts, key)
        make_stream(config, parts)
        assert folders(tmp_path) == count


def same_size(path):
    """Another PNG of as many bytes."""
    other = BytesIO()
    Image.new("RGB", Image.open(path).size, "red").save(other, "png")
    return other.getvalue().ljust(path.stat().st_size, b"\0")


@pytest.mark.parametrize(
    ("kind", "file"), [("huggingface", "train.parquet"), ("folder", "e.txt"), ("folder", "e.png")]
)
def test_other_data_get_a_cache_of_their_own(kind, file, tmp_path, monkeypatch):
    """Catches a fingerprint of the path alone, of an absolute path or of times, which a copy does
    not keep, one without the order of files, and images of an older file of the same name."""
    config = replace(source(kind, tmp_path / "one"), path="data", cache=str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "one")
    make_stream(config)
    make_stream(replace(config, workers=1))
    (tmp_path / "one").rename(tmp_path / "two")
    monkeypatch.chdir(tmp_path / "two")
    path = tmp_path / "two" / "data" / file
    os.utime(path, (1, 1))
    make_stream(config)
    count = 1
    assert folders(tmp_path / "cache") == count
    if kind == "huggingface":
        for name, other in (("preprocessing", "linfusion"), ("num_samples", 4), ("split", "all")):
            make_stream(replace(config, **{name: other}))
            count += 1
            assert folders(tmp_path / "cache") == count, name
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train")
        rows.select(range(4, -1, -1)).to_parquet(path)
    else:
        path.write_bytes(path.read_bytes().upper() if file == "e.txt" else same_size(path))
    os.utime(path, (1, 1))
    make_stream(config)
    for part in path.parent.glob(f"{path.stem}.*"):  # now the last
        part.rename(part.with_stem(f"z_{part.stem}"))
    make_stream(config)
    make_stream(config, size=128)
    assert folders(tmp_path / "cache") == count + 3


def test_a_cache_that_lacks_a_process_share_is_refused(tmp_path):
    """As when each machine has a disk of its own."""
    with pytest.raises(ValueError, match=r"1 of 3 shards of the cache .* all processes share"):
        make_stream(replace(SCENES, cache=str(tmp_path / "cache")), num_processes=2)


def test_moments_beyond_half_precision_are_refused(tmp_path):
    parts = encoder()
    with torch.no_grad():
        parts.vae.quant_conv.bias += 1e6
    with pytest.raises(FloatingPointError, match="moments of samples 0 to 7 are not finite"):
        make_stream(replace(SCENES, cache=str(tmp_path / "cache")), parts)


def test_an_interrupted_build_continues(tmp_path):
    """Catches complete shards that are built again, and half a shard that is taken for one."""
    config = replace(SCENES, cache=str(tmp_path / "cache"))
    parts = encoder()
    with pytest.raises(KeyboardInterrupt):
        make_stream(config, Interrupted(parts))
    kept = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("shard-*")}
    assert len(kept) == 2
    next(iter(kept)).with_name(".writing-shard-000002.safetensors-1").write_text("half")
    found = take(make_stream(config, parts), 6)
    assert all(path.stat().st_ino == inode for path, inode in kept.items())
    assert not list((tmp_path / "cache").rglob(".writing-*"))
    other = replace(config, cache=str(tmp_path / "undisturbed"))
    assert_same(found, take(make_stream(other, parts), 6))


class Interrupted(Encoder):
    """An encoder that is interrupted in its third batch."""

    def __init__(self, parts):
        super().__init__(parts.vae, parts.text_encoder, parts.tokenizer)
        self.left = 2

    def encode(self, *batch):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().encode(*batch)


# Broken samples, workers, the order of samples


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
    for found, indices in islice(zip(make_stream(parts=parts), batches, strict=False), 2):
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

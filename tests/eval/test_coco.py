"""The COCO evaluation: its real command on scenes, killed and restarted, and every refusal.

A scorer of mini-sd stands in for the two networks that would be downloaded; all else is real.
"""

import codecs
import contextlib
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from PIL import Image
from scipy.linalg import sqrtm
from tiny import random_codebooks, tiny_pipe, tiny_unet

from avq_diffusers.cli import options
from avq_diffusers.files import locked
from avq_diffusers.mini import SCORER, TEST_SEEDS, sample_scene
from avq_diffusers.plugin.prompts import quiet
from eval.commands.coco import coco_generate_command
from eval.quality import captions, coco, coco_score, frechet, protocol
from eval.quality.captions import read_captions
from eval.quality.generation import Sampling, generate_batch
from eval.quality.metrics import Scorer
from eval.quality.networks import Inception, OpenCLIP
from eval.store.report import folder_digest

NUM = 5  # images of a row
NUM_REAL = 8
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["eval.__main__", "pytest", "scipy.linalg", "safetensors.torch"])


@pytest.fixture(scope="module", autouse=True)
def _own_state():
    """The processes of other tests are not those of these; four blocks are enough."""
    PartialState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coco_score, "JACKKNIFE_BLOCKS", 4)
        yield
    PartialState._reset_state()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model, codebooks for it, and scenes written as COCO."""
    place = tmp_path_factory.mktemp("coco")
    tiny_pipe().save_pretrained(place / "model")
    random_codebooks(tiny_unet()).save_pretrained(place / "avq")
    assert run("write", place / "scenes", "--images", NUM_REAL, "--size", 64) == (0, "", "")
    return place


@pytest.fixture(scope="module")
def exact(place):
    """A finished row, of a process in which no test has changed how products are rounded."""
    finish(start(generation(place, "exact")))
    return place / "exact"


def run(*arguments):
    """Exit code, output and errors of `python -m eval coco ...`, run in this process."""
    from eval import __main__ as command

    output, errors, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["eval", "coco", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            command.main()
    except SystemExit as exit_:
        code = exit_.code or 0
    finally:
        sys.argv = argv
    shown = [line for line in errors.getvalue().splitlines() if line.startswith(("eval:", "warn"))]
    return code, output.getvalue(), "\n".join(shown)


def generation(place, folder, **changes):
    options = {
        "model": place / "model",
        "captions": place / "scenes/annotations/captions_scenes.json",
        "images": NUM,
        "size": 64,
        "steps": 2,
    }
    options |= {name.replace("_", "-"): value for name, value in changes.items()}
    return [
        "generate",
        place / folder,
        *(
            part
            for name, value in options.items()
            for part in (f"--{name}", value)
            if part is not None
        ),
    ]


def generate(place, folder, **changes):
    return run(*generation(place, folder, **changes))


def score(place, *folders, output="results", **changes):
    options = {
        "real": place / "scenes/images",
        "scorer": SCORER,
        "cache": place / "cache",
        "output": place / output,
        "threads": 2,
    }
    options |= changes
    parts = [part for name, value in options.items() for part in (f"--{name}", value)]
    return run("score", *(place / folder for folder in folders), *parts)


def rows_of(place, output="results"):
    return json.loads((place / output / "coco.json").read_text())["rows"]


def images(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "images").glob("[0-9]*.png"))}


def run_process(arguments, environment):
    os.environ.update(environment)
    torch.set_num_threads(1)
    code, _, errors = run(*arguments)
    assert code == 0, errors


def start(arguments, **environment):
    process = FORKED.Process(target=run_process, args=(arguments, environment))
    process.start()
    return process


def finish(process):
    process.join(120)
    assert process.exitcode == 0


# Captions


def write_annotations(path, count=40):
    """Two captions of each image, in COCO's format and with its line feeds."""
    annotations = [
        {"id": 1000 - 2 * image + which, "image_id": 7 * image, "caption": f"{image} {which}\n "}
        for image in range(count)
        for which in range(2)
    ]
    path.write_text(json.dumps({"images": [], "annotations": annotations}))
    return path


def test_a_draw_takes_one_caption_of_each_image(tmp_path):
    """Catches an image drawn twice, a draw that no seed repeats, and a pilot that is no prefix."""
    path = write_annotations(tmp_path / "captions.json")
    drawn = read_captions(path, 40)
    images = [int(text.split()[0]) for text in drawn.texts]
    assert sorted(images) == list(range(40))
    assert images != sorted(images)
    assert {text.split()[1] for text in drawn.texts} == {"0", "1"}
    assert read_captions(path, 15).texts == drawn.texts[:15]
    other = read_captions(path, 40, seed=1)
    assert other.texts != drawn.texts
    assert (drawn.origin, other.origin) == (
        "draw of seed 0 from captions.json",
        "draw of seed 1 from captions.json",
    )
    annotations = json.loads(path.read_text())
    annotations["annotations"].reverse()
    path.write_text(json.dumps(annotations))
    assert read_captions(path, 40) == drawn
    assert drawn.texts[:3] == ("21 1", "25 1", "17 1")  # on every machine, for good


def test_a_list_keeps_its_order(tmp_path, monkeypatch):
    path = tmp_path / "captions.txt"
    path.write_bytes("  a fox \r\nübung\x0bx\na fox\nlast\n".encode())
    found = read_captions(path, 3)
    assert found.texts == ("a fox", "übung\x0bx", "a fox")
    assert found.origin == "list captions.txt"
    monkeypatch.setattr(captions, "CAPTIONS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    assert read_captions(path, 4).origin == "LinFusion's list"


@pytest.mark.parametrize("name", ["captions.txt", "captions.json", "captions.JSON"])
def test_a_byte_order_mark_changes_no_caption(tmp_path, name):
    path = tmp_path / name
    if name == "captions.txt":
        path.write_text("one\ntwo\n", encoding="utf-8")
    else:
        write_annotations(path)
    expected = read_captions(path, 2)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read_captions(path, 2) == expected


ANNOTATION = {"id": 1, "image_id": 2, "caption": "a"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captions.txt", None, r"no file .*captions.txt; put there .*captions_val2014.json"),
        ("captions.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("captions.txt", b"one\ntwo\n", "3 captions are needed, but .*captions.txt has 2"),
        ("captions.txt", b"one\n \nthree\n", "caption 2 of .* is empty"),
        ("captions.txt", "a\nb\nc".encode("utf-16"), "is not UTF-8 text but UTF-16"),
        ("captions.json", b'{"annotations": [', r"is not JSON \(.*line 1 column 18"),
        ("captions.JSON", b"a\nb\nc\n", "captions.JSON is not JSON"),
        ("captions.json", b"[]", "does not hold captions as COCO's captions_val2014.json does"),
        (
            "instances.json",
            b'{"annotations": [{"id": 1, "image_id": 2, "bbox": []}]}',
            "annotation 1 of .*instances.json does not hold a caption as COCO's",
        ),
        *(
            ("captions.json", json.dumps({"annotations": [ANNOTATION, entry]}).encode(), message)
            for entry, message in (
                (
                    {**ANNOTATION, "caption": None},
                    "annotation 2 .*: caption must be text.* null",
                ),
                ({**ANNOTATION, "image_id": "2"}, "annotation 2 of .*: image_id must be .* '2'"),
                ({**ANNOTATION, "id": True}, "annotation 2 of .*: id must be an integer, .* True"),
                ("a", "annotation 2 of .* does not hold a caption as COCO's"),
            )
        ),
        (
            "captions.json",
            json.dumps({"annotations": [ANNOTATION]}).encode(),
            "3 captions are needed, but .*captions.json has 1",
        ),
        (
            "captions.json",
            json.dumps(
                {"annotations": [{"id": i, "image_id": i, "caption": "\ud800"} for i in range(3)]}
            ).encode(),
            "annotation 1 of .*: caption holds half of a surrogate pair",
        ),
    ],
)
def test_bad_captions_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_captions(tmp_path / name, 3)


# From features to figures


def correlated(count, width, seed):
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(width, width)) / width**0.5
    return generator.gamma(0.5, size=(count, width)) @ mixing + generator.normal(size=width)


def clean_fid(first, second):
    """The formula of clean-fid: the matrix root of the product of numpy's covariances."""
    covariances = np.cov(first.T), np.cov(second.T)
    means = first.mean(0) - second.mean(0)
    root = sqrtm(covariances[0] @ covariances[1]).real
    return means @ means + np.trace(covariances[0] + covariances[1] - 2 * root)


def test_fid_is_that_of_clean_fid(monkeypatch):
    """Catches ddof 0, half precision, a product of roots in the wrong order, a lost chunk."""
    monkeypatch.setattr(frechet, "CHUNK", 97)
    first, second = correlated(900, 64, 0), correlated(700, 64, 1)
    real, generated = (frechet.fit_gaussian(torch.from_numpy(x)) for x in (first, second))
    expected = clean_fid(first, second)
    assert expected > 10
    assert frechet.frechet_distance(real, generated) == pytest.approx(expected, rel=1e-9)
    assert frechet.frechet_distance(generated, real) == pytest.approx(expected, rel=1e-9)
    assert frechet.frechet_distance(real, real) == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(real.covariance.numpy(), np.cov(first.T))


def test_fid_of_fewer_images_than_features():
    """A shift changes means only, also where covariances are singular; far means do not cancel."""
    features = torch.from_numpy(correlated(20, 64, 0)) + 1e4
    shift = torch.linspace(0, 1, 64, dtype=torch.float64)
    moved = frechet.fit_gaussian(features + shift)
    distance = frechet.frechet_distance(frechet.fit_gaussian(features), moved)
    assert distance == pytest.approx(float((shift**2).sum()), rel=1e-5)


def test_the_jackknife_leaves_each_block_out(monkeypatch):
    """Against fits of what is left: catches a wrong block, mean, covariance or factor, and blocks
    without a row, which would leave out nothing."""
    monkeypatch.setattr(frechet, "CHUNK", 3)
    real = frechet.fit_gaussian(torch.from_numpy(correlated(40, 4, 1)))
    features = torch.from_numpy(correlated(22, 4, 0))
    distances = [
        frechet.frechet_distance(
            real, frechet.fit_gaussian(features[torch.arange(22) % 5 != block])
        )
        for block in range(5)
    ]
    expected = (4 / 5 * sum((x - np.mean(distances)) ** 2 for x in distances)) ** 0.5
    assert frechet.jackknife_error(real, features, 5) == pytest.approx(expected)
    few = features[:3]
    assert frechet.jackknife_error(real, few, 5) == frechet.jackknife_error(real, few, 3) > 0
    assert np.isnan(frechet.jackknife_error(real, features[:2], 5))


def test_kid_of_whole_sets_is_the_unbiased_estimate(monkeypatch):
    """Catches a biased estimate, another kernel, and use of the global random numbers."""
    real, generated = (torch.from_numpy(correlated(40, 6, seed)) for seed in (0, 1))

    def kernel(first, second):
        return (first @ second.T / 6 + 1) ** 3

    def off_diagonal(matrix):
        return (matrix.sum() - matrix.trace()) / (40 * 39)

    expected = off_diagonal(kernel(real, real)) + off_diagonal(kernel(generated, generated))
    expected -= 2 * kernel(real, generated).mean()
    state = torch.random.get_rng_state()
    whole = coco_score.kernel_distance(real, generated)
    assert whole["kid"] == pytest.approx(float(expected))
    assert whole["kid_std"] is None
    assert whole["kid_subset_size"] == 40
    assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setattr(coco_score, "KID_SUBSET_SIZE", 10)
    first = coco_score.kernel_distance(real, generated)
    torch.manual_seed(1)
    assert coco_score.kernel_distance(real, generated) == first
    assert first["kid_std"] > 0
    assert first["kid_subset_size"] == 10


def noise(height, width, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return values, Image.fromarray(values)


def test_the_middle_square_is_that_of_torchvision():
    """round((length - side) / 2): 1.5 to 2, 0.5 to 0; no resize where none is needed."""
    values, image = noise(256, 259)
    prepared = coco_score.prepare_whole(image, 0)
    assert prepared["bytes"].dtype == torch.uint8
    assert np.array_equal(prepared["bytes"].permute(1, 2, 0), values[:, 2:258])
    values, image = noise(257, 256)
    prepared = coco_score.prepare_whole(image, 0)
    assert np.array_equal(prepared["bytes"].permute(1, 2, 0), values[:256])


def test_pixels_are_enlarged_in_floats_from_bytes_at_256():
    """clean-fid's mode "clean"; catches bytes at 299, no clip, and a resize in one step."""
    _, image = noise(400, 300)
    prepared = coco_score.prepare_whole(image, 0)
    small = image.crop((0, 50, 300, 350)).resize((256, 256), Image.Resampling.LANCZOS)
    assert np.array_equal(prepared["bytes"].permute(1, 2, 0), np.asarray(small))
    for channel, pixels in zip(small.split(), prepared["pixels"], strict=True):
        enlarged = channel.convert("F").resize((299, 299), Image.Resampling.BICUBIC)
        assert np.asarray(enlarged).min() < 0
        assert np.asarray(enlarged).max() > 255
        np.testing.assert_array_equal(pixels, np.asarray(enlarged).clip(0, 255))
    assert (prepared["pixels"] % 1 != 0).any()


def test_patches_are_cut_and_not_resized():
    values, image = noise(500, 512)
    patches = [
        coco_score.prepare_patch(image, n, size=500)["pixels"].permute(1, 2, 0).numpy()
        for n in (0, 1, 0)
    ]
    corners = np.lib.stride_tricks.sliding_window_view(values[:, 6:506], (3, 3, 3))[:, :, 0]
    places = [np.argwhere((corners == one[:3, :3]).all((2, 3, 4))) for one in patches]
    for patch, ((top, left),) in zip(patches, places, strict=True):
        assert np.array_equal(patch, values[top : top + 299, 6 + left : 6 + left + 299])
    assert np.array_equal(places[0], places[2])
    assert not np.array_equal(places[0], places[1])
    with pytest.raises(ValueError, match="patches need images of at least 512, but it has"):
        coco_score.prepare_patch(image, 0, size=512)


# Protocol


def test_the_protocol_is_that_of_linfusion():
    """Its numbers a second time, from eval.py, calculate_metrics.py and the paper of KID. Catches
    one that is changed: figures would pass for published ones, and no row would say otherwise."""
    assert protocol.GENERATION == {
        "model": "stable-diffusion-v1-5",
        "captions": "LinFusion's list",
        "num_images": 30_000,
        "sampler": "PNDM",
        "num_inference_steps": 25,
        "guidance_scale": 7.5,
        "dtype": "float16",
    }
    digest = "edabd2a556026cbf5d36a5fffa35ad43d7ba71b72f6d640b727c1edefb7f1945"
    assert digest == protocol.CAPTIONS_SHA256
    assert (protocol.NUM_REAL, protocol.FID_SIZE, protocol.INCEPTION_SIZE) == (40_504, 256, 299)
    assert (protocol.CLIP_MODEL, protocol.CLIP_WEIGHTS) == ("ViT-g-14", "laion2b_s12b_b42k")
    assert protocol.CLIP_PREFIX == "A photo depicts "
    assert (protocol.KID_SUBSETS, protocol.KID_SUBSET_SIZE) == (100, 1000)
    assert protocol.JACKKNIFE_BLOCKS == 50


def test_the_command_follows_the_protocol_by_itself():
    """Catches an option whose default is another number: 30 000 images would not compare."""
    options = signature(coco_generate_command).parameters
    names = {"images": "num_images", "steps": "num_inference_steps"}
    names |= {"guidance": "guidance_scale"}
    for option, name in names.items():
        assert options[option].default == protocol.GENERATION[name], option
    assert options["size"].default == protocol.SIZES[0]
    assert Path(options["model"].default).name == protocol.GENERATION["model"]


def protocol_config(**changes):
    return {**protocol.GENERATION, "size": 512, "scalecrafter": False, **changes}


def test_deviations_are_named_and_bands_are_of_the_protocol():
    """Catches figures of 5000 images, or of part of COCO, that pass for published ones."""
    published = {"num_images": 30_000, "num_real": 40_504, "scorer": None}
    assert protocol.deviations(protocol_config(), **published) == []
    assert protocol.deviations(protocol_config(model="me/stable-diffusion-v1-5"), **published) == []
    config = protocol_config(size=640, num_inference_steps=50, model="me/other")
    assert protocol.deviations(protocol_config(size=1024), **published) == [
        "scalecrafter is False, not True"
    ]
    partly = {"num_images": 5000, "num_real": 40_503, "scorer": "folder"}
    assert protocol.deviations(config, **partly) == [
        "model is other, not stable-diffusion-v1-5",
        "num_images is 5000, not 30000",
        "num_inference_steps is 50, not 25",
        "num_real is 40503, not 40504",
        "size is 640, not 512 or 1024",
        "a scorer stands in for Inception and CLIP",
    ]
    paper = {"method": "exact", "fid": 12.75, "clip_score": 0.318}
    assert protocol.implausible(512, paper) == []
    for fid, clip_score in ((41.03, 0.292), (36.37, 0.295)):  # exact and LinFusion, at twice that
        twice = {"method": "exact", "fid": fid, "clip_score": clip_score}
        assert protocol.implausible(1024, twice) == []
    (text,) = protocol.implausible(512, paper | {"fid": 25.0})
    assert text.startswith("exact: fid 25 is implausible for SD1.5 at 512, expected 11.5-14.5 (AVQ")
    assert len(protocol.implausible(1024, paper)) == 2


def test_all_that_is_odd_is_warned_of():
    """Catches a deviation that hides an implausible figure, and bands for a scorer's figures."""
    config = protocol_config(num_inference_steps=50)
    row = {"method": "exact", "num_images": 30_000, "num_real": 40_504}
    row |= {"fid": 25.0, "clip_score": 0.318}
    deviation = "Not the protocol: num_inference_steps is 50, not 25."
    first, second = coco_score.warnings_of(config, row, None)
    assert first == deviation
    assert second.startswith("exact: fid 25 is implausible for SD1.5 at 512")
    assert coco_score.warnings_of(protocol_config(), row, None) == [second]
    assert coco_score.warnings_of(config, row | {"fid": 12.5}, None) == [deviation]
    assert coco_score.warnings_of(config, row | {"method": "value-projection"}, None) == [deviation]
    (text,) = coco_score.warnings_of(protocol_config(model="mini-sd"), row, None)
    assert text == "Not the protocol: model is mini-sd, not stable-diffusion-v1-5."
    (text,) = coco_score.warnings_of(config, row, "folder")
    assert text.endswith(
        "num_inference_steps is 50, not 25; a scorer stands in for Inception and CLIP."
    )


# Generation


def test_kills_and_restarts_change_nothing(place, exact):
    """Catches a half-written image, noise that depends on what is left, lost configuration."""
    expected = images(exact)
    assert len(expected) == len(set(expected.values())) == NUM
    killed = place / "killed"
    delays = random.Random(time.time_ns())
    for least in (0, 2):
        process = start(generation(place, "killed"))
        until = time.monotonic() + 60
        while time.monotonic() < until and len(images(killed)) < least:
            time.sleep(0.005)
        time.sleep(delays.uniform(0, 0.3 if least else 1.0))
        process.kill()
        process.join()
        assert process.exitcode in (-9, 0)
        assert images(killed).items() <= expected.items()
    paths = sorted((killed / "images").glob("[0-9]*.png"))
    assert len(paths) >= 2
    paths[0].write_bytes(expected[paths[0].name][:-20])
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(paths[1])
    (killed / "images" / f"{coco.TEMPORARY}000004.png").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in paths[2:]}
    finish(start(generation(place, "killed", batch=3)))
    assert images(killed) == expected
    assert not list((killed / "images").glob(".*"))
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (exact, killed)]
    assert manifests[0]["config"] == manifests[1]["config"]
    assert len(manifests[1]["earlier_sessions"]) >= 1
    finish(start(generation(place, "killed")))  # makes no image, so it made none of these
    assert json.loads((killed / "manifest.json").read_text()) == manifests[1]
    assert manifests[0]["environment"].keys() >= {"commit", "torch", "diffusers", "device"}

    code, table, _ = score(place, "exact", "killed")
    assert code == 0
    assert len(table.splitlines()) == 4
    first, second = rows_of(place)
    assert first == second


def test_two_processes_make_the_images_of_one(place, exact):
    """Catches a share that is never made, and noise or codebooks that depend on the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start(generation(place, "two"), RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(2)
    ]
    for process in processes:
        finish(process)
    assert images(place / "two") == images(exact)


def test_full_batches_do_not_depend_on_what_is_left(tmp_path):
    """As on a GPU: catches a last batch of another shape, whose kernels round otherwise."""
    pipe = tiny_pipe()
    texts = captions.Captions(tuple("abcde"), "test")
    settings = Sampling(num_inference_steps=2, guidance_scale=7.5, size=64, batch_size=3)
    fill = partial(
        coco._fill,
        tmp_path,
        pipe,
        texts,
        range(5),
        description="",
        settings=settings,
        is_shown=False,
    )
    (tmp_path / "images").mkdir()
    with quiet(pipe):
        fill()
        expected = images(tmp_path)
        for missing in ((0, 4), (1, 2, 3), (2,)):
            for index in missing:
                coco.image_path(tmp_path, index).unlink()
            fill()
            assert images(tmp_path) == expected
        alone = generate_batch(pipe, ["c"], [2], settings)
    with Image.open(coco.image_path(tmp_path, 2)) as stored:
        assert abs(np.asarray(stored).astype(int) - alone[0]).max() <= 1


def test_images_follow_the_protocol(place, exact):
    """PNDM, guidance 7.5, noise of seed i drawn alone, caption i, no safety checker."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(place / "model")
    pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    texts = (exact / "captions.txt").read_text().splitlines()
    assert set(texts) < {sample_scene(seed).caption for seed in TEST_SEEDS[:NUM_REAL]}
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    with quiet(pipe):
        image = pipe(texts[3], num_inference_steps=2, latents=noise, height=64, width=64).images[0]
    with Image.open(exact / "images/000003.png") as stored:
        assert abs(np.asarray(stored).astype(int) - np.asarray(image).astype(int)).max() <= 1


@pytest.mark.long
def test_methods_change_images_and_codebooks_are_kept(place, exact, monkeypatch):
    """Catches a method that is not applied, a restart that calibrates anew, and a calibration on
    captions of scenes, which are nothing to another model."""
    folders = {"row-avq": place / "avq", "row-p1": f"{place / 'avq'}@P1"}
    for folder, method in folders.items():
        assert generate(place, folder, method=method, images=2) == (0, "", "")
    prompts = place / "prompts.txt"
    prompts.write_text("a fox\n")
    calibrated = {"method": "M3", "calibration": prompts, "images": 2}
    assert generate(place, "row-m3", **calibrated)[0] == 0
    made = [images(folder) for folder in (exact, *(place / name for name in folders))]
    made.append(images(place / "row-m3"))
    for first, second in pairwise([*made, made[0]]):
        assert all(first[name] != second[name] for name in made[-1])

    weights = place / "row-m3/codebooks/diffusion_pytorch_model.safetensors"
    before = weights.stat().st_mtime_ns
    coco.image_path(place / "row-m3", 1).unlink()
    assert generate(place, "row-m3", **calibrated)[0] == 0
    assert weights.stat().st_mtime_ns == before
    assert images(place / "row-m3") == made[-1]
    monkeypatch.setattr(options, "CALIBRATION_PROMPTS", ("a fox",))
    assert generate(place, "row-default", method="M3", images=2)[0] == 0
    assert images(place / "row-default") == made[-1]

    # What is kept is what is used.
    shutil.copytree(place / "avq", weights.parent, dirs_exist_ok=True)
    coco.image_path(place / "row-m3", 1).unlink()
    assert generate(place, "row-m3", **calibrated)[0] == 0
    assert images(place / "row-m3")["000001.png"] == made[1]["000001.png"]

    # Killed before the codebooks had their name.
    shutil.rmtree(place / "row-m3/codebooks")
    shutil.rmtree(place / "row-m3/images")
    assert generate(place, "row-m3", **calibrated)[0] == 0
    assert images(place / "row-m3") == made[-1]

    assert score(place, *folders, "row-m3", output="methods")[0] == 0
    rows = rows_of(place, "methods")
    assert [row["origin"] for row in rows] == ["calibrated"] * 3
    assert [row["effective_codewords"] for row in rows] == [8, 6, 3]
    assert len({row["fid"] for row in rows}) == 3


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_codebooks_that_are_deleted_come_back_to_finished_images(place):
    """Catches a folder with nothing left to draw that stays without the codebooks of its row."""
    command = {"method": f"{place / 'avq'}@P1", "images": 2}
    assert generate(place, "row-finished", **command) == (0, "", "")
    folder = place / "row-finished"
    config = coco.read_manifest(folder)["config"]
    assert config["method_sha256"] == folder_digest(place / "avq", "config.json")
    made = contents(folder)
    manifest = (folder / "manifest.json").read_bytes()
    assert "codebooks/config.json" in made
    shutil.rmtree(folder / "codebooks")
    assert generate(place, "row-finished", **command) == (0, "", "")
    assert contents(folder) == made
    assert (folder / "manifest.json").read_bytes() == manifest


def test_a_folder_may_be_named_like_a_configuration(place, monkeypatch):
    """Catches kept codebooks that are asked for by a path which reads as a configuration."""
    monkeypatch.chdir(place)
    for _ in range(2):
        assert generate(Path(), "M4P2C2-512", method="avq", images=2) == (0, "", "")
    assert len(images(Path("M4P2C2-512"))) == 2


def test_captions_are_cut_at_newlines_only(place, tmp_path):
    """Catches a finished row that cannot be scored, as a caption holds a carriage return."""
    listed = tmp_path / "captions.txt"
    listed.write_bytes(b"a red circle\rbig\na blue square\n")
    assert generate(tmp_path, "row", model=place / "model", captions=listed, images=2)[0] == 0
    options = {"real": place / "scenes/images", "cache": place / "cache"}
    assert score(tmp_path, "row", **options)[0] == 0


def test_each_row_is_warned_of_by_its_own_model(tmp_path, place):
    """Catches a fine-tune that passes for SD1.5 because SD1.5's row comes first, or by a row that
    does not name it."""
    for name in ("one", "two"):
        write_row(tmp_path / name, [noise(64, 64, seed)[1] for seed in range(3)], 64)
    manifest = tmp_path / "one/manifest.json"
    manifest.write_text(manifest.read_text().replace("models/tiny", "stable-diffusion-v1-5"))
    for folders in (("one", "two"), ("two", "one")):
        code, output, errors = score(tmp_path, *folders, real=place / "scenes/images")
        assert code == 0
        assert "model is tiny, not stable-diffusion-v1-5" in errors
        names = {"one": "stable-diffusion-v1-5", "two": "tiny"}
        assert [row["model"] for row in rows_of(tmp_path)] == [names[name] for name in folders]
        assert "| tiny | exact |" in output
        assert "| stable-diffusion-v1-5 | exact |" in output


def test_scalecrafter_dilates_beyond_the_training_size(place):
    """Catches an option that is recorded and not applied."""
    changes = {"size": 256, "images": 2}
    assert generate(place, "plain", **changes)[0] == 0
    assert generate(place, "dilated", scalecrafter=None, **changes)[0] == 0
    plain, dilated = (images(place / folder) for folder in ("plain", "dilated"))
    assert all(plain[name] != dilated[name] for name in plain)
    code, _, errors = generate(place, "plain", scalecrafter=None, **changes)
    assert code == 2
    assert errors.endswith("it differs in scalecrafter.")


@pytest.mark.long
def test_a_compiled_row(place, exact, monkeypatch):
    """Catches an option that is recorded and not applied, and images of another noise."""

    def compile_module(self, **options):
        self._compiled_call_impl = torch.compile(self._call_impl, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    assert generate(place, "compiled", compile=None)[0] == 0
    assert counted["unique_graphs"] > 0
    for path in sorted((exact / "images").iterdir()):
        first, second = (
            np.asarray(Image.open(folder / "images" / path.name), np.int16)
            for folder in (exact, place / "compiled")
        )
        assert np.abs(first - second).max() <= 1
    code, _, errors = generate(place, "compiled")
    assert code == 2
    assert errors.endswith("it differs in compiled.")


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"steps": 3}, "num_inference_steps"),
        ({"size": 128, "guidance": 3.0}, "guidance_scale, size"),
        ({"images": 6}, "captions_sha256, num_images"),
        ({"draw_seed": 1}, "captions, captions_sha256"),
        ({"method": "value-projection", "levels": "0,1"}, "levels, method"),
    ],
)
def test_a_folder_of_another_configuration_is_refused(place, exact, changes, keys):
    before = images(exact), (exact / "manifest.json").read_bytes()
    code, _, errors = generate(place, "exact", **changes)
    assert (code, errors) == (
        2,
        f"eval: {exact} holds images of another configuration; it differs in {keys}.",
    )
    assert (images(exact), (exact / "manifest.json").read_bytes()) == before


def test_blank_lines_between_calibration_prompts_are_none(place, exact, tmp_path):
    """Catches a file of the usual prompts that is another calibration than without it."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(["", *options.CALIBRATION_PROMPTS, ""]))
    before = images(exact)
    assert generate(place, "exact", calibration=prompts) == (0, "", "")
    assert images(exact) == before


def test_a_folder_that_another_command_writes_is_refused(place, exact):
    """Catches two commands that delete and rename each other's temporary files."""
    with locked(exact, 0, "busy"):
        code, _, errors = generate(place, "exact")
    assert code == 2
    assert f"another command writes {exact}; wait for its end, or launch both" in errors
    assert generate(place, "exact")[0] == 0


def test_another_model_in_the_same_folder_is_refused(place, exact):
    """Catches a manifest that knows the model by its name only."""
    config = place / "model/scheduler/scheduler_config.json"
    before = config.read_text()
    config.write_text(before.replace('"beta_end": 0.012', '"beta_end": 0.013'))
    code, _, errors = generate(place, "exact")
    config.write_text(before)
    assert code == 2
    assert errors.endswith("it differs in model_sha256.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 100}, "--size must be a multiple of 8, but got 100"),
        ({"size": 0}, "--size must be a multiple of 8, but got 0"),
        ({"guidance": "nan"}, "--guidance must be finite, but got nan"),
        ({"captions": "nothing.txt"}, "there is no file nothing.txt; put there"),
        ({"images": 9}, "9 captions are needed, but .*captions_scenes.json has 8"),
        ({"method": "M4P9C2"}, "num_refined"),
        ({"method": "M"}, "methods must be exact"),
        ({"method": "no/such"}, "there is no folder no/such"),
        ({"scalecrafter": None}, "size"),
        ({"levels": "7"}, "level"),
        ({"calibration": os.devnull}, "--calibration /dev/null holds no prompt"),
        ({"calibration": "nothing.txt"}, "--calibration nothing.txt cannot be read"),
        ({"model": "nothing/here"}, "nothing/here"),
        ({"device": "nonsense"}, "--device nonsense cannot be used"),
    ],
)
def test_mistakes_leave_no_folder(place, changes, message):
    code, _, errors = generate(place, "mistake", **changes)
    assert code == 2
    assert re.search(message, errors), errors
    assert not (place / "mistake").exists()


def test_a_folder_of_other_things_is_refused(place):
    (place / "other").mkdir()
    (place / "other/thesis.txt").write_text("mine")
    for folder, message in (("other", "holds other things"), ("prompt.txt", "is not a folder")):
        (place / "prompt.txt").write_text("a")
        code, _, errors = generate(place, folder)
        assert code == 2
        assert message in errors
    assert [path.name for path in (place / "other").iterdir()] == ["thesis.txt"]


def test_a_full_disk_loses_nothing(place, tmp_path, monkeypatch):
    def fail(self, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "images").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", fail)
        with pytest.raises(
            OSError, match=r"000000.png could not be written .*No space left.*mended"
        ):
            coco._write_image(tmp_path, 0, np.zeros((8, 8, 3), np.uint8))
    assert not list((tmp_path / "images").iterdir())


def test_images_that_hold_nan_are_refused():
    """Catches black images, which NaN becomes as bytes, in a score."""
    pipe = tiny_pipe()
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"gave NaN for at least one of the seeds \[4\]"):
        generate_batch(
            pipe, ["a"], [4], Sampling(size=64, num_inference_steps=1, guidance_scale=1.0)
        )


# Scores


def test_scores_are_those_of_the_features(place, exact):
    """Against numpy and the scorer itself: catches lost batches, shifted captions, a scale."""
    code, table, errors = score(place, "exact", output="five", batch=2)
    assert code == 0
    assert errors.startswith("warning: Not the protocol: model is")
    assert "; captions is draw of seed 0 from" in errors
    (row,) = rows_of(place, "five")
    scorer = Scorer(SCORER)

    def prepared(folder):
        paths = sorted(folder.glob("*.png"))
        found = [coco_score.prepare_whole(Image.open(path), 0) for path in paths]
        return [torch.stack([one[key] for one in found]) for key in ("pixels", "bytes")]

    pixels, small = prepared(exact / "images")
    real, _ = prepared(place / "scenes/images")
    first, second = (scorer(x).double().numpy() for x in (real, pixels))
    spectrum = np.linalg.eigvals(np.cov(first.T) @ np.cov(second.T)).real.clip(0)
    expected = ((first.mean(0) - second.mean(0)) ** 2).sum() - 2 * np.sqrt(spectrum).sum()
    expected += np.trace(np.cov(first.T) + np.cov(second.T))
    assert row["fid"] == pytest.approx(expected, rel=1e-3)
    assert row["fid_sem"] > 0
    texts = (exact / "captions.txt").read_text().splitlines()
    cosines = scorer.cosines(small, texts).numpy()
    assert row["clip_score"] == pytest.approx(cosines.mean(), abs=1e-5)
    assert row["clip_score_sem"] == pytest.approx(cosines.std(ddof=1) / NUM**0.5, abs=1e-5)
    assert (row["num_images"], row["num_real"]) == (NUM, NUM_REAL)
    assert row["kid_subset_size"] == NUM
    shown = [f"{row['fid']:.2f} ± {row['fid_sem']:.2f}", f"{1000 * row['kid']:.3f}"]
    shown.append(f"{row['clip_score']:.4f} ± {row['clip_score_sem']:.4f}")
    assert f"| exact | - | {' | '.join(shown)} |" in table

    assert score(place, "exact", output="three", images=3)[0] == 0
    (fewer,) = rows_of(place, "three")
    assert fewer["num_images"] == 3
    assert fewer["clip_score"] == pytest.approx(cosines[:3].mean(), abs=1e-5)


def test_captions_do_not_follow_the_bar(place, exact, monkeypatch):
    """Catches captions counted by a bar that TQDM_DISABLE keeps at 0: all of the first batch."""
    assert score(place, "exact", output="with-bar", batch=2)[0] == 0
    monkeypatch.setattr(coco_score, "tqdm", partial(coco_score.tqdm, disable=True))
    assert score(place, "exact", output="without-bar", batch=2)[0] == 0
    assert rows_of(place, "without-bar") == rows_of(place, "with-bar")


def test_real_features_are_found_again_while_the_files_are_the_same(place, exact):
    """Catches features that are always made anew, or those of other files."""
    real = place / "real"

    def scored(output):
        return score(place, "exact", real=real, output=output, images=2)

    shutil.copytree(place / "scenes/images", real)
    assert scored("first")[0] == 0
    path = min(real.iterdir())
    content, state = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert scored("second")[0] == 0
    assert rows_of(place, "first") == rows_of(place, "second")
    os.utime(path)
    code, _, errors = scored("third")
    assert code == 2
    assert f"the image {path} cannot be used: cannot identify image file" in errors
    path.unlink()
    assert scored("third")[0] == 0
    assert rows_of(place, "third")[0]["num_real"] == NUM_REAL - 1
    for file in (place / "cache").iterdir():
        file.write_bytes(b"damaged")
    assert scored("fourth")[0] == 0
    assert rows_of(place, "third") == rows_of(place, "fourth")


def test_real_features_are_those_of_one_preparation(tmp_path, monkeypatch):
    """Catches features of another size, filter, square or network that are taken for these."""
    (tmp_path / "real").mkdir()
    for index in range(2):
        noise(64, 64, index)[1].save(tmp_path / f"real/{index}.png")
    extract = coco_score.Extractor(coco_score.load_networks(SCORER, torch.device("cpu")), 2, 1)
    files = coco_score.real_images(tmp_path / "real")
    whole = coco_score.prepare_whole

    def features(extract=extract, prepare=whole, kind="whole"):
        place, cache = tmp_path / "real", tmp_path / "cache"
        return coco_score.real_features(place, files, extract, prepare, kind, cache)

    def upside_down(image, number):
        return whole(image.rotate(180), number)

    first = features()
    changes = {
        "FID_SIZE": 32,
        "FID_FILTER": Image.Resampling.BOX,
        "INCEPTION_SIZE": 128,
        "INCEPTION_FILTER": Image.Resampling.NEAREST,
    }
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(coco_score, name, value)
            assert not torch.equal(features(), first), name
    assert torch.equal(features(), first)
    assert not torch.equal(features(prepare=upside_down, kind="upside down"), first)
    networks = replace(extract.networks, name="other", features=lambda x: x.mean((2, 3)))
    assert features(replace(extract, networks=networks)).shape == (2, 3)
    assert len(list((tmp_path / "cache").iterdir())) == 3 + len(changes)


def test_two_scorings_at_once_both_write_the_cache(tmp_path, monkeypatch):
    """Catches a temporary file that both write, and that the first one takes from the other."""
    noise(64, 64)[1].save(tmp_path / "a.png")
    extract = coco_score.Extractor(coco_score.load_networks(SCORER, torch.device("cpu")), 2, 1)
    arguments = (tmp_path, [tmp_path / "a.png"], extract, coco_score.prepare_whole, "whole")
    cache, save, others = tmp_path / "cache", coco_score.save_file, []

    def save_while_another_does(tensors, path):
        save(tensors, path)
        monkeypatch.setattr(coco_score, "save_file", save)
        others.append(coco_score.real_features(*arguments, cache))

    monkeypatch.setattr(coco_score, "save_file", save_while_another_does)
    features = coco_score.real_features(*arguments, cache)
    assert torch.equal(features, others[0])
    assert len(list(cache.iterdir())) == 1
    assert torch.equal(coco_score.real_features(*arguments, cache), features)


def write_row(folder, images, size):
    """A finished row of given images."""
    texts = [f"image {index}" for index in range(len(images))]
    digest = captions.Captions(tuple(texts), "").sha256
    config = protocol_config(size=size, captions_sha256=digest, num_images=len(images))
    (folder / "images").mkdir(parents=True)
    for index, image in enumerate(images):
        image.save(coco.image_path(folder, index))
    (folder / "captions.txt").write_text("\n".join(texts) + "\n")
    row = {"method": "exact", "config": None, "effective_codewords": None}
    manifest = {"command": "c", "environment": {}, "earlier_sessions": []}
    config |= {"method": "exact", "model": "models/tiny", "model_sha256": "d"}
    manifest |= {"config": config, "row": row}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.long
def test_patch_fid_sees_detail_that_fid_does_not(tmp_path, monkeypatch):
    """Images that differ in pixel noise only, which shrinking averages away."""
    generator = np.random.default_rng(0)
    smooth = [
        Image.fromarray(generator.integers(60, 200, (4, 4, 3), np.uint8)).resize((1024, 1024))
        for _ in range(4)
    ]
    rough = [
        Image.fromarray(
            (np.asarray(image) + generator.integers(-40, 40, (1024, 1024, 3))).astype(np.uint8)
        )
        for image in smooth
    ]
    write_row(tmp_path / "smooth", smooth, 1024)
    write_row(tmp_path / "rough", rough, 1024)
    reference = tmp_path / "smooth/images"
    shutil.copytree(reference, tmp_path / "copy")
    code, table, _ = score(tmp_path, "smooth", "rough", real=reference, patches=tmp_path / "copy")
    assert code == 0
    assert "| CLIP score | patch FID |" in table
    same, other = rows_of(tmp_path)
    assert same["fid"] == pytest.approx(0, abs=1e-3)
    assert same["patch_fid"] == pytest.approx(0, abs=1e-3)
    assert other["patch_fid"] > 5 * other["fid"] > 0
    _, table, _ = score(tmp_path, "smooth", "rough", real=reference, patches=reference)
    own, another = rows_of(tmp_path)
    assert table.splitlines()[2].endswith(" | - |")
    assert own == {**same, **{key: None for key in same if key.startswith("patch_")}}
    assert another["patch_fid"] == pytest.approx(other["patch_fid"])
    monkeypatch.chdir(tmp_path)
    score(tmp_path, "smooth", "rough", real=reference, patches="smooth/images")
    assert rows_of(tmp_path)[0]["patch_fid"] is None
    small = tmp_path / "small"
    small.mkdir()
    for index in range(2):
        noise(600, 1200)[1].save(small / f"{index}.png")
    code, _, errors = score(tmp_path, "smooth", real=reference, patches=small)
    assert code == 2
    assert "0.png cannot be used: patches need images of at least 1024, but it has" in errors


def test_patches_of_another_size_have_their_own_features(tmp_path):
    """Catches the cache of one size in a table of another, and a row that is its own reference."""
    for size in (300, 400):
        images = [noise(size, size, seed)[1] for seed in range(2)]
        write_row(tmp_path / str(size), images, size)
    options = {"real": tmp_path / "400/images", "patches": tmp_path / "400/images"}
    found = []
    for cache, sizes in (("both", (400, 300)), ("fresh", (300,))):
        for size in sizes:
            code, _, errors = score(tmp_path, str(size), cache=tmp_path / cache, **options)
            assert code == 0, errors
        found += rows_of(tmp_path)
    assert found[0] == found[1]
    assert found[0]["patch_fid"] > 0
    score(tmp_path, "300", real=options["real"], patches=tmp_path / "300")
    assert rows_of(tmp_path)[0]["patch_fid"] is None


def test_real_images_are_all_that_lie_in_the_folder(tmp_path):
    """Catches images of COCO's folders by year, or of cameras, that are no reference."""
    (tmp_path / "val2014").mkdir()
    names = ["b.JPG", "val2014/a.jpeg", "val2014/c.png"]
    for name in (*names, "a.txt", "val2014/._a.jpeg"):
        (tmp_path / name).touch()
    assert coco_score.real_images(tmp_path) == [tmp_path / name for name in names]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: (row / "manifest.json").unlink(), "has no manifest.json; make its images"),
        (
            lambda row: (row / "manifest.json").write_text("{}"),
            r"manifest.json is not the manifest of a folder of images \(KeyError",
        ),
        (
            lambda row: (row / "images/000001.png").unlink(),
            "lacks 1 of 3 images, such as 000001.png; run this again to make them: c",
        ),
        (
            lambda row: (row / "images/000003.png").write_bytes(b"more"),
            "images has 4 files for 3 captions",
        ),
        (
            lambda row: (row / "images/000001.png").write_bytes(b"half"),
            "000001.png cannot be used: cannot identify",
        ),
        (
            lambda row: noise(32, 48)[1].save(row / "images/000002.png"),
            "000002.png cannot be used: it has 48 x 32 pixels and not 64 x 64; its folder's",
        ),
        (lambda row: (row / "captions.txt").unlink(), "has no captions.txt; run its command again"),
        (
            lambda row: (row / "captions.txt").write_text("one\ntwo\nthree\n"),
            "captions.txt is not what the images were made of",
        ),
    ],
)
def test_damaged_rows_are_refused(place, tmp_path, damage, message):
    write_row(tmp_path / "row", [noise(64, 64, seed)[1] for seed in range(3)], 64)
    damage(tmp_path / "row")
    code, _, errors = score(tmp_path, "row", real=place / "scenes/images", cache=place / "cache")
    assert code == 2
    assert re.search(message, errors), errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"real": "nothing"}, "no images in nothing; unpack there .*zips/val2014.zip, whose 40504"),
        ({"real": "single"}, "at least 2 real images are needed, but .*single has 1"),
        ({"images": 4}, "must be between 2 and the 3 of .*row, but got 4"),
        ({"patches": "single"}, "patches need images of at least 299, but .* have 64"),
        ({"scorer": "nothing"}, "there is no scorer in nothing; the one of mini-sd is "),
    ],
)
def test_bad_requests_are_refused(place, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    write_row(tmp_path / "row", [noise(64, 64, seed)[1] for seed in range(3)], 64)
    (tmp_path / "single").mkdir()
    noise(64, 64)[1].save(tmp_path / "single/a.png")
    (tmp_path / "single/._a.png").write_bytes(b"hidden")
    arguments = {"real": place / "scenes/images", "cache": place / "cache"} | changes
    code, _, errors = score(tmp_path, "row", **arguments)
    assert code == 2
    assert re.search(message, errors), errors
    assert not (tmp_path / "results").exists()


def test_rows_of_different_protocols_are_refused(place, tmp_path):
    images = [noise(64, 64, seed)[1] for seed in range(3)]
    write_row(tmp_path / "one", images, 64)
    write_row(tmp_path / "two", images[:2], 64)
    code, _, errors = score(tmp_path, "one", "two", real=place / "scenes/images")
    assert code == 2
    assert errors.endswith(
        "one cannot stand in one table; they differ in captions_sha256, num_images."
    )
    assert not (tmp_path / "results").exists()


def test_rows_of_one_table_differ_in_model_and_method_only(tmp_path):
    """Catches figures of other settings beside each other, and a method that none stands beside."""
    images = [noise(64, 64, seed)[1] for seed in range(2)]
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        write_row(folder, images, 64)
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    free = ("model", "model_sha256", "method", "method_sha256", "levels", "calibration_sha256")
    checked = ("captions", "size", "scalecrafter", "sampler", "num_inference_steps")
    checked += ("guidance_scale", "dtype")

    def read(name):
        for folder, value in zip(folders, ("a", "b"), strict=True):
            config = {**manifest["config"], name: value}
            (folder / "manifest.json").write_text(json.dumps({**manifest, "config": config}))
        return coco_score.read_folders(folders)

    for name in free:
        assert [folder.config[name] for folder in read(name)] == ["a", "b"]
    for name in checked:
        with pytest.raises(ValueError, match=f"cannot stand in one table; they differ in {name}."):
            read(name)


def test_another_scorer_is_another_network(tmp_path):
    """Catches features of real images by a scorer that was trained again in its place."""
    shutil.copytree(SCORER, tmp_path / "scorer")
    names = [coco_score.load_networks(tmp_path / "scorer", torch.device("cpu")).name]
    config = tmp_path / "scorer/config.json"
    config.write_text(config.read_text() + "\n")
    names.append(coco_score.load_networks(tmp_path / "scorer", torch.device("cpu")).name)
    names.append(coco_score.load_networks(SCORER, torch.device("cpu")).name)
    assert names[0] == names[2] != names[1]


class ColourWords(torch.nn.Module):
    """A model with open_clip's interface: an image is the last pixel of its first row, and a text
    is the colour that it names after "A photo depicts"; neither has length 1."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))

    def tokenize(self, texts):
        assert all(text.startswith("A photo depicts ") for text in texts)
        return torch.tensor([("red", "grey").index(text.split()[3]) for text in texts])

    def encode_image(self, pixels):
        return 5 * pixels[:, 0, -1]

    def encode_text(self, tokens):
        return 2 * self.table[tokens]


def test_the_clip_score_is_the_cosine_of_image_and_prefixed_caption(monkeypatch):
    """A model of two words stands in for 5 GB. Catches other weights, a caption without prefix or
    of another image, images on their side, and a cosine that is scaled or clamped."""
    asked, model = [], ColourWords()

    def create(*names):
        asked.append(names)
        return model, lambda image: torch.from_numpy(np.array(image)).float() - 100

    def tokenizer(name):
        asked.append((name,))
        return model.tokenize

    package = SimpleNamespace(create_model_from_pretrained=create, get_tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "open_clip", package)
    clip = OpenCLIP()
    assert asked == [("ViT-g-14", "laion2b_s12b_b42k"), ("ViT-g-14",)]
    assert not model.training
    pixels = torch.zeros(2, 3, 2, 4, dtype=torch.uint8)
    pixels[:, :, 0, -1] = torch.tensor([[200, 100, 100], [100, 0, 0]])
    found = clip.cosines(pixels, ["red box", "grey fox"])
    assert found.tolist() == pytest.approx([1, -((2 / 3) ** 0.5)])


def test_inception_is_the_port_past_its_resizing(monkeypatch):
    """With random weights, as its own would be downloaded; at 299 the port resizes nothing.
    Catches a layer that is left out or out of order, and pixels of another scale."""
    port = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    for owner in (torch.hub, port):
        monkeypatch.setattr(owner, "load_state_dict_from_url", lambda *_, **__: {})
    monkeypatch.setattr(port.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
    torch.manual_seed(0)
    whole = port.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    torch.manual_seed(0)
    past = Inception()
    images = torch.randint(0, 256, (2, 3, 299, 299), dtype=torch.uint8)
    (expected,) = whole(images)
    assert expected.shape == (2, 2048)
    torch.testing.assert_close(past(images.float()), expected, rtol=1e-3, atol=0)


@pytest.mark.skipif(
    importlib.util.find_spec("torch_fidelity") is not None, reason="the package is installed"
)
def test_without_the_packages_of_the_networks_the_command_says_what_to_install(place, exact):
    arguments = ["score", exact, "--real", place / "scenes/images", "--output", place / "none"]
    code, _, errors = run(*arguments)
    assert code == 2
    assert errors.startswith("eval: FID needs the package torch-fidelity")
    assert errors.endswith("pip install torch-fidelity, or name a --scorer.")
    assert not (place / "none").exists()

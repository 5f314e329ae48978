"""Rows of COCO: generated, killed, resumed and scored."""

import importlib.util
import io
import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise

import eval_helpers
import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from eval_helpers import noise, protocol_config
from PIL import Image
from processes import Command, start_ranks
from tiny import random_codebooks, two_level_pipe, two_level_unet

from avq_diffusers.files import locked
from avq_diffusers.images import read_rgb
from distill.scenes import TEST_SEEDS, sample_scene
from eval.quality import captions, coco, coco_score, frechet
from eval.quality.frechet import fit_gaussian, frechet_distance
from eval.quality.generation import Sampling, generate_batch
from eval.quality.metrics import Scorer
from eval.quality.networks import Inception
from eval.store.report import SCORER


def run(*arguments):
    """Exit code, output, and errors and warnings of `python -m eval coco ...`."""
    code, output, errors = eval_helpers.run("coco", *arguments)
    shown = [line for line in errors.splitlines() if line.startswith(("eval:", "warn"))]
    return code, output, "\n".join(shown)


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


@pytest.fixture(scope="module", autouse=True)
def own_state(scorer_folder):
    """The processes of other tests are not those of these; four blocks and a tiny scorer do."""
    PartialState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SCORER", scorer_folder)
        patch.setattr(frechet, "JACKKNIFE_BLOCKS", 4)
        yield
    PartialState._reset_state()


NUM = 5  # images of a row
NUM_REAL = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model, codebooks for it, and scenes written as COCO."""
    place = tmp_path_factory.mktemp("coco")
    two_level_pipe().save_pretrained(place / "model")
    random_codebooks(two_level_unet()).save_pretrained(place / "codebooks")
    assert run("write", place / "scenes", "--images", NUM_REAL, "--size", 64) == (0, "", "")
    return place


@pytest.fixture(scope="module")
def exact(place):
    """A finished row, of a process in which no test has changed how products are rounded."""
    finish(start(generation(place, "exact")))
    return place / "exact"


def generation(place, folder, **changes):
    options = {
        "model": place / "model",
        "captions": place / "scenes/annotations/captions_scenes.json",
        "images": NUM,
        "size": 64,
        "steps": 2,
    }
    options |= {name.replace("_", "-"): value for name, value in changes.items()}
    parts = [part for name, value in options.items() for part in (f"--{name}", value)]
    return ["generate", place / folder, *(part for part in parts if part is not None)]


def generate(place, folder, **changes):
    return run(*generation(place, folder, **changes))


def images(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "images").glob("[0-9]*.png"))}


def start(arguments):
    return Command("eval.__main__:main", ["coco", *arguments])


def finish(*processes):
    for process in processes:
        code, printed = process.finish()
        assert code == 0, printed


def test_a_killed_row_goes_on(place, exact):
    """Catches a half-written image, noise that depends on what is left, lost configuration, and
    captions that no command writes again.

    `reliability/test_kills.py` kills the command.
    """
    expected = images(exact)
    assert len(expected) == len(set(expected.values())) == NUM
    killed = place / "killed"
    shutil.copytree(exact, killed)
    *paths, last = sorted((killed / "images").glob("[0-9]*.png"))
    last.unlink()
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
    (killed / "captions.txt").unlink()
    finish(start(generation(place, "killed")))  # makes no image, so it made none of these
    assert (killed / "captions.txt").read_bytes() == (exact / "captions.txt").read_bytes()
    assert json.loads((killed / "manifest.json").read_text()) == manifests[1]
    assert manifests[0]["environment"].keys() >= {"commit", "torch", "diffusers", "device"}

    code, table, _ = score(place, "exact", "killed")
    assert code == 0
    assert len(table.splitlines()) == 4
    first, second = rows_of(place)
    assert first == second


def test_full_batches_do_not_depend_on_what_is_left(tmp_path):
    """As on a GPU: catches a last batch of another shape, whose kernels round otherwise."""
    pipe = two_level_pipe()
    pipe.set_progress_bar_config(disable=True)
    texts = captions.Captions(tuple("abcde"), "test")
    settings = Sampling(num_inference_steps=2, guidance_scale=7.5, size=64, batch_size=3)
    made = {"model": "m", "method": "exact", "levels": (0,), "calibration_prompts": ()}
    row = coco.Row(folder=tmp_path, captions=texts, settings=settings, **made)
    (tmp_path / "images").mkdir()
    row.fill(pipe)
    expected = images(tmp_path)
    for missing in ((0, 4), (1, 2, 3), (2,)):
        for index in missing:
            coco.image_path(tmp_path, index).unlink()
        row.fill(pipe)
        assert images(tmp_path) == expected
    alone = generate_batch(pipe, ["c"], [2], settings)
    with Image.open(coco.image_path(tmp_path, 2)) as stored:
        assert abs(np.asarray(stored).astype(int) - alone[0]).max() <= 1


def test_images_follow_the_protocol(place, exact):
    """PNDM, guidance 7.5, noise of seed i drawn alone, caption i, no safety checker."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(place / "model")
    pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    pipe.set_progress_bar_config(disable=True)
    texts = (exact / "captions.txt").read_text().splitlines()
    assert set(texts) < {sample_scene(seed).caption for seed in TEST_SEEDS[:NUM_REAL]}
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    image = pipe(texts[3], num_inference_steps=2, latents=noise, height=64, width=64).images[0]
    with Image.open(exact / "images/000003.png") as stored:
        assert abs(np.asarray(stored).astype(int) - np.asarray(image).astype(int)).max() <= 1


def test_a_folder_that_another_command_writes_is_refused(place, exact):
    """Catches two commands that delete and rename each other's temporary files."""
    with locked(exact, 0, "busy"):
        code, _, errors = generate(place, "exact")
    assert code == 2
    assert f"another command is writing {exact}; wait for it, or launch both" in errors


def test_a_folder_of_other_things_is_refused(place, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for folder, message in ((tmp_path, "holds other"), (tmp_path / "thesis.txt", "not a folder")):
        code, _, errors = generate(place, folder)
        assert code == 2
        assert message in errors
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_images_that_hold_nan_are_refused():
    """Catches black images, which NaN becomes as bytes, in a score."""
    pipe = two_level_pipe()
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"returned NaN for at least one of the seeds \[4\]"):
        generate_batch(
            pipe, ["a"], [4], Sampling(size=64, num_inference_steps=1, guidance_scale=1.0)
        )


def test_scores_are_those_of_the_features(place, exact, scorer_folder):
    """Against the scorer itself: catches lost batches, shifted captions, a scale."""
    code, table, errors = score(place, "exact", output="five", batch=2)
    assert code == 0
    assert errors.startswith("warning: Not the protocol: model is")
    assert "; captions is draw of seed 0 from" in errors
    (row,) = rows_of(place, "five")
    scorer = Scorer(scorer_folder)

    def prepared(folder):
        paths = sorted(folder.glob("*.png"))
        found = [coco_score.prepare(Image.open(path)) for path in paths]
        return [torch.stack([one[key] for one in found]) for key in ("pixels", "bytes")]

    pixels, small = prepared(exact / "images")
    real, _ = prepared(place / "scenes/images")
    expected = frechet_distance(*(fit_gaussian(scorer(x)) for x in (real, pixels)))
    assert row["fid"] == pytest.approx(expected, rel=1e-3)
    assert row["fid_sem"] > 0
    texts = (exact / "captions.txt").read_text().splitlines()
    cosines = scorer.cosines(small, texts).numpy()
    assert row["clip_score"] == pytest.approx(cosines.mean(), abs=1e-5)
    assert row["clip_score_sem"] == pytest.approx(cosines.std(ddof=1) / NUM**0.5, abs=1e-5)
    assert (row["num_images"], row["num_real"]) == (NUM, NUM_REAL)
    shown = [f"{row['fid']:.2f} ± {row['fid_sem']:.2f}"]
    shown.append(f"{row['clip_score']:.4f} ± {row['clip_score_sem']:.4f}")
    assert f"| exact | - | {' | '.join(shown)} |" in table

    assert score(place, "exact", output="three", images=3)[0] == 0
    (fewer,) = rows_of(place, "three")
    assert fewer["num_images"] == 3
    assert fewer["clip_score"] == pytest.approx(cosines[:3].mean(), abs=1e-5)


def png(height, width):
    file = io.BytesIO()
    noise(height, width)[1].save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "content", "changes", "message"),
    [
        ("manifest.json", None, {}, "has no manifest.json; make its images"),
        ("images/000001.png", None, {}, "lacks 1 of 3 images, such as 000001.png; run this again"),
        ("images/000003.png", b"more", {}, "images has 4 files for 3 captions"),
        ("images/000001.png", png(64, 32), {}, "000001.png cannot be .* 32 x 64 pixels, not 64 x"),
        ("captions.txt", b"one\ntwo\nthree\n", {}, "is not what the images were made from"),
        ("a", b"", {"real": "nothing"}, "no images in nothing; unpack there .*val2014.zip, whose"),
        ("a", b"", {"real": "single"}, "at least 2 real images are needed, but .*single has 1"),
        ("a", b"", {"images": 4}, "must be between 2 and the 3 of .*row, but got 4"),
        ("a", b"", {"scorer": "nothing"}, "there is no scorer in nothing; mini-sd's is "),
    ],
)
def test_damaged_rows_and_bad_requests_are_refused(
    place, tmp_path, monkeypatch, file, content, changes, message
):
    monkeypatch.chdir(tmp_path)
    write_row(tmp_path / "row", [noise(64, 64, seed)[1] for seed in range(3)], 64)
    path = tmp_path / "row" / file
    path.unlink() if content is None else path.write_bytes(content)
    (tmp_path / "single").mkdir()
    noise(64, 64)[1].save(tmp_path / "single/a.png")
    arguments = {"real": place / "scenes/images", "cache": place / "cache"} | changes
    code, _, errors = score(tmp_path, "row", **arguments)
    assert code == 2
    assert re.search(message, errors), errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "results").exists()


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


def test_two_processes_make_the_images_of_one(place, exact):
    """Catches a share that is never made, and noise or codebooks that depend on the process."""
    finish(*start_ranks("eval.__main__:main", 2, ["coco", *generation(place, "two")]))
    assert images(place / "two") == images(exact)


def test_methods_change_images_and_codebooks_are_kept(place, exact):
    """Catches a method that is not applied, and a restart that calibrates anew."""
    assert generate(place, "avq", method=f"{place / 'codebooks'}@P1", images=2) == (0, "", "")
    (place / "prompts.txt").write_text("a fox\n")
    calibrated = {"method": "M3/stored", "calibration": place / "prompts.txt", "images": 2}
    assert generate(place, "m3", **calibrated)[0] == 0
    made = [images(place / name) for name in ("exact", "avq", "m3")]
    for first, second in pairwise([*made, made[0]]):
        assert all(first[name] != second[name] for name in made[-1])
    weights = place / "m3/codebooks/diffusion_pytorch_model.safetensors"
    before = weights.stat().st_mtime_ns
    coco.image_path(place / "m3", 1).unlink()
    assert generate(place, "m3", **calibrated)[0] == 0
    assert weights.stat().st_mtime_ns == before
    assert images(place / "m3") == made[-1]
    # Killed before the codebooks had their name.
    shutil.rmtree(place / "m3/codebooks")
    shutil.rmtree(place / "m3/images")
    assert generate(place, "m3", **calibrated)[0] == 0
    assert images(place / "m3") == made[-1]
    assert score(place, "avq", "m3", output="methods")[0] == 0
    rows = rows_of(place, "methods")
    assert [row["origin"] for row in rows] == ["calibrated"] * 2
    assert [row["effective_codewords"] for row in rows] == [6, 3]


def test_scalecrafter_dilates_beyond_the_training_size(place):
    """Catches an option that is recorded and not applied, and two settings in one folder."""
    changes = {"size": 256, "images": 2}
    assert generate(place, "plain", **changes)[0] == 0
    assert generate(place, "dilated", scalecrafter=None, **changes)[0] == 0
    plain, dilated = (images(place / folder) for folder in ("plain", "dilated"))
    assert all(plain[name] != dilated[name] for name in plain)
    code, _, errors = generate(place, "plain", scalecrafter=None, **changes)
    assert (code, errors[-28:]) == (2, "configuration: scalecrafter.")


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"steps": 3}, "num_inference_steps"),
        ({"size": 128, "guidance-scale": 3.0, "compile": None}, "compiled, guidance_scale, size"),
        ({"draw_seed": 1, "images": 6}, "captions, captions_sha256, num_images"),
        ({"method": "value-projection", "levels": "0,1"}, "levels, method"),
        ({}, "model_sha256"),
    ],
)
def test_a_folder_of_another_configuration_is_refused(place, exact, changes, keys):
    """Catches a manifest that knows the model by its name only, among others."""
    before = images(exact), (exact / "manifest.json").read_bytes()
    config = place / "model/scheduler/scheduler_config.json"
    was = config.read_text()
    if not changes:
        config.write_text(was.replace('"beta_end": 0.012', '"beta_end": 0.013'))
    code, _, errors = generate(place, "exact", **changes)
    config.write_text(was)
    assert (code, errors) == (
        2,
        f"eval: {exact} holds images with a different configuration: {keys}.",
    )
    assert (images(exact), (exact / "manifest.json").read_bytes()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 100}, "--size must be a multiple of 8, but got 100"),
        ({"guidance-scale": "nan"}, "--guidance-scale must be finite, but got nan"),
        ({"method": "no/such"}, "there is no folder no/such"),
        ({"scalecrafter": None}, "size"),
        ({"calibration": os.devnull}, "--calibration /dev/null holds no prompt"),
    ],
)
def test_mistakes_leave_no_folder(place, changes, message):
    code, _, errors = generate(place, "mistake", **changes)
    assert code == 2
    assert re.search(message, errors), errors
    assert not (place / "mistake").exists()


def test_real_features_are_found_again_while_the_files_are_the_same(place, exact):
    """Catches features that are always made anew, those of other files, a damaged cache, and work
    that is lost to a cache that cannot be written."""
    real = place / "real"

    def scored(output, **changes):
        return score(place, "exact", real=real, output=output, images=2, **changes)

    shutil.copytree(place / "scenes/images", real)
    assert scored("first")[0] == 0
    path = min(real.iterdir())
    content, state = path.read_bytes(), path.stat()
    kept = {*(place / "cache").iterdir()}
    os.utime(path)
    assert scored("second")[0] == 0
    assert rows_of(place, "first") == rows_of(place, "second")
    assert {*(place / "cache").iterdir()} == kept
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    code, _, errors = scored("third")
    assert code == 2
    assert f"the image {path} cannot be used: cannot identify image file" in errors
    path.write_bytes(content)
    for file in (place / "cache").iterdir():
        file.write_bytes(b"damaged")
    assert scored("third")[0] == 0
    with pytest.warns(UserWarning, match="real images are not kept: .* could not be written"):
        assert scored("fourth", cache=path)[0] == 0
    assert rows_of(place, "first") == rows_of(place, "third") == rows_of(place, "fourth")


def test_real_images_are_all_that_lie_in_the_folder(tmp_path):
    """Catches images of COCO's folders by year, or of cameras, that are no reference."""
    (tmp_path / "val2014").mkdir()
    names = ["b.JPG", "d.webp", "e.bmp", "f.tif", "val2014/a.jpeg", "val2014/c.png"]
    for name in (*names, "a.txt", "clip.gif", "val2014/._a.jpeg"):
        (tmp_path / name).touch()
    assert coco_score.real_images(tmp_path) == [tmp_path / name for name in names]


@pytest.mark.parametrize("name", ["turned.jpg", "transparent.png", "grey16.png"])
def test_images_are_read_as_clean_fid_reads_them(tmp_path, name):
    """Catches another reader, with which an FID no longer compares with published ones."""
    exif = Image.Exif()
    exif[0x0112] = 6
    images = {
        "turned.jpg": (noise(64, 48, 0)[1], {"exif": exif}),
        "transparent.png": (Image.new("RGBA", (8, 8), (0, 0, 0, 0)), {}),
        "grey16.png": (Image.fromarray(np.full((8, 8), 0x4080, np.uint16)), {}),
    }
    image, options = images[name]
    image.save(tmp_path / name, **options)
    seen = coco_score._read(tmp_path / name, np.asarray)
    # clean-fid: `np.array(Image.open(path).convert("RGB"))`
    with Image.open(tmp_path / name) as opened:
        assert np.array_equal(seen, np.asarray(opened.convert("RGB")))
    assert not np.array_equal(seen, np.asarray(read_rgb(tmp_path / name)))


@pytest.mark.parametrize("name", ["method", "levels", "captions", "size", "dtype"])
def test_rows_of_one_table_differ_in_model_and_method_only(tmp_path, name):
    """Catches figures of other settings beside each other, and a method that none stands beside."""
    for folder, value in (("one", "a"), ("two", "b")):
        write_row(tmp_path / folder, [noise(64, 64, seed)[1] for seed in range(2)], 64)
        manifest = json.loads((tmp_path / folder / "manifest.json").read_text())
        manifest["config"][name] = value
        (tmp_path / folder / "manifest.json").write_text(json.dumps(manifest))
    folders = tmp_path / "one", tmp_path / "two"
    if name in coco_score.FREE:
        assert [x.config[name] for x in coco_score.read_folders(folders)] == ["a", "b"]
        return
    with pytest.raises(ValueError, match=f"cannot go into one table; they differ in {name}."):
        coco_score.read_folders(folders)


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


def test_features_of_other_networks_are_not_these(scorer_folder, tmp_path):
    """Catches features of real images by a scorer that was trained again in its place, that the
    cache takes for these."""
    device, cache, real = torch.device("cpu"), tmp_path / "cache", tmp_path / "real"
    real.mkdir()
    for index in range(2):
        noise(64, 64, index)[1].save(real / f"{index}.png")
    shutil.copytree(scorer_folder, tmp_path / "scorer")
    config = tmp_path / "scorer/config.json"
    load = partial(coco_score.load_networks, device=device, batch_size=2, threads=1)
    networks = [load(x) for x in (scorer_folder, tmp_path / "scorer")]
    assert networks[0].name == networks[1].name
    config.write_text(config.read_text() + "\n")
    networks[1] = load(tmp_path / "scorer")
    files = coco_score.real_images(real)

    def features(network):
        return coco_score.real_features(real, files, network, cache)

    first = features(networks[0])
    mean = replace(networks[1], features=lambda x: x.mean((2, 3)))
    assert features(mean).shape == (2, 3)
    assert torch.equal(features(networks[0]), first)
    assert len(list(cache.iterdir())) == 2

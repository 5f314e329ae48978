"""The `avq` command: what it writes, prints, caches and refuses."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import EDMEulerScheduler, StableDiffusionPipeline
from matplotlib.figure import Figure
from PIL import Image
from tiny import CONFIG, own_codebooks, random_codebooks, sdxl_pipe, sdxl_unet, tiny_pipe
from tiny_transformers import sd3_pipe

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    scalecrafter,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.cli import bench, inspection
from avq_diffusers.cli import codebooks as source
from avq_diffusers.cli import generate as generation
from avq_diffusers.cli.images import _call_arguments, dilation, fit_request, timed_image
from avq_diffusers.cli.main import main
from avq_diffusers.cli.request import ImageRequest
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.extras.scalecrafter.apply import usual_scalecrafter
from avq_diffusers.extras.scalecrafter.settings import MINI_SCALECRAFTER, SD15_1024, SD15_2048
from avq_diffusers.hosts import measurement
from avq_diffusers.images import MARGIN, psnr
from avq_diffusers.mini import MINI_CODEBOOKS, MINI_SD, default_prompts

PROMPT = "a red fox"


@pytest.fixture(scope="module")
def codebooks(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("codebooks")
    random_codebooks(tiny_pipe().unet, CONFIG).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def avq(monkeypatch, capsys, tmp_path):
    """Run `avq` in an empty folder with an empty cache; exit code and output without spaces."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["avq", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if "it/s]" not in line]
        return exit_.value.code or 0, squeezed(captured.out + "\n".join(errors))

    return run


@pytest.fixture
def ladder(monkeypatch) -> None:
    """A short one, for tiny models."""
    monkeypatch.setattr(measurement, "LADDER", ("M4P0C0", "M8P8C4E16"))


@pytest.fixture
def generate(avq, model, codebooks):
    """Run `avq generate` with the tiny model."""
    usual = ("--model", model, "--codebooks", codebooks, "--steps", "2")
    return lambda *arguments: avq("generate", PROMPT, *usual, *arguments)


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that are saved."""
    saved, save = [], Figure.savefig

    def keep(figure, *arguments, **options):
        saved.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def squeezed(text: str) -> str:
    """Without white space: the console wraps lines at the width of the terminal."""
    return "".join(text.split())


def pixels(path: str | Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def written(folder: str | Path = ".") -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def test_generate_with_the_embedded_model(tmp_path):
    """The installed command on mini-sd: image, sheet and report, in a fresh process."""
    command = [str(Path(sys.executable).parent / "avq"), "generate", "one large red star"]
    command += ["--steps", "1", "--height", "64", "--width", "128", "--device", "cpu"]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | own
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == ["avq.png", "avq_sheet.png"]  # nothing is cached
    image, sheet = pixels(tmp_path / "avq.png"), pixels(tmp_path / "avq_sheet.png")
    assert image.shape == (64, 128, 3)
    assert sheet.shape[1] >= 3 * 128 + 4 * MARGIN
    assert sheet.shape[0] > 64 + 17 * 13  # a line for each of 17 layers or so, and the header
    assert done.stdout.count("AVQ (") == 5
    assert "PSNR" in done.stdout
    assert done.stdout.endswith("image: avq.png\nsheet: avq_sheet.png\n")
    assert "torchvision" not in done.stderr  # a note of transformers
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_generate_runs_the_kernels_on_a_gpu(avq):
    """Also fails where their image is not that of PyTorch's path, up to half precision."""
    prompt = default_prompts()[0]
    sizes = ["--height", "512", "--width", "512", "--guidance-scale", "3"]
    code, output = avq("generate", prompt, *sizes, "--num-refined", "1")
    assert code == 0
    assert "AVQ(tritonbackend)" in output
    pipe = StableDiffusionPipeline.from_pretrained(MINI_SD, dtype=torch.float16).to("cuda")
    request = ImageRequest(prompt, None, 512, 512, 25, 3.0, 0, scalecrafter=False)
    exact, _ = timed_image(pipe, request)
    apply_avq(pipe, AVQCodebooks.from_pretrained(MINI_CODEBOOKS), backend="torch", route="always")
    set_num_refined(pipe, 1)
    expected, _ = timed_image(pipe, request)
    assert psnr(Image.open("avq.png"), expected) > 3 + psnr(exact, expected)


def test_the_sheet_shows_the_exact_and_the_avq_image(generate, codebooks):
    """Fails where both columns show the same run, or the order of the titles is another."""
    code, output = generate("--seed", "3", "--out", "fox.png")
    assert code == 0
    assert written() == ["fox.png", "fox_sheet.png"]
    assert "AVQ(torchbackend)" in output
    pipe = tiny_pipe()
    exact = make(pipe, seed=3)
    expected = make(apply_avq(pipe, AVQCodebooks.from_pretrained(codebooks)), seed=3)
    assert not np.array_equal(exact, expected)
    sheet = pixels("fox_sheet.png")
    assert np.array_equal(pixels("fox.png"), expected)
    assert lefts(sheet, exact) < lefts(sheet, expected)


def make(pipe, seed: int = 0, steps: int = 2, **sizes: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    images = pipe(PROMPT, num_inference_steps=steps, generator=generator, **sizes).images
    return np.asarray(images[0])


def lefts(sheet: np.ndarray, image: np.ndarray) -> int:
    """Where the image lies on the sheet; fails if it does not."""
    size = len(image)
    for top in range(sheet.shape[0] - size + 1):
        for left in range(MARGIN, sheet.shape[1] - size + 1, size + MARGIN):
            if np.array_equal(sheet[top : top + size, left : left + size], image):
                return left
    raise AssertionError("the image is not on the sheet")


def test_options_reach_the_image(generate):
    """Equal seeds give equal bytes; each option is read and applied."""
    images = []
    for option in (
        *(["--seed", "1"], ["--seed", "1"], ["--seed", "2"]),
        *(["--guidance-scale", "30"], ["--negative-prompt", "blue"]),
    ):
        assert generate(*option)[0] == 0
        images.append(Path("avq.png").read_bytes())
    assert images[0] == images[1]
    assert len(set(images)) == 4


@pytest.mark.parametrize("name", ["castle[final].png", "d[/x].png"])
def test_paths_are_printed_as_they_are(generate, name):
    """Catches brackets read as markup, which vanish or end in a traceback after all the work."""
    Path(name).parent.mkdir(exist_ok=True)
    code, output = generate("--out", name)
    assert code == 0, output
    assert f"image:{name}" in output


def test_num_refined_is_honoured(generate, codebooks):
    """Fails where the option is read but not applied, or applied to the exact image too."""
    code, output = generate("--num-refined", "0")
    assert code == 0
    assert "M4P0C2" in output
    pipe = apply_avq(tiny_pipe(), AVQCodebooks.from_pretrained(codebooks))
    default = make(pipe)
    expected = make(set_num_refined(pipe, 0))
    assert not np.array_equal(default, expected)
    assert np.array_equal(pixels("avq.png"), expected)


def test_tolerance_is_honoured(avq, model, ladder):
    """Fails where the choice is not applied, or is measured on another image."""
    arguments = ["--model", model, "--steps", "2", "--seed", "3", "--levels", "0,1"]
    code, output = avq("generate", PROMPT, *arguments, "--config", "M8P4C2", "--tolerance", "0.3")
    assert code == 0
    assert "anerrorofatmost0.3" in output
    pipe = tiny_pipe()
    config = AVQConfig.parse("M8P4C2", levels=(0, 1))
    sizes = {"num_inference_steps": 2, "height": 128, "width": 128, "progress": False}
    apply_avq(pipe, config, tolerance=0.3, prompt=PROMPT, seed=3, **sizes)
    shown = {row.config for row in summary(pipe).rows}
    assert len(shown) > 2
    for choice in shown:
        assert squeezed(choice) in output
    assert np.array_equal(pixels("avq.png"), make(pipe, seed=3))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (["--height", "64", "--width", "192"], (64, 192)),
        (["--height", "64"], (64, 128)),
        (["--width", "192"], (128, 192)),
    ],
    ids=["both", "height", "width"],
)
def test_sizes_are_honoured(generate, size, expected):
    """Stable Diffusion pipelines silently drop a height without a width, and the reverse."""
    assert generate(*size)[0] == 0
    assert pixels("avq.png").shape[:2] == expected


def test_scalecrafter_dilates_both_images(generate, codebooks):
    """Fails where the option is read but not applied, or applied to one image only."""
    sizes = {"height": 256, "width": 256}
    assert generate("--scalecrafter", "--height", "256", "--width", "256")[0] == 0
    pipe = tiny_pipe()
    with scalecrafter(pipe, **sizes):
        exact = make(pipe, **sizes)
        expected = make(apply_avq(pipe, AVQCodebooks.from_pretrained(codebooks)), **sizes)
    assert not np.array_equal(expected, make(pipe, **sizes))
    assert np.array_equal(pixels("avq.png"), expected)
    sheet = pixels("avq_sheet.png")
    assert lefts(sheet, exact) < lefts(sheet, expected)


def test_mini_sd_has_scalecrafter_settings_of_its_own():
    """Catches those of SD1.5 for mini-sd, and mini-sd's for other models or sizes."""
    mini, other = StableDiffusionPipeline.from_pretrained(MINI_SD), tiny_pipe()
    cases = (mini, 512, MINI_SCALECRAFTER), (mini, 1024, SD15_2048), (other, 256, SD15_1024)
    for pipe, side, config in cases:
        assert usual_scalecrafter(pipe, side, side) is config
        request = ImageRequest(PROMPT, None, side, side, 2, 3.0, 0, scalecrafter=True)
        with dilation(pipe, fit_request(pipe, request)):
            assert pipe.unet._scalecrafter.config is config


def test_without_codebooks_nothing_is_calibrated_or_cached(avq, model, monkeypatch, tmp_path):
    """Fails where sizes or levels are not those of the options, or a model needs a first step."""
    monkeypatch.setattr(source, "calibrate", None)
    arguments = ["--steps", "2", "--config", "M6P2C3", "--levels", "0,1"]
    code, output = avq("generate", PROMPT, "--model", model, *arguments)
    assert code == 0
    assert output.count("M6P2C3") == 6
    assert not (tmp_path / "cache" / "avq-diffusers").exists()
    expected = make(
        apply_avq(tiny_pipe(), AVQConfig.parse("M6P2C3", levels=(0, 1))),
        steps=2,
    )
    assert np.array_equal(pixels("avq.png"), expected)


def test_a_sheet_that_cannot_be_written_is_refused_before_the_work(generate):
    Path("avq_sheet.png").mkdir()
    code, output = generate()
    assert code == 2
    assert squeezed("--out avq.png writes avq_sheet.png, but that is a folder") in output


def test_calibrate_saves_codebooks_that_load(avq, model):
    Path("prompts.txt").write_text("a lake\n\n  a hill  \n")
    names = [layer.name for layer in select_layers(tiny_pipe().unet, (0, 1))]
    code, output = avq(
        *("calibrate", "--model", model, "--prompts", "prompts.txt", "--out", "my-codebooks"),
        *("--config", "M4P2C2", "--levels", "0,1", "--exact", f"{names[0]},up_blocks"),
        *("--steps", "2", "--keys", "256"),
    )
    assert code == 0
    assert "my-codebooks" in output
    loaded = AVQCodebooks.from_pretrained("my-codebooks")
    assert str(loaded.avq_config) == "M4P2C2"
    assert loaded.avq_config.levels == (0, 1)
    expected = [name for name in names[1:] if not name.startswith("up_blocks")]
    assert list(loaded.layer_specs) == expected
    kept = loaded.config["calibration"]
    assert (kept["num_prompts"], kept["num_inference_steps"], kept["keys_per_layer"]) == (2, 2, 256)
    make(apply_avq(tiny_pipe(), loaded), steps=1)


def test_sdxl(avq, tmp_path):
    """Catches level 0 taken for granted, where SDXL has no self-attention."""
    sdxl_pipe().save_pretrained(tmp_path / "sdxl")
    arguments = ["--config", "M4P2C2", "--steps", "2", "--keys", "64", "--out", "codebooks"]
    code, output = avq("calibrate", "--model", str(tmp_path / "sdxl"), *arguments)
    assert code == 0, output
    specs = AVQCodebooks.from_pretrained("codebooks").layer_specs.values()
    assert {spec.level for spec in specs} == {1}


@pytest.fixture(scope="module")
def sd3(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("sd3")
    sd3_pipe(text_encoder_3=None, tokenizer_3=None).save_pretrained(folder)
    return str(folder)


def test_generate_with_a_transformer(avq, sd3):
    """Catches sizes and parts of SD1.5 taken for granted: SD3 without its T5."""
    arguments = ["--model", sd3, "--steps", "2", "--config", "M4P2C2", "--num-refined", "1"]
    code, output = avq("generate", PROMPT, *arguments)
    assert code == 0, output
    assert pixels("avq.png").shape == (64, 64, 3)  # the training size
    assert output.count("M4P1C2AVQ(torchbackend)256AVQ:") == 5


def test_generate_with_a_transformer_within_a_tolerance(avq, sd3, ladder):
    arguments = ["--model", sd3, "--steps", "2", "--config", "M4P2C2", "--tolerance"]
    code, output = avq("generate", PROMPT, *arguments, "9")
    assert code == 0, output
    assert output.count("AVQ(torchbackend)256AVQ:") == output.count("M4P0C0") == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scalecrafter"], "--scalecrafter dilates the convolutions of a UNet; this model has"),
        (["--levels", "1"], "this model has no self-attention at level 1, only at levels 0"),
    ],
)
def test_transformers_refuse(avq, sd3, options, message):
    code, output = avq("generate", PROMPT, "--model", sd3, "--steps", "1", *options)
    assert code == 2
    assert squeezed(message) in output


def test_arguments_that_a_pipeline_does_not_take():
    """Flux2 takes no negative prompt, and no `None` for one."""

    class Pipe:
        transformer, scheduler = sd3_pipe().transformer, sd3_pipe().scheduler
        vae_scale_factor, name_or_path = 8, "flux2"

        def __call__(self, prompt, height, width, num_inference_steps, guidance_scale=4.0):
            return guidance_scale

    request = ImageRequest(PROMPT, None, None, None, 2, None, 0, False)
    fitted = fit_request(Pipe(), request)
    assert (fitted.height, fitted.width, fitted.guidance_scale) == (1024, 1024, 4.0)
    assert "negative_prompt" not in _call_arguments(Pipe(), fitted)
    with pytest.raises(ValueError, match="--negative-prompt: Pipe takes none"):
        fit_request(Pipe(), replace(request, negative_prompt="blurred"))


def test_versions(avq):
    """Catches a name of a package that is not installed under it."""
    code, output = avq("--version")
    assert code == 0
    assert output.startswith(f"avq-diffusers{version('avq-diffusers')},torch2.")
    assert avq("generate", "--version")[0] == 2


def test_inspect_prints_and_plots(avq):
    code, output = avq("inspect")
    assert code == 0
    training = AVQCodebooks.from_pretrained(MINI_CODEBOOKS).config["training"]
    for name, measured in training["layers"].items():
        assert f"{measured['capture']:.3f}" in output, name
    assert pixels("codebooks.png").std() > 10
    assert written() == ["codebooks.png"]


@pytest.mark.parametrize(
    "size",
    [
        [],
        pytest.param(
            ["--height", "256", "--width", "256", "--scalecrafter"], marks=pytest.mark.long
        ),
    ],
)
def test_bench_generates_what_generate_does(avq, generate, model, codebooks, size):
    """Catches choices that run as one another, times without images, another exact one."""
    arguments = ("--model", model, "--codebooks", codebooks, "--steps", "2", *size)
    code, output = avq("bench", PROMPT, *arguments, "--refined", "0,4", "--images", "2")
    assert code == 0
    assert written() == ["avq_bench.png", "avq_bench_sheet.png"]
    assert "plot:avq_bench.pngsheet:avq_bench_sheet.png" in output
    labels = ["exact", "0 refined", "4 refined"]
    rows = [output.index(squeezed(label)) for label in labels]
    assert rows == sorted(rows)
    sheet = pixels("avq_bench_sheet.png")
    columns = []
    for parents in ("0", "4"):
        for seed in ("0", "1"):
            generate(*size, "--num-refined", parents, "--seed", seed)
            columns.append(lefts(sheet, pixels("avq.png")))
    assert columns[0] == columns[1] < columns[2] == columns[3]


def test_bench_of_a_sampler_without_training_timesteps(avq, tmp_path, ladder):
    """Catches a refusal of EDM's samplers, for which errors are measured over all steps."""
    pipe = tiny_pipe()
    pipe.scheduler = EDMEulerScheduler()
    pipe.save_pretrained(tmp_path / "edm")
    code, output = avq(
        *("bench", PROMPT, "--model", str(tmp_path / "edm"), "--config", "M8P4C2"),
        *("--steps", "2", "--refined", "2", "--tolerance", "0.9"),
    )
    assert code == 0
    assert squeezed("0.9 tolerance") in output


def test_bench_of_tolerances(avq, model, ladder):
    """Catches rows in place of those of refined parents, and one tolerance for all."""
    arguments = ("--model", model, "--steps", "2", "--config", "M8P4C2", "--refined", "4")
    code, output = avq("bench", PROMPT, *arguments, "--tolerance", "0.00001,0.9")
    assert code == 0
    labels = ["4 refined", "1e-05 tolerance", "0.9 tolerance"]
    rows = [output.index(squeezed(label)) for label in labels]
    assert rows == sorted(rows)
    assert output[rows[1] : rows[2]].endswith("inf")
    assert "inf" not in output[rows[2] :]


def test_layers_with_fewer_parents_refine_all_of_theirs():
    """Catches a choice that some layers refuse."""
    pipe = tiny_pipe()
    small = next(layer.name for layer in select_layers(pipe.unet, (0,)))
    config = AVQConfig(**vars(CONFIG) | {"overrides": {small: {"num_parents": 3}}})
    apply_avq(pipe, random_codebooks(pipe.unet, config), route="always")
    (choice,) = bench.refined_choices(pipe, [4])
    assert choice.num_refined.pop(small) == 3
    assert set(choice.num_refined.values()) == {4}


def test_choices_run_beside_exact_images():
    """Catches exact images that AVQ made, a default without all parents, and another median."""
    pipe = tiny_pipe()
    requests = [ImageRequest(PROMPT, None, 64, 64, 1, 7.5, seed, False) for seed in (0, 1, 2)]
    exact = [timed_image(pipe, request).image for request in requests]
    apply_avq(pipe, random_codebooks(pipe.unet), route="always")
    choices = bench.refined_choices(pipe)
    assert [set(choice.num_refined.values()) for choice in choices] == [{0}, {1}, {2}, {4}]
    first, result = bench.run_choices(pipe, choices[-1:], requests)
    assert [psnr(*pair) for pair in zip(first.images, exact, strict=True)] == 3 * [float("inf")]
    likeness = [psnr(*pair) for pair in zip(result.images, exact, strict=True)]
    assert result.psnr == sorted(likeness)[1] < float("inf")
    assert result.label == "4 refined"


def test_images_equal_to_the_exact_ones_are_left_out_of_the_plot(tmp_path, figures):
    """Catches a point at an infinite PSNR."""
    results = [
        bench.ChoiceResult(label, "parents", [], 1.0, likeness)
        for label, likeness in [("exact", float("inf")), ("a b", 30.0), ("c d", float("inf"))]
    ]
    bench.plot_bench(results, "title", tmp_path / "plot.png")
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == ["a"]
    assert [list(line.get_ydata()) for line in axes.lines[1:]] == [[30.0]]


def test_bench_of_flat_codebooks_has_one_choice(avq, model, tmp_path):
    config = AVQConfig.parse("M6", query_tile=16, levels=(0, 1))
    random_codebooks(tiny_pipe().unet, config).save_pretrained(tmp_path / "flat")
    arguments = ("--model", model, "--codebooks", str(tmp_path / "flat"), "--steps", "1")
    code, output = avq("bench", PROMPT, *arguments)
    assert code == 0
    assert "0refined" in output
    assert "capture" not in output
    code, output = avq("bench", PROMPT, *arguments, "--refined", "1", "--out", "other.png")
    assert code == 2
    assert output.endswith(squeezed("avq: refined parents must be between 0 and 0, but got 1."))
    assert written() == ["avq_bench.png", "avq_bench_sheet.png"]


@pytest.mark.parametrize(
    ("make", "config", "texts", "files"),
    [
        (
            random_codebooks,
            AVQConfig.parse("M6", overrides={"up_blocks": {"num_parents": 3}}),
            ["M6P0C0", "M3P0C0"],
            ["codebooks.png"],
        ),
        (
            own_codebooks,
            AVQConfig.parse("M6P2C2"),
            ["M6P2C2", "no plot: the codewords are keys of each call"],
            [],
        ),
    ],
    ids=["flat", "own"],
)
def test_inspect_takes_codebooks_without_calibration(avq, tmp_path, make, config, texts, files):
    make(tiny_pipe().unet, config).save_pretrained(tmp_path / "made")
    code, output = avq("inspect", str(tmp_path / "made"))
    assert code == 0
    assert all(squeezed(text) in output for text in texts)
    assert written() == files


@pytest.mark.parametrize("exact", [(), ("down_blocks.2.attentions.0.transformer_blocks.0",)])
def test_inspect_tells_transformer_blocks_apart(avq, tmp_path, figures, exact):
    """Catches bars of several blocks on top of one another, and panels of one title."""
    codebooks = random_codebooks(
        sdxl_unet(),
        AVQConfig.parse("M4P2C2", levels=(1, 2), exact=exact),
    )
    codebooks.save_pretrained(tmp_path / "sdxl")
    code, output = avq("inspect", str(tmp_path / "sdxl"))
    assert code == 0
    layers, panels = figures[0].subfigs
    labels = [name.removesuffix(".attn1") for name in codebooks.layer_specs]
    assert [axes.get_title() for axes in layers.axes if axes.get_title()] == labels
    assert all(squeezed(f"{label} ") in output for label in labels)
    for axes in panels.axes:
        assert len({bar.get_x() for bar in axes.patches}) == len(labels)
        assert len({label.get_text() for label in axes.get_xticklabels()}) == len(labels)


@pytest.mark.parametrize("config", ["M1", "M1P1C4"])
def test_inspect_takes_codebooks_of_one_parent(avq, tmp_path, config):
    """Catches a projection on two axes where there is only one."""
    codebooks = random_codebooks(tiny_pipe().unet, AVQConfig.parse(config))
    codebooks.register_to_config(calibration={"layers": {name: 1 for name in ("a", "b")}})
    codebooks.save_pretrained(tmp_path / "one")
    code, _ = avq("inspect", str(tmp_path / "one"))
    assert code == 0
    assert pixels("codebooks.png").std() > 10


def test_spread_of_children_by_hand():
    """Catches squares without a root, and parents about the mean of all heads or about 0."""
    parents = torch.tensor([[[0.0, 1.0], [8.0, 1.0]], [[50.0, 2.0], [50.0, 10.0]]])
    offsets = torch.tensor([[0.0, 3.0], [0.0, -3.0]])
    codebook = Codebook(parents, parents[:, :, None] + offsets)
    assert inspection._child_spread(codebook) == pytest.approx(3 / 4)


def test_principal_axes_keep_the_distances_of_codewords_in_a_plane():
    """Catches axes of least spread, and children that are not centred as their parents are."""
    generator = torch.Generator().manual_seed(0)
    plane, codewords = (torch.randn(shape, generator=generator) for shape in ((2, 5), (12, 2)))
    codewords = codewords @ plane + 7
    projected = torch.cat(inspection._project(codewords[:4], codewords[4:]))
    assert projected.shape == (12, 2)
    torch.testing.assert_close(torch.cdist(projected, projected), torch.cdist(codewords, codewords))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --model /no/such/folder", "/no/such/folder"),
        ("generate --config M64P", "expected a configuration such as M64P16C8 or M256, but got"),
        ("generate --config M4P5C2", "num_refined must be at most num_parents, but got 5 > 4"),
        ("generate --levels zero", "--levels must be numbers such as 0 or 0,1, but got 'zero'"),
        ("generate --levels 7", "no self-attention at level 7, only at levels 0, 1, 2, 3"),
        ("generate --codebooks nowhere", "codebooks nowhere could not be loaded: "),
        (f"generate --codebooks {MINI_CODEBOOKS}", "codebooks of another model"),
        ("generate --codebooks CODEBOOKS --num-refined 5", "between 0 and 4"),
        ("generate --codebooks CODEBOOKS --exact up_blocks", "--exact; drop one of them"),
        ("generate --tolerance 0", "--tolerance must be above 0 and finite, but got 0"),
        ("generate --tolerance nan", "--tolerance must be above 0 and finite, but got nan"),
        ("generate --tolerance much", "Invalid value for '--tolerance'"),
        ("generate --tolerance 0.1 --num-refined 8", "--num-refined and --tolerance exclude each"),
        ("generate --tolerance 0.1 --codebooks CODEBOOKS", "exclude each other; drop one of them"),
        ("bench --tolerance 0.1,", "--tolerance must be numbers such as 0.1 or 0.05,0.1, but got"),
        ("bench --tolerance 0.1,-1", "--tolerance must be above 0 and finite, but got -1.0"),
        ("bench --tolerance 0.1 --codebooks CODEBOOKS", "exclude each other; drop one of them"),
        ("generate --exact nowhere", "but got 'nowhere'; one of them is down_blocks.0.att"),
        ("generate --config M4P2C2 --num-refined 5", "M4P2C2 can refine 0 to 4 parents, but got 5"),
        ("generate --config M4 --num-refined 1", "M4P0C0 can refine 0 to 0 parents, but got 1"),
        ("bench --config M4P2C2 --refined 2,5", "can refine 0 to 4 parents, but got 2, 5"),
        ("generate --height 100", "--height must be a multiple of 8, but got 100"),
        ("generate --height 64 --width -64", "--width must be a multiple of 8, but got -64"),
        ("generate --scalecrafter", "training size, 128, but got 128 x 128"),
        ("generate --scalecrafter --height 192 --width 192", "ScaleCrafter settings for 256 x 256"),
        ("generate --steps 0", "Invalid value for '--steps'"),
        ("generate --steps 1001", "must be at most the model's 1000 timesteps, but got 1001"),
        ("generate --guidance-scale nan", "--guidance-scale must be finite, but got nan"),
        ("generate --seed -1", "Invalid value for '--seed'"),
        (f"generate --seed {2**63}", "Invalid value for '--seed'"),
        ("generate --out no-such-folder/a.png", "no-such-folder does not exist"),
        ("generate --out a.jpg", "--out must end in .png, but got 'a.jpg'"),
        ("generate --out folder.png", "--out folder.png writes folder.png, but that is a folder"),
        ("generate --device abacus", "abacus"),
        ("generate --colour", "No such option: --colour"),
        ("calibrate --prompts empty.txt", "empty.txt holds no prompt"),
        ("calibrate --prompts missing.txt", "missing.txt cannot be read (No such file"),
        (
            "calibrate --prompts latin.txt",
            "latin.txt is not UTF-8 text (line 1: unexpected",
        ),
        ("calibrate --out empty.txt/codebooks", "--out must be a folder, but"),
        ("calibrate --keys 3 --config M4P2C2", "at least num_parents = 4, but got 3"),
        ("calibrate --levels 0,9", "no self-attention at level 9"),
        ("inspect /no/such/folder", "/no/such/folder"),
        ("inspect --out a.txt", "--out must end in .png"),
    ],
)
def test_refuses(avq, model, codebooks, tmp_path, command, message):
    """One sentence, exit code 2, and neither a file nor a cache entry: before the work."""
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    Path("folder.png").mkdir()
    before = written()
    name, *arguments = command.replace("CODEBOOKS", codebooks).split()
    usual = {"inspect": [], "calibrate": ["--model", model, "--out", "codebooks"]}
    code, output = avq(name, *usual.get(name, [PROMPT, "--model", model]), *arguments)
    assert code == 2
    assert squeezed(message) in output
    assert "Traceback" not in output
    assert written() == before
    assert not (tmp_path / "cache").exists()


def test_a_truncated_model_is_one_sentence(avq, model, tmp_path):
    """transformers, unlike diffusers, lets the error of safetensors through."""
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, output = avq("generate", PROMPT, "--model", str(tmp_path / "cut"))
    assert code == 2
    assert squeezed(f"--model {tmp_path / 'cut'} could not be loaded: ") in output


@pytest.mark.parametrize("command", [("generate", PROMPT), ("calibrate", "--out", "new/codebooks")])
def test_a_read_only_folder_is_refused_before_the_work(avq, model, monkeypatch, command):
    """Catches minutes of work that end in nothing. To root no folder is read-only."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    code, output = avq(*command, "--model", model)
    assert code == 2
    assert "isnotwritable" in output


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def fail():
        raise RuntimeError("sizes of tensors must match")

    monkeypatch.setattr("avq_diffusers.cli.main.app", fail)
    with pytest.raises(RuntimeError, match="sizes of tensors must match"):
        main()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_generate_says_that_the_memory_is_too_small(generate, monkeypatch, error):
    """Catches a traceback of the most usual mistake on a GPU, and on a CPU."""

    def exhaust(*arguments):
        raise error

    monkeypatch.setattr(generation, "timed_image", exhaust)
    code, output = generate()
    assert code == 2
    message = (
        "avq: the memory is too small for this size; try a smaller one, or --device cpu on a GPU."
    )
    assert output.endswith(squeezed(message))
    assert written() == []

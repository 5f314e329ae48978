"""The `avq` command: what it writes, prints, caches and refuses."""

import sys
import time
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, HeunDiscreteScheduler, PNDMScheduler, StableDiffusionPipeline
from PIL import Image
from tiny import (
    CONFIG,
    own_codebooks,
    quiet,
    random_codebooks,
    sdxl_pipe,
    sdxl_unet,
    tiny_pipe,
    tiny_unet,
    traced_unet,
    two_level_pipe,
    two_level_unet,
)
from tiny_transformers import flux_pipe, sd3_pipe, sd3_transformer
from torch import nn

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    scalecrafter,
    select_layers,
    set_num_refined,
    set_threshold,
    summary,
)
from avq_diffusers.cli import bench, images, loading
from avq_diffusers.cli import generate as generation
from avq_diffusers.cli.codebooks import codeword_source
from avq_diffusers.cli.images import (
    StepTimes,
    _call_arguments,
    fit_request,
    largest_side,
    timed_image,
)
from avq_diffusers.cli.main import main
from avq_diffusers.cli.output import save_sheet
from avq_diffusers.cli.request import Dial, ImageRequest, ModelRequest
from avq_diffusers.hosts.core import routing
from avq_diffusers.hosts.measuring import exact_runs
from avq_diffusers.hosts.verbs import states_of
from avq_diffusers.images import MARGIN, psnr
from avq_diffusers.mini import MINI_CODEBOOKS, MINI_SD, default_prompts

PROMPT = "a red fox"


@pytest.fixture(scope="module")
def codebooks(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("codebooks")
    random_codebooks(two_level_pipe().unet, CONFIG).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def few_timed_steps(monkeypatch) -> None:
    monkeypatch.setattr(images, "TIMED_PAIRS", 2)


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


def test_a_sheet_that_fails_says_that_the_image_is_saved(tmp_path):
    (tmp_path / "a_sheet.png").mkdir()
    with pytest.raises(OSError, match=r"a\.png is saved, but its sheet is not: "):
        save_sheet(Image.new("RGB", (8, 8)), tmp_path / "a.png")


@pytest.fixture
def generate(avq, model, codebooks):
    """Run `avq generate` with the tiny model."""
    usual = ("--model", model, "--codebooks", codebooks, "--steps", "1")
    return lambda *arguments: avq("generate", PROMPT, *usual, *arguments)


def squeezed(text: str) -> str:
    """Without white space: the console wraps lines at the width of the terminal."""
    return "".join(text.split())


def pixels(path: str | Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def written(folder: str | Path = ".") -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def test_generate_with_the_embedded_model(avq, tmp_path):
    """Image, sheet and report of mini-sd."""
    sizes = ("--steps", "1", "--height", "64", "--width", "64", "--device", "cpu")
    code, output = avq("generate", "one large red star", *sizes)
    assert code == 0
    assert written() == ["avq.png", "avq_sheet.png"]
    assert not (tmp_path / "cache").exists()
    image, sheet = pixels("avq.png"), pixels("avq_sheet.png")
    assert image.shape == (64, 64, 3)
    assert sheet.shape[1] >= 3 * 64 + 4 * MARGIN
    assert sheet.shape[0] < 3 * 64  # no table
    assert output.count("AVQ(") == 10
    assert "PSNR" in output
    assert "image:avq.pngsheet:avq_sheet.png(exact,AVQ,difference)" in output
    assert entry_points(group="console_scripts")["avq"].value == "avq_diffusers.cli.main:main"


def test_images_are_saved_before_steps_are_timed(generate, monkeypatch):
    """Catches both images, minutes of work, lost where timing fails."""

    def fail(*_):
        raise ValueError("no times")

    monkeypatch.setattr(generation, "step_times", fail)
    assert generate()[0] == 2
    assert lefts(pixels("avq_sheet.png"), pixels("avq.png")) > MARGIN  # beside the exact one


def test_a_route_is_that_of_apply_avq(avq, model, monkeypatch):
    """Catches an AVQ image that exact attention made, layers that run AVQ where apply_avq would
    not, and a result that does not say so."""
    monkeypatch.setattr(routing, "MEASURED", ("cpu",))
    monkeypatch.setattr(routing, "break_even", lambda *call: routing.NEVER_FASTER)
    arguments = ("--model", model, "--steps", "1", "--config", "M8C2T5")
    code, output = avq("generate", PROMPT, *arguments)
    forced = squeezed("to show it; exact attention is at least as fast, so apply_avq keeps it")
    assert code == 0
    assert forced in output
    always = apply_avq(two_level_pipe(), AVQConfig.parse("M8C2T5"), route="always")
    assert np.array_equal(pixels("avq.png"), make(always))
    num_layers = len(states_of(always))

    def faster_at_level_0(workload, device, trial):
        return routing.BreakEven(256, 256, 255, 255)

    monkeypatch.setattr(routing, "break_even", faster_at_level_0)
    code, output = avq("generate", PROMPT, *arguments)
    assert code == 0
    assert forced not in output
    exact = output.count("exact:faster")
    assert 0 < exact < num_layers
    said = f"AVQ in {num_layers - exact} of {num_layers}; exact attention is faster in the others"
    assert squeezed(said) in output


def test_layers_that_stopped_running_avq():
    """Catches "the others" where there are none: columns that grew made exact attention faster."""
    rows = [SimpleNamespace(config="M64C8T1e-4", runs="exact: faster")] * 3
    said = generation.layers_line(SimpleNamespace(rows=rows), is_forced=False)
    assert "AVQ in 0 of 3, after first steps that measured: exact attention is faster" in said


@pytest.mark.parametrize("reason", ["exact: scheduled", "exact: over 16 codewords for each token"])
@pytest.mark.parametrize("is_forced", [False, True])
def test_layers_that_did_not_run_avq(reason, is_forced):
    """Catches layers counted as AVQ because exact attention was not measured to be faster."""
    rows = [SimpleNamespace(config="M8C2T1e-4", runs=runs) for runs in (reason, "AVQ (torch)")]
    said = generation.layers_line(SimpleNamespace(rows=rows), is_forced=is_forced)
    assert said.strip() == "layers: AVQ in 1 of 2; the table says why not in the others"


def test_a_model_is_compiled_and_of_another_dtype(avq, tmp_path, monkeypatch):
    """Catches options that are read and forgotten, and a model compiled after its images."""
    tiny_pipe(traced_unet()).save_pretrained(tmp_path)
    calls = []

    def compiled(pipe):
        pipe.unet.register_forward_pre_hook(lambda unet, _: calls.append(unet.dtype))

    for command, module in (("generate", generation), ("bench", bench)):
        calls.clear()
        monkeypatch.setattr(module, "compile_model", compiled)
        options = ("--model", tmp_path, "--steps", "1", "--height", "64", "--width", "64")
        options += ("--dtype", "bfloat16", "--compile", "--threshold", "0.1")
        assert avq(command, PROMPT, *options)[0] == 0
        assert len(calls) > 1
        assert {*calls} == {torch.bfloat16}


def test_a_unet_is_compiled_whole_and_a_transformer_block_by_block(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, **options: compiled.append((module, options))
    )
    pipe, transformer = tiny_pipe(traced_unet()), sd3_pipe()
    for each in (pipe, transformer):
        loading.compile_model(each)
    blocks = [(block, {}) for block in transformer.transformer.transformer_blocks]
    assert compiled == [(pipe.unet, loading.COMPILE_UNET), *blocks]


@pytest.mark.gpu
def test_generate_runs_the_kernels_on_a_gpu(avq, monkeypatch):
    """Also fails where their image is not that of PyTorch's path, up to half precision."""
    monkeypatch.setattr(routing, "MEASURED", ())
    prompt = default_prompts()[0]
    sizes = ["--height", "512", "--width", "512", "--guidance-scale", "3"]
    sizes += ["--codebooks", MINI_CODEBOOKS, "--num-refined", "1"]
    code, output = avq("generate", prompt, *sizes)
    assert code == 0
    assert "AVQ(tritonbackend)" in output
    pipe = StableDiffusionPipeline.from_pretrained(MINI_SD, dtype=torch.float16).to("cuda")
    request = ImageRequest(prompt, None, 512, 512, 25, 3.0)
    exact, _ = timed_image(pipe, request)
    apply_avq(pipe, AVQCodebooks.from_pretrained(MINI_CODEBOOKS), backend="torch")
    set_num_refined(pipe, 1)
    expected, _ = timed_image(pipe, request)
    assert psnr(Image.open("avq.png"), expected) > 3 + psnr(exact, expected)


def test_options_reach_the_image_and_the_sheet(generate, codebooks):
    """Fails where an option is read and forgotten, where both columns of the sheet show the same
    run, or where the order of the titles is another."""
    options = "--seed 3 --guidance-scale 30 --negative-prompt blue --height 64 --num-refined 0"
    code, output = generate(*options.split(), "--output", "a[x].png")
    assert code == 0
    assert written() == ["a[x].png", "a[x]_sheet.png"]
    assert "image:a[x].png" in output  # no markup
    assert "M4P0C2/storedAVQ(torchbackend)" in output
    # Stable Diffusion pipelines silently drop a height without a width, and the reverse.
    run = {"seed": 3, "guidance_scale": 30, "negative_prompt": "blue", "height": 64, "width": 128}
    pipe = two_level_pipe()
    exact = make(pipe, **run)
    apply_avq(pipe, AVQCodebooks.from_pretrained(codebooks))
    refined = make(pipe, **run)
    expected = make(set_num_refined(pipe, 0), **run)
    assert np.array_equal(pixels("a[x].png"), expected)
    others = [make(pipe, **{x: run[x] for x in run if x != name}) for name in run]
    assert not any(np.array_equal(expected, other) for other in (*others, refined))
    sheet = pixels("a[x]_sheet.png")
    assert lefts(sheet, exact) < lefts(sheet, expected)


def make(pipe, seed: int = 0, steps: int = 1, **options) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    images = pipe(PROMPT, num_inference_steps=steps, generator=generator, **options).images
    return np.asarray(images[0])


def lefts(sheet: np.ndarray, image: np.ndarray) -> int:
    """Where the image lies on the sheet; fails if it does not."""
    height, width = image.shape[:2]
    for top in range(sheet.shape[0] - height + 1):
        for left in range(MARGIN, sheet.shape[1] - width + 1, width + MARGIN):
            if np.array_equal(sheet[top : top + height, left : left + width], image):
                return left
    raise AssertionError("the image is not on the sheet")


def test_tolerance_is_honoured(avq, model, monkeypatch):
    """Fails where the choice is not applied, is measured on another image, or where sizes without
    codebooks are calibrated."""
    # Tiny models need all their few keys at the usual ones; few calls tell them apart.
    monkeypatch.setattr(exact_runs, "THRESHOLDS", (1e-2, 1.0, 1e3))
    monkeypatch.setattr(exact_runs, "MOST_REPEATED", 24)
    arguments = ["--model", model, "--steps", "2", "--seed", "3", "--levels", "0,1"]
    arguments += ["--config", "M8C2T1e-4"]
    code, output = avq("generate", PROMPT, *arguments, "--tolerance", "0.005")
    assert code == 0
    assert "ofexactattention's(asked:0.5%)" in output
    assert "cheap" not in output  # no operations beside times
    assert squeezed("tolerance: of the model's output (noise, velocity), not of the") in output
    pipe = two_level_pipe()
    config = AVQConfig.parse("M8C2T1e-4", levels=(0, 1))
    sizes = {"num_inference_steps": 2, "height": 128, "width": 128, "progress": False}
    apply_avq(pipe, config, tolerance=0.005, prompt=PROMPT, seed=3, **sizes)
    shown = {row.config for row in summary(pipe).rows}
    assert len(shown) > 2
    for choice in shown:
        assert squeezed(choice) in output
    assert np.array_equal(pixels("avq.png"), make(pipe, seed=3, steps=2))


@pytest.mark.parametrize(
    ("avq", "likeness", "speed", "look"),
    [
        ([1.0, 0.8, 1.0], 47, "speed: 2.00x as fast (2.00x to 2.50x", "they look alike"),
        ([4.0, 5.0, 4.0], 35, "speed: 0.50x as fast (0.40x", "differ; closer, and slower: -x"),
        ([1.9, 2.1, 2.0], 20, "speed: as fast, within noise (0.95x", "they differ visibly; closer"),
        ([2.0, 2.0, 2.0], float("inf"), "speed: as fast, within noise", "they are identical"),
    ],
    ids=["faster", "slower", "noise", "identical"],
)
def test_the_outcome_is_said_in_words(avq, likeness, speed, look):
    """Catches times or bounds that are swapped, a verdict on noise, and unneeded advice."""
    times = StepTimes([2.0, 2.0, 2.0], avq)
    assert speed in generation.speed_line(times)
    assert look in generation.likeness_line(likeness, "-x")
    assert ("AVQ pays off on larger" in generation.speed_line(times)) == (max(avq) >= 2)


@pytest.mark.parametrize(
    ("scheduler", "num_added"),
    [(DDIMScheduler, 0), (PNDMScheduler, 1), (HeunDiscreteScheduler, 7)],
)
def test_steps_are_timed_in_turns(monkeypatch, scheduler, num_added):
    """Catches runs one after the other, which a machine's drift sets apart, cold steps, and the
    steps that a scheduler adds: an odd number of them left one without its pair."""
    monkeypatch.setattr(images, "TIMED_PAIRS", 3)
    pipe = two_level_pipe()
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    apply_avq(pipe, AVQConfig.parse("M4P2C2"), route="always")
    waits = iter((3, 3, *images.TIMED_PAIRS * (0.8, 0.4), *num_added * (9,)))
    modes, clock = [], [0.0]
    monkeypatch.setattr(images, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def wait(*_):
        modes.append(next(iter(states_of(pipe).values())).enabled is False)
        clock[0] += next(waits)

    pipe.unet.register_forward_pre_hook(wait)
    times = images.step_times(pipe, ImageRequest(PROMPT, None, 64, 64, 1, 7.5))
    assert len(modes) == 2 + 2 * images.TIMED_PAIRS + num_added
    assert modes == [call % 2 == 0 for call in range(len(modes))]
    assert times.exact == pytest.approx([0.8] * images.TIMED_PAIRS)
    assert times.avq == pytest.approx([0.4] * images.TIMED_PAIRS)
    assert next(iter(states_of(pipe).values())).enabled


def test_scalecrafter_dilates_both_images(generate, codebooks, tmp_path):
    """Fails where the option is read but not applied, or applied to one image only."""
    pipe = tiny_pipe(two_level_unet(sample_size=8))
    pipe.save_pretrained(tmp_path / "model")
    sizes = {"height": 128, "width": 128}
    run = sizes | {"steps": 2}
    options = ["--scalecrafter", "--steps", "2", "--height", "128", "--width", "128"]
    assert generate("--model", tmp_path / "model", *options)[0] == 0
    with scalecrafter(pipe, **sizes):
        exact = make(pipe, **run)
        expected = make(apply_avq(pipe, AVQCodebooks.from_pretrained(codebooks)), **run)
    assert not np.array_equal(expected, make(pipe, **run))
    assert np.array_equal(pixels("avq.png"), expected)
    sheet = pixels("avq_sheet.png")
    assert lefts(sheet, exact) < lefts(sheet, expected)


def test_calibrate_saves_codebooks_that_load(avq, model):
    Path("prompts.txt").write_text("a lake\n\n  a hill  \n")
    names = [layer.name for layer in select_layers(two_level_pipe().unet, (0, 1))]
    code, output = avq(
        *("calibrate", "--model", model, "--prompts", "prompts.txt", "--output", "my-codebooks"),
        *("--config", "M4P2C2", "--levels", "0,1", "--exact", f"{names[0]},up_blocks"),
        *("--steps", "2", "--keys", "256"),
    )
    assert code == 0
    assert "my-codebooks" in output
    loaded = AVQCodebooks.from_pretrained("my-codebooks")
    assert str(loaded.avq_config) == "M4P2C2/stored"
    assert loaded.avq_config.levels == (0, 1)
    expected = [name for name in names[1:] if not name.startswith("up_blocks")]
    assert list(loaded.layer_specs) == expected
    kept = loaded.config["calibration"]
    assert (kept["num_prompts"], kept["num_inference_steps"], kept["keys_per_layer"]) == (2, 2, 256)
    make(apply_avq(two_level_pipe(), loaded))


def test_levels_of_sdxl():
    """Catches level 0 taken for granted, where SDXL has no self-attention."""
    assert codeword_source(sdxl_pipe(), ModelRequest()).levels == (1,)


def test_generate_with_a_transformer(avq, tmp_path):
    """Catches sizes and parts of SD1.5 taken for granted: SD3 without its T5."""
    transformer = sd3_transformer(num_layers=2, dual_attention_layers=(0,))
    parts = {"transformer": transformer, "text_encoder_3": None, "tokenizer_3": None}
    pipe = sd3_pipe(**parts)
    pipe.save_pretrained(tmp_path)
    arguments = ("--model", tmp_path, "--steps", "2", "--config", "M4P2C2", "--num-refined", "1")
    code, output = avq("generate", PROMPT, *arguments)
    assert code == 0, output
    assert output.count("M4P1C2AVQ(torchbackend)") == 3
    assert pixels("avq.png").shape == (64, 64, 3)  # the training size
    with pytest.raises(ValueError, match="--scalecrafter dilates a UNet's convolutions; this mod"):
        images.dilation(pipe, ImageRequest(PROMPT, scalecrafter=True))


def test_arguments_that_a_pipeline_does_not_take():
    """Flux2 takes no negative prompt, and no `None` for one."""

    class Pipe:
        transformer, scheduler = sd3_pipe().transformer, sd3_pipe().scheduler
        vae_scale_factor, name_or_path = 8, "flux2"

        def __call__(self, prompt, height, width, num_inference_steps, guidance_scale=4.0):
            return guidance_scale

    request = ImageRequest(PROMPT)
    fitted = fit_request(Pipe(), request)
    assert (fitted.height, fitted.width, fitted.guidance_scale) == (1024, 1024, 4.0)
    assert "negative_prompt" not in _call_arguments(Pipe(), fitted)
    with pytest.raises(ValueError, match="--negative-prompt: Pipe takes none"):
        fit_request(Pipe(), replace(request, negative_prompt="blurred"))


def test_a_negative_prompt_acts_where_guidance_is_distilled():
    """Flux reads it with true guidance only."""
    pipe = quiet(flux_pipe())
    plain, negative = (
        timed_image(pipe, ImageRequest(PROMPT, text, 64, 64, 2, 3.5)).image
        for text in (None, "blue")
    )
    assert psnr(plain, negative) < 60


def test_the_largest_size_is_said_in_pixels():
    """Catches the pipeline's error, which counts patches; the largest size itself runs."""
    pipe = quiet(sd3_pipe())
    most = largest_side(pipe)
    request = ImageRequest(PROMPT, None, most, 64, 1)
    assert timed_image(pipe, fit_request(pipe, request)).image.height == most
    with pytest.raises(ValueError, match=f"--height must be at most {most} pixels"):
        fit_request(pipe, replace(request, height=most + 16))


def test_inspect(avq):
    code, output = avq("inspect")
    assert code == 0
    training = AVQCodebooks.from_pretrained(MINI_CODEBOOKS).config["training"]
    for name, measured in training["layers"].items():
        assert f"{measured['capture']:.3f}" in output, name
    assert written() == []


def test_bench_of_codebooks(avq, model, codebooks):
    """Catches choices that run as one another, times without images, another exact one."""
    arguments = ("--model", model, "--codebooks", codebooks, "--steps", "1")
    code, output = avq("bench", PROMPT, *arguments, "--num-refined", "0,4", "--images", "2")
    assert code == 0
    assert written() == ["avq_bench.png", "avq_bench_sheet.png"]
    assert "plot:avq_bench.pngsheet:avq_bench_sheet.png" in output
    labels = ["exact", "refined 0", "refined 4"]
    rows = [output.index(squeezed(label)) for label in labels]
    assert rows == sorted(rows)
    sheet = pixels("avq_bench_sheet.png")
    pipe, columns = apply_avq(two_level_pipe(), AVQCodebooks.from_pretrained(codebooks)), []
    for parents in (0, 4):
        set_num_refined(pipe, parents)
        columns += [lefts(sheet, make(pipe, seed)) for seed in (0, 1)]
    assert columns[0] == columns[1] < columns[2] == columns[3]


def test_bench_of_thresholds(avq, model):
    """Catches one choice for all, or another dial."""
    values = 0.01, 0.2
    arguments = ("--model", model, "--steps", "1", "--config", "M8C2T1e-4", "--levels", "0,1")
    code, output = avq("bench", PROMPT, *arguments, "--threshold", "0.01,0.2")
    assert code == 0
    assert "threshold0.01" in output
    sheet = pixels("avq_bench_sheet.png")
    pipe, config = two_level_pipe(), AVQConfig.parse("M8C2T1e-4", levels=(0, 1))
    places = []
    for value in values:
        set_threshold(apply_avq(pipe, config, route="always"), value)
        places.append(lefts(sheet, make(pipe)))
    assert places[0] < places[1]


def test_layers_with_fewer_parents_refine_all_of_theirs():
    """Catches a choice that some layers refuse."""
    pipe = two_level_pipe()
    small = next(layer.name for layer in select_layers(pipe.unet, (0,)))
    config = AVQConfig(**vars(CONFIG) | {"overrides": {small: {"num_parents": 3}}})
    apply_avq(pipe, random_codebooks(pipe.unet, config), route="always")
    codebooks, request = random_codebooks(pipe.unet), ImageRequest(PROMPT)
    (choose,) = bench.compared(pipe, codebooks, request, Dial(num_refined=[4])).values()
    choose()
    shown = {row.name: row.config for row in summary(pipe).rows if row.config}
    assert shown.pop(small) == "M3P3C2/stored"
    assert set(shown.values()) == {"M4P4C2/stored"}


def test_choices_run_beside_exact_images(monkeypatch):
    """Catches exact images that AVQ made, a default without all parents, another median, and a
    first step that is not the choice's first, here slow as if it compiled."""
    pipe = two_level_pipe()
    requests = [ImageRequest(PROMPT, None, 64, 64, 1, 7.5, seed) for seed in (0, 1, 2)]
    exact = [timed_image(pipe, request).image for request in requests]
    apply_avq(pipe, random_codebooks(pipe.unet), route="always")
    choices = bench.compared(pipe, random_codebooks(pipe.unet), requests[0], Dial())
    assert list(choices) == [f"refined {number}" for number in (0, 1, 2, 4)]
    label, choose = choices.popitem()
    clock, slow = [0.0], []  # seconds now, and those that the next call of the UNet takes
    monkeypatch.setattr(images, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    pipe.unet.register_forward_pre_hook(
        lambda *_: clock.append(clock.pop() + sum(slow)) or slow.clear()
    )
    chosen = {label: lambda: (choose(), slow.append(1))}
    first, result = bench.run_choices(pipe, chosen, requests)
    assert (result.cold, result.warm) == (1, 0)
    assert [psnr(*pair) for pair in zip(first.images, exact, strict=True)] == 3 * [float("inf")]
    likeness = [psnr(*pair) for pair in zip(result.images, exact, strict=True)]
    assert result.psnr == sorted(likeness)[1] < float("inf")
    assert result.label == "refined 4"


def test_bench_of_flat_codebooks_has_one_choice():
    pipe, config = two_level_pipe(), AVQConfig.parse("M6", query_tile=16, levels=(0, 1))
    codebooks, request = random_codebooks(pipe.unet, config), ImageRequest(PROMPT)
    apply_avq(pipe, codebooks, route="always")
    assert [*bench.compared(pipe, codebooks, request, Dial())] == ["refined 0"]
    with pytest.raises(ValueError, match=r"refined parents must be between 0 and 0, but got 1\."):
        bench.compared(pipe, codebooks, request, Dial(num_refined=[1]))


@pytest.mark.parametrize(
    ("make", "unet", "config", "levels", "texts"),
    [
        (random_codebooks, tiny_unet, "M6", (0, 1), ["M6"]),
        (random_codebooks, tiny_unet, "M1P1C4", (0, 1), ["M1P1C4"]),
        (own_codebooks, tiny_unet, "M6P2C2", (0, 1), ["M6P2C2 own codewords"]),
        (
            *(random_codebooks, sdxl_unet, "M4P2C2", (1, 2)),
            [f"mid_block.attentions.0.transformer_blocks.{block} " for block in (0, 1, 2)],
        ),
    ],
    ids=["flat", "one parent", "own", "several blocks"],
)
def test_inspect_of_other_codebooks(avq, tmp_path, make, unet, config, levels, texts):
    """Catches metrics that are taken for granted, and rows of one name."""
    make(unet(), AVQConfig.parse(config, levels=levels)).save_pretrained(tmp_path)
    code, output = avq("inspect", tmp_path)
    assert code == 0
    assert all(squeezed(text) in output for text in texts)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --model /no/such/folder", "/no/such/folder"),
        ("generate --config M64P", "expected a configuration such as M64C8T1e-4, M64P16C8 or M256"),
        ("generate --exact nowhere", "but got 'nowhere'; one of them is down_blocks.0.att"),
        ("generate --levels 7", "no self-attention at level 7, only at levels 0, 1"),
        ("generate --negative-prompt blue --guidance-scale 1", "a --guidance-scale above 1, not 1"),
        ("generate --codebooks nowhere", "--codebooks nowhere is no file or folder"),
        (f"generate --codebooks {MINI_CODEBOOKS}", "codebooks of another model"),
        ("generate --codebooks CODEBOOKS --exact up_blocks", "--exact; drop one of them"),
        ("generate --tolerance 0.1 --codebooks CODEBOOKS", "Thresholds and tolerances exclude"),
        ("generate --tolerance 0.1 --num-refined 8", "--num-refined and --tolerance exclude each"),
        ("generate --threshold -1", "--threshold must be at least 0, but got -1.0"),
        ("generate --threshold 1e-4,1e-3", "avq generate sets one value; avq bench compares"),
        ("bench --config M4P2C2 --num-refined 2,5", "can refine 0 to 4 parents, but got 2, 5"),
        ("generate --scalecrafter", "training size, 128, but got 128 x 128"),
        ("generate --steps 1001", "must be at most the model's 1000 timesteps, but got 1001"),
        ("generate --guidance-scale nan", "--guidance-scale must be finite, but got nan"),
        (f"generate --seed {2**63}", "Invalid value for '--seed'"),
        ("generate --output /proc/self/a.png", "/proc/self/a.png cannot be written ("),
        (f"generate --output {248 * 'a'}.png", ".png cannot be written (File name too long)"),
        ("generate --output no-such-folder/a.png", "a.png cannot be written (No such file or dir"),
        ("generate --output b.png", "--output b.png writes b_sheet.png, but that is a folder"),
        ("generate --device abacus", "abacus"),
        (
            "generate --dtype int8",
            "--dtype must be one of float32, float16, bfloat16, but got 'int",
        ),
        ("calibrate --prompts empty.txt", "empty.txt holds no prompt"),
        ("calibrate --output empty.txt/codebooks", "--output must be a folder, but"),
        ("calibrate --config M8C2T1e-4", 'codewords="stored" needs num_refined in place of a thr'),
        ("calibrate --keys 3 --config M4P2C2", "at least num_parents = 4, but got 3"),
    ],
)
def test_refuses(avq, model, codebooks, tmp_path, command, message):
    """One sentence, exit code 2, and neither a file nor a cache entry: before the work."""
    Path("empty.txt").write_text("\n \n")
    Path("b_sheet.png").mkdir()
    before = written()
    name, *arguments = command.replace("CODEBOOKS", codebooks).split()
    usual = {"inspect": [], "calibrate": ["--model", model, "--output", "codebooks"]}
    code, output = avq(name, *usual.get(name, [PROMPT, "--model", model]), *arguments)
    assert code == 2
    assert squeezed(message) in output
    assert "Traceback" not in output
    assert written() == before
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", ["generate fox --model", "inspect"])
def test_an_unknown_name_is_refused_at_once(avq, command):
    """Catches half a minute of attempts to reach the Hub, and their messages."""
    start = time.perf_counter()
    code, output = avq(*command.split(), "no-such-name")
    assert time.perf_counter() - start < 10
    assert code == 2
    assert squeezed("no-such-name is no file or folder") in output
    assert output.count(".") == 1


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("sizes of tensors must match"), False),
    ],
)
def test_out_of_memory_is_one_sentence(monkeypatch, capsys, error, is_told):
    """Catches a traceback of the most usual mistake on a GPU, and none for a mistake of ours."""

    def fail():
        raise error

    monkeypatch.setattr("avq_diffusers.cli.main.app", fail)
    with pytest.raises(SystemExit if is_told else RuntimeError) as raised:
        main()
    assert getattr(raised.value, "code", error) == (2 if is_told else error)
    message = "avq: out of memory at this size; try a smaller one, or --device cpu on a GPU.\n"
    assert capsys.readouterr().err == message * is_told

"""Distillation end to end with a tiny pipeline, killed and shared out, and its parts by hand."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers import (
    DDPMScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    UNet2DConditionModel,
)
from huggingface_hub import ModelCard, RepoUrl
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import filter_repo_objects
from PIL import Image
from processes import start_ranks
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import sdxl_unet, two_level_pipe, two_level_unet
from tiny_training import (
    ROOT,
    RUN_CONFIG,
    TINY_RUN,
    make_batch,
    make_objective,
    perturb,
    reassign_dead,
    unet_output,
)
from tqdm import tqdm
from typer.testing import CliRunner

import distill.run
from avq_diffusers import AVQCodebooks, summary
from avq_diffusers.extras.linfusion import load_linfusion
from avq_diffusers.files import read_log
from distill import loop
from distill.__main__ import app
from distill.checkpointing import checkpoint
from distill.checkpointing.checkpoint import locked
from distill.checkpointing.folders import write_digests
from distill.checkpointing.hub import HTTP_ERRORS, model_card
from distill.config import DistillConfig
from distill.config_file import load_config
from distill.data import cache
from distill.log import Meter, log_path
from distill.objective import timestep_weights
from distill.preview import generate, student_in
from distill.run import Run, unsuited

# The last micro-batch, to which dead codewords move, would depend on the split.
NO_DEAD = {"codebooks.dead_threshold": "null"}
FIGURES = {"quantization_error", "active_ratio", "capture"}
LOGGED = ("step", "samples", "loss", "noise", "output", "feature", "commitment", "grad_norm")


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """An undisturbed run, which says what it leaves and how it is loaded."""
    output = tmp_path_factory.mktemp("runs") / "finished"
    result = run(model, output, tracker="tensorboard")
    assert result.exit_code == 0
    assert f"{output}/samples/step-00000004.png compares images of teacher" in result.stdout
    folder = output / "codebooks"
    load = f'apply_avq(pipe, AVQCodebooks.from_pretrained("{folder}"))'
    assert f"{folder} holds the student: {load}\n" in result.stdout
    assert "sample images: 100%" in result.stderr
    return output


def arguments(model, output, *extra, **settings):
    """Of the command."""
    values = {"base_model": model, **TINY_RUN, **settings}
    pairs = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return ["--config", str(RUN_CONFIG), "--output", str(output), *pairs, *extra]


def tiny_config(**settings):
    pairs = [f"{key}={value}" for key, value in {**TINY_RUN, **settings}.items()]
    return load_config(RUN_CONFIG, DistillConfig, pairs)


def reset_accelerate():
    """One process is one run for accelerate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(*given, **settings):
    reset_accelerate()
    result = CliRunner().invoke(app, arguments(*given, **settings))
    if result.exit_code not in (0, 1, 2) or type(result.exception) not in (type(None), SystemExit):
        raise result.exception
    return result


def refused(*given, **settings):
    result = run(*given, **settings)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    return result.stderr


def losses(output):
    return [[line[name] for name in LOGGED if name in line] for line in read_log(log_path(output))]


def final(output, step=4):
    path = output / "checkpoints" / f"step-{step:08d}"
    return {name: load_file(path / f"{name}.safetensors") for name in ("objective", "optimizer")}


def assert_same(one, two):
    for name in one:
        assert one[name].keys() == two[name].keys()
        for key, value in one[name].items():
            assert torch.equal(value, two[name][key]), key


def copy_until(source, target, step):
    """Copy a run as it was at a checkpoint."""
    shutil.copytree(source, target)
    for path in checkpoint.checkpoints(target):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(target / "codebooks")


def steps_of(output):
    return [int(path.name.removeprefix("step-")) for path in checkpoint.checkpoints(output)]


def test_the_newest_checkpoints_are_kept(tmp_path):
    """Catches one kept too many or too few, the step of another one, and what a kill left
    half-written and fills the disk."""
    config = load_config(RUN_CONFIG, DistillConfig, [])
    for step in range(1, 5):
        checkpoint.save(tmp_path, step, {}, config=config, keep=2)
    mine = {"step-00000001-good", "step-best", ".my-step-00000001"}  # a user's own copies
    for name in mine:
        (tmp_path / "checkpoints" / name).mkdir()
    for step in (3, 4):
        (tmp_path / "checkpoints" / f".writing-step-{step:08d}").mkdir()
    checkpoint.save(tmp_path, 4, {}, config=config, keep=2)
    kept = {"step-00000003", "step-00000004"}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == mine | kept
    assert steps_of(tmp_path) == [3, 4]
    newest = checkpoint.newest(tmp_path)
    assert (newest.step, newest.path.name) == (4, "step-00000004")


def test_an_infinite_gradient_ends_a_run_that_scales_none():
    meter = Meter(Accelerator(cpu=True), 0)
    meter.add({"loss": torch.tensor(1.0), "grad_norm": torch.tensor(torch.inf)})
    with pytest.raises(FloatingPointError, match="grad_norm inf"):
        meter.means(1, 4)


def test_sheets_leave_the_teacher_exact_and_have_noise_per_image():
    config, pipe = (
        tiny_config(**{"samples.prompts": "[a fox, a fox]"}),
        two_level_pipe(),
    )
    objective = perturb(make_objective(config.avq, pipe.unet))
    exact = unet_output(pipe.unet, make_batch())
    with student_in(pipe, objective, config):
        assert not torch.equal(unet_output(pipe.unet, make_batch()), exact)
    assert torch.equal(unet_output(pipe.unet, make_batch()), exact)
    first, second = generate(pipe, config, tqdm(disable=True))
    assert first.tobytes() != second.tobytes()


def test_figures_of_layers_are_means_over_heads():
    """Catches the figure of one head, and figures of another layer."""
    objective = make_objective()
    objective(**make_batch())
    found = loop.layer_metrics(objective)
    assert found.keys() == FIGURES
    for layer, expected in objective.diagnostics().items():
        for figure, values in expected.items():
            assert found[figure][layer] == pytest.approx(values.mean().item(), rel=1e-5)


# The command


def test_what_a_run_leaves(finished, model):
    """Also catches steps that count micro-batches, of which each step here has two."""
    assert steps_of(finished) == [2, 4]
    assert [path.name for path in (finished / "samples").iterdir()] == ["step-00000004.png"]
    sheet = Image.open(finished / "samples" / "step-00000004.png")
    assert sheet.width > 2 * 64
    assert not list(finished.rglob(".*"))
    complete = load_config(finished / "config.yaml", DistillConfig, [])
    assert complete == tiny_config(base_model=model, tracker="tensorboard")

    lines = read_log(log_path(finished))
    assert [(line["step"], line["samples"]) for line in lines] == [(1, 4), (2, 8), (3, 12), (4, 16)]
    optimizer = final(finished)["optimizer"]
    counted = [value.item() for key, value in optimizer.items() if key.startswith("step/")]
    assert counted == [4] * 20  # four layers of five parameters
    assert [round(line["decay"], 4) for line in lines] == [0.9, 0.945, 0.99, 0.99]
    # Linear warm-up of one step, then a cosine over three.
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([0, 1e-3, 0.75e-3, 0.25e-3], rel=1e-4)

    last = lines[-1]
    training = AVQCodebooks.from_pretrained(finished / "codebooks").config["training"]
    assert (training["steps"], training["samples"], training["seed"]) == (4, 16, 0)
    assert (training["config"], training["losses"]["feature"]) == ("mini_m64p16c8", last["feature"])
    assert training["versions"]["torch"] == version("torch")
    assert len(training["layers"]) == len(set(last["quantization_error"].values())) == 4
    for layer, figures in training["layers"].items():
        assert figures == {name: last[name][layer] for name in FIGURES}
        assert all(value >= 0 for value in figures.values())


def test_the_result_is_what_was_learned(finished, model):
    """Catches an export of whole projections, and of other codewords than the last."""
    unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet")
    codebooks = AVQCodebooks.from_pretrained(finished / "codebooks")
    state = final(finished)["objective"]
    name = next(iter(codebooks.layer_specs))
    learned = state["layers.0.to_k.weight"]
    change = codebooks.projection_changes(name)["to_k.weight"]
    assert torch.equal(change, learned - unet.get_submodule(name).to_k.weight)
    assert change.any()
    quantizer = "layers.0.token_attention.quantizer"
    assert torch.equal(codebooks.codebook(name).children, state[f"{quantizer}.child_codewords"])


def test_the_model_card_loads_the_result(finished, model):
    """Catches code that does not run, other settings or numbers, and names of local files."""
    folder = finished / "codebooks"
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("diffusers", None)  # not of the Hub
    assert str(model) not in card.text
    last = read_log(log_path(finished))[-1]
    assert f"| feature | {last['feature']:.4g} |" in card.text
    errors = last["quantization_error"].values()
    mean_error = sum(errors) / len(errors)
    assert f"| quantization error, mean over layers | {mean_error:.4g} |" in card.text
    (settings,) = re.findall(r"```yaml\n(.*?)```", card.text, re.DOTALL)
    expected = yaml.safe_load((finished / "config.yaml").read_text()) | {"base_model": "tiny"}
    assert yaml.safe_load(settings) == expected
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    names = {}
    exec(code.replace('"codebooks"', repr(str(folder))).replace('"tiny"', repr(str(model))), names)
    assert any(row.config for row in summary(names["pipe"]).rows)


def test_model_cards_name_what_is_public():
    """Catches the folders of whoever trained."""
    training = {"losses": {}, "layers": {}, "config": "row"}
    data = "{source: huggingface, path: me/set, split: train, image_column: a, captions: /x/c.txt}"
    for settings, parts in (
        (
            {"base_model": "me/base", "data": data},
            ("- me/set\n", "base_model: me/base\n", "captions: c.txt", "path: me/set"),
        ),
        (
            {"base_model": "mini-sd", "data.cache": "/x/cache"},
            ("from avq_diffusers.mini import MINI_SD\n", "from_pretrained(MINI_SD"),
        ),
    ):
        text = model_card(tiny_config(**settings), training, source="codebooks")
        assert all(part in text for part in parts)
        assert "/x" not in text
        assert ("datasets:" in text) == ("data" in settings)


@pytest.fixture
def hub(monkeypatch):
    """What would be sent to the Hub."""
    sent = []

    class Api:
        def create_repo(self, repo, *, exist_ok):
            sent.append((repo, exist_ok))
            return RepoUrl(f"{ENDPOINT}/{repo if '/' in repo else f'me/{repo}'}")

        def auth_check(self, repo_id, *, write):
            if write and not repo_id.startswith("me/"):
                raise HTTP_ERRORS[1](f"403 Forbidden for {repo_id}")

        def upload_folder(self, *, repo_id, folder_path, ignore_patterns, commit_message):
            files = filter_repo_objects(
                (path.name for path in folder_path.iterdir()), ignore_patterns=ignore_patterns
            )
            sent.append((repo_id, sorted(files), (folder_path / "README.md").read_text()))

    monkeypatch.setattr("distill.checkpointing.hub.HfApi", Api)
    return sent


def test_a_finished_run_is_pushed(finished, model, tmp_path, hub, monkeypatch):
    """Catches files that are missing or nobody needs, a card that names a local folder, a name
    without user that is not found, and a failed upload that costs the result or ends in a
    traceback."""

    def fail(*_, **__):
        raise HTTP_ERRORS[1]("no network")

    output = tmp_path / "run"
    copy_until(finished, output, step=4)
    push = (model, output, "--resume", "--push-to-hub", "me/avq")
    with monkeypatch.context() as offline:
        offline.setattr("distill.checkpointing.hub.HfApi.upload_folder", fail)
        result = run(*push)
    assert result.exit_code == 1
    assert "is complete, but could not be pushed to me/avq (no network)" in result.stderr
    written, original = (
        json.loads((path / "codebooks" / "config.json").read_text()) for path in (output, finished)
    )
    assert written == original

    assert run(*push[:-1], "avq").exit_code == 0
    *_, made, (repo, files, card) = hub
    assert made == ("avq", True)
    assert repo == "me/avq"
    assert files == ["README.md", "config.json", "diffusion_pytorch_model.safetensors"]
    assert 'AVQCodebooks.from_pretrained("me/avq")' in card
    assert str(tmp_path) not in card


def test_what_cannot_be_pushed_is_said_before_the_training(model, tmp_path, hub, monkeypatch):
    """Catches hours of training before the first word about a missing token, or about somebody
    else's repository."""
    message = refused(model, tmp_path, "--push-to-hub", "me/avq", attention="exact")
    assert "attention: exact exports nothing to push to me/avq" in message
    message = refused(model, tmp_path, "--push-to-hub", "you/avq")
    assert "--push-to-hub you/avq: 403 Forbidden" in message
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "--push-to-hub me/avq: " in refused(model, tmp_path, "--push-to-hub", "me/avq")
    assert not list(tmp_path.iterdir())


def test_linfusion_is_trained_and_loaded(model, tmp_path):
    """Catches an export without phi, or with the teacher's projections."""
    settings = {"attention": "linfusion", "steps": 2, "checkpoint_every": "null"}
    assert run(model, tmp_path, **settings).exit_code == 0
    unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet")
    load_linfusion(unet, tmp_path / "linfusion")
    phi = "processor.phi_q.3.weight"
    learned = final(tmp_path, step=2)["objective"][f"layers.0.{phi}"]
    attn = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    assert torch.equal(attn.get_parameter(phi), learned)
    assert learned.abs().max() > 0
    learned = final(tmp_path, step=2)["objective"]["layers.0.to_k.weight"]
    assert torch.equal(attn.processor.to_k.weight, learned)
    card = (tmp_path / "linfusion" / "README.md").read_text()
    assert 'load_linfusion(pipe, snapshot_download("linfusion"))' in card
    linfusion = json.loads((tmp_path / "linfusion" / "config.json").read_text())
    assert (linfusion["base_model"], linfusion["training"]["steps"]) == ("tiny", 2)
    assert {layer["level"] for layer in linfusion["layers"]} == {0, 1}


@pytest.mark.parametrize(
    "settings",
    [
        {
            "precision": "bf16",
            "gradient_checkpointing": "true",
            "objective.diveq": "true",
            "avq.key_norm": "true",
            "avq.num_children": 0,
            "avq.num_refined": 0,
            "data.cache": "CACHE",
            **NO_DEAD,
        },
        {
            "precision": "bf16",
            "avq.num_refined": "null",
            "avq.threshold": 0.01,
            "objective.guided_weight": 0.1,
            "objective.guidance_scale": 2.0,
            "avq.codewords": "means",
            "codebooks": "null",
            "objective.commitment_weight": 0,
        },
    ],
)
def test_options_run_and_resume(model, tmp_path, settings):
    """Catches state that an option adds and a checkpoint forgets."""
    settings = {k: tmp_path / "cache" if v == "CACHE" else v for k, v in settings.items()}
    settings |= {"steps": 2, "checkpoint_every": 1}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run(model, whole, **settings).exit_code == 0
    copy_until(whole, halves, step=1)
    assert run(model, halves, "--resume", **settings).exit_code == 0
    assert losses(halves) == losses(whole)
    assert_same(final(halves, 2), final(whole, 2))
    exports = [AVQCodebooks.from_pretrained(path / "codebooks") for path in (whole, halves)]
    assert_same(*({"tensors": exported.state_dict()} for exported in exports))
    assert exports[0].config["own_codewords"] == (settings.get("codebooks") == "null")


# Resuming


def test_two_and_two_steps_equal_four(finished, model, tmp_path):
    output = tmp_path / "run"
    copy_until(finished, output, step=2)
    # What a kill may leave behind: half a checkpoint, half a removal, half a line.
    for name in (".writing-step-00000004", ".writing-old-step-00000001"):
        shutil.copytree(output / "checkpoints" / "step-00000002", output / "checkpoints" / name)
    with log_path(output).open("a") as file:
        file.write('{"step": 5, "lo')
    assert run(model, output, "--resume", tracker="tensorboard").exit_code == 0
    assert_same(final(output), final(finished))
    assert losses(output) == losses(finished)
    weights = "codebooks/diffusion_pytorch_model.safetensors"
    assert (output / weights).read_bytes() == (finished / weights).read_bytes()
    assert not list(output.rglob(".*"))
    # The tracker has every step once, though steps 3 and 4 were written again.
    (events,) = {path.parent for path in output.rglob("events.*") if path.parent.parent == output}
    accumulator = EventAccumulator(str(events)).Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == [1, 2, 3, 4]


def test_a_sheet_that_fails_loses_nothing(finished, model, tmp_path):
    """Catches a checkpoint that waits for the sheet, a sheet that a resumed run leaves out, and a
    run without checkpoint that does not start anew."""
    sheets = {"samples.every": 2}
    shutil.copy(log_path(finished), log_path(tmp_path))
    (tmp_path / "samples").touch()  # not a folder
    assert run(model, tmp_path, "--resume", **sheets).exit_code == 1
    assert steps_of(tmp_path) == [2]
    (tmp_path / "samples").unlink()
    assert run(model, tmp_path, "--resume", **sheets).exit_code == 0
    assert losses(tmp_path) == losses(finished)
    names = ["step-00000002.png", "step-00000004.png"]
    found = {path.name: path.read_bytes() for path in sorted((tmp_path / "samples").iterdir())}
    assert list(found) == names
    assert found[names[1]] == (finished / "samples" / names[1]).read_bytes()


def test_a_loss_that_is_not_finite_ends_the_run(model, tmp_path):
    settings = {"learning_rate": 1e30, "schedule": "constant", "warmup_steps": 0}
    result = run(model, tmp_path, checkpoint_every=1, **settings)
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: training stopped: a loss or gradient in the 1 steps up to 2")
    assert steps_of(tmp_path) == [1]
    assert all(x.isfinite().all() for group in final(tmp_path, 1).values() for x in group.values())
    assert not (tmp_path / "codebooks").exists()


def test_a_damaged_cache_ends_with_one_sentence(model, tmp_path):
    """Catches the message of a DataLoader worker in training, a traceback of twenty lines."""
    settings = {"attention": "linfusion", "data.cache": tmp_path / "cache", "steps": 1}
    assert run(model, tmp_path / "whole", **settings).exit_code == 0
    (shard,) = (tmp_path / "cache").rglob("shard-*")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    result = run(model, tmp_path / "run", **settings, **{"data.workers": 1})
    assert result.exit_code == 1
    error = result.stderr[result.stderr.index("error: ") :]
    assert re.fullmatch(rf"error: {shard} is damaged \(.*\); delete it to build it again.\n", error)


def test_a_damaged_log_is_refused_before_anything_is_loaded(tmp_path):
    """Catches a log that is read when training begins, and one that is lost."""
    log_path(tmp_path).write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    before = log_path(tmp_path).read_bytes()
    error = refused("/nowhere", tmp_path, "--resume")
    assert f"line 2 of {log_path(tmp_path)} is not a JSON object with a step; delete" in error
    assert log_path(tmp_path).read_bytes() == before


# Optimizer, micro-batches and processes


def assert_close(one, two):
    """Compare what sums make; Adam makes steps of any size of the rounding of a tiny gradient."""
    one, two = ({**states["objective"], **states["optimizer"]} for states in (one, two))
    names = [key for key in two if "exp_avg/" in key or "ema_" in key or "codewords" in key]
    assert len(names) >= 20
    for name in names:
        assert (one[name] - two[name]).norm() <= 1e-3 * two[name].norm(), name


def test_one_step_of_the_optimizer_by_hand(model, tmp_path):
    """Catches gradients that are not clipped, and moments or a decay by AdamW's own defaults."""
    settings = {"steps": 1, "attention": "exact", "schedule": "constant", "warmup_steps": 0}
    settings |= {"learning_rate": 1e-2, "weight_decay": 0.5, "adam_betas": "[0.8, 0.9]"}
    assert run(model, tmp_path, max_grad_norm=1e-12, **settings).exit_code == 0
    state = final(tmp_path, 1)
    first, second = (
        torch.cat([x.flatten() for key, x in state["optimizer"].items() if key.startswith(kind)])
        for kind in ("exp_avg/", "exp_avg_sq/")
    )
    gradient = first.double() / (1 - 0.8)
    assert gradient.norm().item() == pytest.approx(1e-12, rel=1e-4)
    step = 2.0**-149  # of float32 below its normal numbers
    torch.testing.assert_close(second.double(), (1 - 0.9) * gradient**2, rtol=1e-4, atol=step)
    # So small a gradient moves nothing: what is left is the decay.
    before = load_file(model / "unet" / "diffusion_pytorch_model.safetensors")
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k.weight"
    learned = state["objective"]["layers.0.to_k.weight"]
    torch.testing.assert_close(learned, (1 - 1e-2 * 0.5) * before[name], rtol=1e-5, atol=1e-5)


def test_micro_batches_add_up_to_the_batch(model, tmp_path):
    """Catches a sum in place of a mean, a step per micro-batch, draws that depend on both,
    gradients that are clipped before they are complete, and a line of the log that is not the mean
    since the one before."""
    whole, output = tmp_path / "whole", tmp_path / "split"
    # Rounding would move a key between two codewords at equal distance; exact attention has none.
    settings = {"steps": 3, "attention": "exact", "max_grad_norm": 1e-3}
    assert run(model, whole, checkpoint_every=1, **settings).exit_code == 0
    settings |= {"micro_batch_size": 1, "log_every": 2, "checkpoint_every": "null"}
    assert run(model, output, **settings).exit_code == 0
    assert_close(final(output, 3), final(whole, 3))
    first, second, third = (torch.tensor(line) for line in losses(whole))
    found = [torch.tensor(line) for line in losses(output)]
    expected = [(first + second) / 2, third]
    expected[0][:2] = second[:2]  # the number of steps and samples
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    with pytest.raises(AssertionError):
        assert_close(final(whole, 2), final(whole, 3))


def test_codebooks_and_losses_start_from_the_base_model(model, tmp_path):
    """Catches draws per micro-batch, more images than the configuration says, the usual noise
    schedule, and states of an empty caption that are zeros or lead into the text encoder."""
    states = []
    for size in (1, 2):
        settings = {"codebooks.start_images": 3, "micro_batch_size": size, "base_model": model}
        settings |= {"objective.guided_weight": 1, "objective.weighting_scheme": "inverse_alpha"}
        reset_accelerate()
        prepared = Run(tiny_config(**settings), tmp_path / str(size), resume=False).objective
        states.append(prepared.state_dict())
    one, two = states
    names = [name for name in one if "codewords" in name or "ema_" in name]
    assert len(names) == 16
    for name in names:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)
    counts = prepared.quantizers[prepared.names[0]].ema_counts[:, :, 0].sum(1)
    torch.testing.assert_close(counts, torch.full((2,), 2 * 4 * 64.0))  # two passes of four images
    pipe = two_level_pipe()
    weights = timestep_weights("inverse_alpha", pipe.scheduler.alphas_cumprod)
    assert torch.equal(prepared.timestep_weights, weights)
    ids = pipe.tokenizer("", padding="max_length", return_tensors="pt").input_ids
    torch.testing.assert_close(prepared.empty_text_states, pipe.text_encoder(ids)[0].detach())
    assert not prepared.empty_text_states.requires_grad


def train_in_a_rank() -> None:
    """What one of two processes does that train together."""
    folder, *settings = sys.argv[1:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["OMP_NUM_THREADS"] = "1"  # else accelerate takes all cores, for tiny tensors
    cache.SHARD = 2  # so that both processes build a part
    config = load_config(RUN_CONFIG, DistillConfig, settings)
    run = Run(config, Path(folder) / "two", resume=False)
    run.accelerator.end_training = lambda: None  # it would part the processes
    loop.train(run, "two")
    assert run.accelerator.num_processes == 2
    objective = run.objective
    trained = {name: value.clone() for name, value in objective.state_dict().items()}
    reassign_dead(objective, threshold=60.0, seed=5)
    state = {"trained": trained, "reassigned": objective.state_dict()}
    torch.save(state, f"{folder}/{os.environ['RANK']}.pt")


def test_two_processes_are_one(model, tmp_path):
    """Catches codebooks or gradients of each process's own, keys of each process's own in place of
    dead codewords, samples seen twice or never, and a cache that lacks some."""
    split = {"steps": 2, "checkpoint_every": 1, **NO_DEAD}
    cached = {"data.cache": tmp_path / "cache of one"}
    assert run(model, tmp_path / "one", **split, **cached).exit_code == 0
    settings = split | {"data.cache": tmp_path / "cache"}
    pairs = pairwise(arguments(model, tmp_path / "two", **settings))
    settings = [value for option, value in pairs if option == "--set"]
    for process in start_ranks("test_distill:train_in_a_rank", 2, [tmp_path, *settings]):
        code, printed = process.finish()
        assert code == 0, printed
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    one, two = (final(tmp_path / name, 2) for name in ("one", "two"))
    assert_same(first, second)
    assert_same({"": first["trained"]}, {"": two["objective"]})
    name = "layers.0.token_attention.quantizer.parent_codewords"
    assert not torch.equal(first["reassigned"][name], first["trained"][name])
    assert len(list((tmp_path / "cache").rglob("shard-*"))) == 3
    assert_close(two, one)
    for mine, other in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


# Refusals


def test_a_folder_with_a_run_is_not_overwritten(finished, model, tmp_path):
    """Also where only its log or its checkpoints are left, which count as newer than the run's."""
    for part in (log_path(finished), finished / "checkpoints"):
        output = tmp_path / part.name
        output.mkdir()
        copy = shutil.copytree if part.is_dir() else shutil.copy
        copy(part, output / part.name)
        error = refused(model, output)
        assert f"{output} holds a run: add --resume or choose another --output." in error


def test_a_folder_that_another_run_writes_is_refused(finished, model, monkeypatch):
    """Catches mixed logs, and checkpoints that one run takes from under the other."""
    monkeypatch.setattr(distill.checkpointing.checkpoint, "LOCK_SECONDS", 0)
    with locked(finished):
        error = refused(model, finished, "--resume")
        assert f"error: another run is writing {finished}; wait for it, or choose" in error


def test_a_truncated_base_model_is_one_sentence(model, tmp_path):
    """transformers, unlike diffusers, lets the error of safetensors through."""
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    error = refused(tmp_path / "cut", tmp_path / "run")
    assert f"error: base_model {tmp_path / 'cut'} has a damaged file: " in error


def sign(path, text):
    """Write a changed `run.json` as if a run had saved it."""
    path.write_text(text)
    write_digests(path.parent)


def test_another_base_model_or_data_of_the_same_name_is_refused(finished, model, tmp_path):
    """Catches the difference of two models among what training changed, and images that come twice
    or never: their order depends on how many there are. Other settings count before the first
    checkpoint too."""
    output, base = tmp_path / "run", tmp_path / "base"
    copy_until(finished, output, step=4)
    path = checkpoint.newest(output).path / "run.json"
    saved = path.read_text()
    shutil.copytree(model, base)
    changed = two_level_unet()
    with torch.no_grad():
        changed.conv_in.bias.add_(1)
    changed.save_pretrained(base / "unet")
    sign(path, saved.replace(str(model), str(base)))
    error = refused(base, output, "--resume")
    assert f"was trained from another {base}; its UNet has changed since." in error
    sign(path, saved.replace('"6 of ', '"7 of '))
    error = refused(model, output, "--resume")
    assert "was trained on other data; images or captions have changed since." in error
    sign(path, saved)
    early = tmp_path / "early"
    copy_until(finished, early, step=0)
    for folder in (output, early):
        error = refused(model, folder, "--resume", batch_size=2, weight_decay=1, log_every=2)
        assert "has a different configuration: batch_size, weight_decay." in error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 3}, "must be a multiple of micro_batch_size x processes = 2 x 1, but"),
        ({"tracker": "comet_ml"}, "the tracker comet_ml is not installed"),
        ({"precision": "fp16"}, "precision fp16 needs a GPU"),
        ({"compile": "true"}, "compile: true needs a CUDA GPU; set compile to false."),
        ({"avq.levels": "[7]"}, "no self-attention at level 7"),
        ({"base_model": "/nowhere"}, "/nowhere"),
        ({"samples.num_inference_steps": 1001}, "has 1000 timesteps for 1001 of samples."),
    ],
)
def test_wrong_settings_are_refused_with_one_sentence(model, tmp_path, settings, message):
    error = refused(model, tmp_path / "run", **settings).splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not log_path(tmp_path / "run").exists()


def test_a_launcher_that_compiles_is_refused(model, tmp_path, monkeypatch):
    """Catches wrong losses: compiled for a CPU, `UpBlock2D` has wrong gradients."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    error = refused(model, tmp_path)
    reset_accelerate()
    assert "error: the setting compile decides what is compiled; launch with --dynamo" in error


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"unet": sdxl_unet}, r"takes additional conditions \(text_time\)"),
        (
            {"unet": lambda: two_level_unet(in_channels=9)},
            "takes 9 channels, like one for inpainting",
        ),
        ({"text_encoder": lambda: None}, "has no text_encoder"),
        (
            {"scheduler": FlowMatchEulerDiscreteScheduler},
            "has a FlowMatchEulerDiscreteScheduler without beta_start, beta_end, beta_schedule, "
            "prediction_type",
        ),
        ({"scheduler": EDMEulerScheduler}, "has a .* without beta_start, beta_end, beta_schedule"),
        (
            {"scheduler": lambda: DDPMScheduler(prediction_type="sample")},
            "predicts sample, not epsilon or v_prediction",
        ),
        ({}, None),
    ],
)
def test_models_that_are_not_suited_are_named(parts, problem):
    """Catches a traceback before or after k-means, and the betas of another noise schedule."""
    pipe = two_level_pipe()
    for name, make in parts.items():
        setattr(pipe, name, make())
    found = unsuited(pipe, 25)
    assert found == problem or re.fullmatch(problem, found)


# Devices


def trained_on_devices(tmp_path, processes, **settings):
    """Return the losses, and the gradients of the first two steps in Adam's moments."""
    output = tmp_path / f"run-{processes}-{len(settings)}"
    launch = [sys.executable, "-m", "accelerate.commands.launch", f"--num_processes={processes}"]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    given = {"image_size": 128, "batch_size": 8, "micro_batch_size": 4, "data.num_samples": 32}
    given |= {"codebooks.dead_threshold": "null", "samples.every": "null"}
    command = [*launch, "-m", "distill", *arguments("mini-sd", output, **given | settings)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert AVQCodebooks.from_pretrained(output / "codebooks").config["training"]["steps"] == 4
    moments = final(output, 2)["optimizer"]
    gradients = torch.cat([x.flatten() for k, x in moments.items() if k.startswith("exp_avg/")])
    return torch.tensor(losses(output)), gradients


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_compilation_on_a_gpu(tmp_path, precision):
    """Catches a compiled or half-precision step that computes something else.

    With two micro-batches a step it also catches gradients that the next CUDA graph overwrites.
    """
    exact, _ = trained_on_devices(tmp_path, 1)
    half, expected = trained_on_devices(tmp_path, 1, precision=precision)
    compiled, found = trained_on_devices(tmp_path, 1, precision=precision, compile="true")
    names = slice(2, 7)  # losses
    # On a CPU, bf16 is off by 3 %, and by 14 % where the codebooks or the optimizer stand still.
    torch.testing.assert_close(half[:, names], exact[:, names], rtol=0.05, atol=0)
    torch.testing.assert_close(compiled[:, names], half[:, names], rtol=0.05, atol=0)
    # The norm of the gradients is twice as large where the second micro-batch counts twice.
    torch.testing.assert_close(compiled[:2, 7], half[:2, 7], rtol=0.2, atol=0)
    # Wrong gradients can have about the right norm.
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_are_one(tmp_path):
    one, two = (trained_on_devices(tmp_path, processes)[0] for processes in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)

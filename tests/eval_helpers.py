"""What the tests of `eval` share."""

import contextlib
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from avq_diffusers import select_layers
from eval.benchmarks.timing import Effort
from eval.methods.prepared import load_methods
from eval.quality import protocol
from eval.quality.scenes import SceneTrial, score_methods

CALIBRATION = ("a",)  # prompts
FAST = Effort(rounds=2, block_ms=0.1, eager_rounds=2)
# What a result says of ScaleCrafter at twice the size of a tiny model: the authors' for SD1.5.
SETTINGS_2X = {
    "dilations": [1, 2],
    "num_dilated_steps": 30,
    "progressive": False,
    "downsamplers": True,
}


def run(*arguments):
    """Exit code, output and errors of `python -m eval`, run in this process."""
    from eval.__main__ import main

    output, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["eval", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
    return exit_.value.code or 0, output.getvalue(), errors.getvalue()


def run_command(*arguments):
    """Output of a command, whose exit code must be 0."""
    code, output, errors = run(*arguments)
    assert code == 0, errors
    return output


def failed_command(*arguments):
    """Last line of errors of a command that ends with a sentence and exit code 2."""
    code, _, errors = run(*arguments)
    last = errors.strip().splitlines()[-1]
    assert (code, last[:6]) == (2, "eval: "), errors
    return last


@torch.no_grad()
def watched(pipe, inputs):
    """The noise that the UNet predicts, and input and output of each attn1, by hooks of our own."""
    calls = {}
    handles = [
        layer.attn.register_forward_hook(
            lambda attn, inputs, output, name=layer.name: calls.update({name: (inputs[0], output)})
        )
        for layer in select_layers(pipe.unet, (0, 1))
    ]
    output = pipe.unet(*inputs).sample
    for handle in handles:
        handle.remove()
    return output, calls


def noise(height, width, seed=0):
    """An image, as numbers and as Pillow's."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return values, Image.fromarray(values)


def protocol_config(**changes):
    """The configuration of a row of COCO."""
    return {**protocol.GENERATION, "size": 512, "scalecrafter": False, **changes}


def scenes_run(seed, fid=1.0, *, method="M4", clip_score=90.0, num_images=1, dtype="half"):
    """The content of a file of `scenes`."""
    figures = {"fid": fid, "clip_score": clip_score, "copy_agreement": 0.5}
    errors = {"clip_score_sem": 9.0, "copy_agreement_sem": 9.0}
    rows = [{"method": method, "num_images": num_images, **figures, **errors}]
    return {"first_seed": seed, "num_inference_steps": 25, "dtype": dtype, "rows": rows}


def score(pipe, methods, scenes, scorer, settings, finished=(), **options):
    """The rows of `score_methods`, of scenes that are their own reference."""
    shown = {"scenes": scenes, "reference_scenes": scenes, "calibration_prompts": CALIBRATION}
    trial = SceneTrial(methods=methods, settings=settings, **shown, **options)
    return list(score_methods(pipe, trial, scorer, dict(finished)))


def prepare(pipe, *names, levels=(0,)):
    """Methods by their names, calibrated."""
    loaded = load_methods(pipe, names, levels=levels)
    return [method.calibrated(pipe, CALIBRATION) for method in loaded]

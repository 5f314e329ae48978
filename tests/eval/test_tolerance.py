"""`eval tolerance`: prompts that are not probed, and the parts that count."""

import json

import pytest
from eval_helpers import run_command
from tiny import tiny_pipe

from avq_diffusers import AVQConfig, ErrorProfile
from avq_diffusers.hosts import measurement
from avq_diffusers.hosts.layers import LayerSpec
from avq_diffusers.hosts.profile import LayerErrors
from eval.quality import tolerance
from eval.quality.tolerance import held_out_errors, joined, sets_held, summarise


def test_a_tolerance_is_judged_by_its_parts_that_run_avq():
    """Catches exact parts that count, another part's choice, and errors of another size."""
    sizes, start = {"M4P0C0": 0.5, "M8P4C2": 0.7}, {1000: {}, 500: {}}

    def profile(coarse, fine):
        def layer(name, coarse, fine):
            errors = {"M4P0C0": coarse, "M8P4C2": fine}
            return LayerErrors(LayerSpec(name, 0, 2, 8), 64, sizes, dict.fromkeys(start, errors))

        return ErrorProfile(AVQConfig(), (layer("a", coarse, fine), layer("b", 9.0, 9.0)))

    others = [profile(0.5, error) for error in (0.1, 0.1, 0.2)]
    probes = profile(0.4, 0.08), profile(0.3, 0.09)
    assert joined(probes) == profile(0.4, 0.09)
    errors = held_out_errors(joined(probes), others, 0.1)
    assert errors == [[0.1, 0.1, 0.2]] * 2 + [[], []]
    assert summarise(errors, 0.1) == {
        "parts": 4,
        "avq_parts": 2,
        "largest_error": pytest.approx(0.4 / 3),
        "parts_over": 2,
        "prompts_over": pytest.approx(1 / 3),
    }
    assert summarise(errors, 0.2)["parts_over"] == summarise([[]], 0.1)["largest_error"] == 0
    # The two probes choose AVQ, with .15 on the others. All other pairs choose exact attention.
    assert sets_held([*probes, *others[1:]], 2, 0.1) == pytest.approx(5 / 6)


def test_the_tolerance_command_measures_prompts_that_were_not_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "LADDER", ("M4P2C2",))
    probed, real = [], tolerance.measure_error

    def measure(pipe, prompts, *rest, **arguments):
        probed.append(prompts)
        return real(pipe, prompts, *rest, **arguments)

    monkeypatch.setattr(tolerance, "measure_error", measure)
    tiny_pipe().save_pretrained(tmp_path / "model")
    arguments = ["--model", tmp_path / "model", "--probed", 2, "--prompts", 2, "--steps", 2]
    arguments += ["--tolerances", "0.001,9", "--output", tmp_path]
    run_command(monkeypatch, "tolerance", *arguments)
    exact, loose = json.loads((tmp_path / "tolerance_levels01.json").read_text())["rows"]
    assert (exact["avq_parts"], exact["psnr_median"]) == (0, None)
    assert loose["avq_parts"] == loose["parts"] > 0
    assert loose["psnr_median"] < 90
    assert [len(prompts) for prompts in probed] == [1] * 4
    assert len({*map(tuple, probed)}) == 4

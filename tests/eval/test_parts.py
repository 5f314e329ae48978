"""A run of `scenes` in parts: `--part`, and `pool`."""

import json
import re

import pytest
import torch
from test_eval import run_command
from test_method_table import quality, quality_row
from tiny import tiny_pipe
from typer.testing import CliRunner

from eval.__main__ import app
from eval.quality import methods, scene_runs, scenes
from eval.quality.samples import Sample, load_samples, save_samples


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny pipeline."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_pipe().save_pretrained(folder)
    return str(folder)


def test_parts_are_the_whole(model, tmp_path, monkeypatch):
    """Catches pictures that two parts share or none has, other noise, and figures of a part."""
    counts = ["--pictures", 5, "--steps", 1, "--first-seed", 3, "--methods", "tome,exact"]
    arguments = ["--model", model, "--output", tmp_path, *counts]
    run_command(monkeypatch, "scenes", *arguments)
    whole = json.loads((tmp_path / "scenes_levels0_seed3.json").read_text())
    assert not list(tmp_path.glob("*.safetensors"))
    files = []
    for part in ("2/2", "1/2"):
        run_command(monkeypatch, "scenes", *arguments, "--part", part)
        files.append(tmp_path / f"scenes_levels0_seed3_part{part.replace('/', 'of')}.json")
    run_command(monkeypatch, "pool", *files, "--output", tmp_path / "pooled.json")
    pooled = json.loads((tmp_path / "pooled.json").read_text())
    assert {name: pooled[name] for name in scene_runs.WHOLE} == {
        name: whole[name] for name in scene_runs.WHOLE
    }
    assert [run["part"] for run in pooled["runs"]] == ["2/2", "1/2"]
    for row, expected in zip(pooled["rows"], whole["rows"], strict=True):
        assert row.keys() == expected.keys()
        for name in row.keys() - {"seconds_per_picture"}:
            value = expected[name]
            if isinstance(value, float):
                # A batch of another size computes the last bits otherwise.
                value = pytest.approx(value, rel=1e-3, abs=1e-3)
            assert row[name] == value, name
    parts = [json.loads(path.read_text())["rows"] for path in files]
    assert [row["num_pictures"] for row in (*parts[0], *parts[1])] == [3] * 4 + [2] * 4


@pytest.mark.long
def test_a_part_goes_on(model, tmp_path, monkeypatch):
    """Catches a folder that is not there yet, samples that a second run of the part loses, rows
    whose samples were lost, and rows that stay without PSNR when exact attention comes later."""
    folder = tmp_path / "new"
    arguments = ["--model", model, "--output", folder, "--pictures", 4, "--steps", 1]
    arguments += ["--part", "1/1", "--methods"]
    run_command(monkeypatch, "scenes", *arguments, "tome")
    run_command(monkeypatch, "scenes", *arguments, "exact,tome", "--resume")
    run_command(monkeypatch, "scenes", *arguments, "tome", "--resume")
    path = folder / "scenes_levels0_part1of1.json"

    def pooled():
        run_command(monkeypatch, "pool", path, "--output", tmp_path / "pooled.json")
        rows = json.loads((tmp_path / "pooled.json").read_text())["rows"]
        return {row["method"]: row for row in rows}

    rows = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert len(rows) == 4
    assert rows["tome"]["psnr_median"] > 0
    assert pooled() == rows

    kept = load_samples(path.with_suffix(".safetensors"))
    save_samples(path.with_suffix(".safetensors"), {k: v for k, v in kept.items() if k != "tome"})
    run_command(monkeypatch, "scenes", *arguments, "exact,tome", "--resume")
    again = pooled()
    assert again.keys() == rows.keys()
    assert again["tome"]["fid"] == rows["tome"]["fid"]


def test_finished_rows_are_not_made_again(model, tmp_path, monkeypatch):
    """Catches a killed run that starts from nothing, as without parts no samples are kept, and
    codebooks that are calibrated for a row that is there."""
    arguments = ["--model", model, "--output", tmp_path, "--pictures", 2, "--steps", 1]
    arguments += ["--methods", "exact,M4P2C2"]
    run_command(monkeypatch, "scenes", *arguments)
    path = tmp_path / "scenes_levels0.json"
    rows = json.loads(path.read_text())["rows"]
    monkeypatch.setattr(scenes, "generate", lambda *_, **__: pytest.fail("drawn again"))
    monkeypatch.setattr(methods, "calibrate", lambda *_, **__: pytest.fail("calibrated again"))
    run_command(monkeypatch, "scenes", *arguments, "--resume")
    assert json.loads(path.read_text())["rows"] == rows


def test_a_run_goes_on_with_its_own_weights(model, tmp_path, monkeypatch):
    """Catches a model of the same name, or one that was trained on in its place."""
    other = tiny_pipe()
    other.unet.conv_in.bias.data += 1
    other.save_pretrained(tmp_path / "tiny")
    arguments = ["--output", tmp_path, "--pictures", 2, "--steps", 1, "--methods", "exact"]
    run_command(monkeypatch, "scenes", *arguments, "--model", model)
    refused = CliRunner().invoke(
        app, ["scenes", *map(str, arguments), "--model", str(tmp_path / "tiny"), "--resume"]
    )
    assert "the stored one differs in model_sha256" in str(refused.exception)


def test_a_seed_that_pytorch_cannot_take():
    """Catches an overflow after minutes of calibration."""
    refused = CliRunner().invoke(app, ["scenes", "--first-seed", str(2**63)])
    assert refused.exit_code == 2
    assert "Invalid value for '--first-seed'" in refused.output


def test_samples_that_cannot_be_written(tmp_path):
    path = tmp_path / "file" / "x.safetensors"
    path.parent.write_text("")
    with pytest.raises(OSError, match=f"{path} could not be written"):
        save_samples(path, {"exact": Sample(torch.zeros(3, 2))})


@pytest.mark.parametrize("part", ["0/2", "3/2", "1/5", "1/3", "1", "a/b", "-1/2", "1/2/3"])
def test_there_is_no_such_part(part):
    with pytest.raises(ValueError, match=f"K-th of N parts of 4 .*got '{part}'"):
        scene_runs.part_of(part, 4)


def test_parts_by_hand():
    assert [list(scene_runs.part_of(f"{k}/3", 7)) for k in (1, 2, 3)] == [[0, 1], [2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("parts", "changed", "message"),
    [
        (["1/3", "3/3"], {}, "all of its parts, each once, but these are 1/3, 3/3."),
        (["1/2", "2/2", "2/2"], {}, "each once, but these are 1/2, 2/2, 2/2."),
        (["1/2", "2/2"], {"first_seed": 1}, "differ in first_seed"),
        (["1/2", "2/2"], {"size": 512}, "differ in size"),
        (["1/2", "2/2"], {"batch": 3}, "differ in batch"),
        (["1/2", "2/2"], {"compiled": True}, "differ in compiled"),
        (["1/2", "2/2"], {"model_sha256": "b"}, "differ in model_sha256"),
        (["1/2", "2/2"], {"environment": {"device": "B"}}, "differ in device"),
        (["1/2", "2/2"], {"environment": {"device": "A", "torch": "3"}}, "differ in torch"),
        (["1/2", "2/2"], {"environment": {}}, "differ in device"),
        (["1/2", "2/2"], {"rows": [quality_row("M4", "M8")]}, "differ in the method M4"),
        (["1/2", "2/2"], {"samples": {}}, "a part has no sample of scenes of the reference"),
    ],
)
def test_parts_that_are_no_run(parts, changed, message):
    document = quality([quality_row("M4", "M4")], pictures=6)
    sample = Sample(torch.zeros(3, 2))
    samples = {scenes.REFERENCE: sample, "M4": sample}
    document["environment"] = {"device": "A", "commit": "a", "date": "b"}
    found = [({**document, "part": part}, samples) for part in parts]
    found[0] = ({**found[0][0], **changed}, changed.get("samples", samples))
    with pytest.raises(ValueError, match=re.escape(message)):
        scene_runs.pool_parts(found)


def test_parts_of_which_one_is_not_compared():
    """Catches a PSNR of some pictures that stands for all; commits may differ."""
    document = quality([quality_row("M4", "M4", psnr_median=30.0)], pictures=6)
    reference = {scenes.REFERENCE: Sample(torch.randn(3, 2))}
    compared = Sample(*map(torch.randn, ((3, 2), (3,), (3,), (3,))))
    parts = [
        ({**document, "part": f"{k}/2", "environment": {"commit": str(k)}}, reference | {"M4": x})
        for k, x in ((1, compared), (2, compared._replace(psnr=torch.empty(0))))
    ]
    with pytest.raises(ValueError, match="a part has not compared M4 with exact; go on with --res"):
        scene_runs.pool_parts(parts)
    parts[1][1]["M4"] = compared
    assert scene_runs.pool_parts(parts)[0]["num_pictures"] == 6


def test_a_pooled_row_has_the_mean_time_of_its_parts():
    """Catches the time of one part, and rows that a part lacks."""
    parts = []
    for part, seconds, names in (("1/2", 1.0, ("M4", "M5")), ("2/2", 3.0, ("M4", "M6"))):
        rows = [quality_row(name, name, seconds_per_picture=seconds) for name in names]
        sample = Sample(*map(torch.randn, ((2, 2), (2,), (2,))))
        document = quality(rows, pictures=4, part=part)
        parts.append((document, dict.fromkeys((scenes.REFERENCE, *names), sample)))
    (row,) = scene_runs.pool_parts(parts)
    assert (row["method"], row["seconds_per_picture"]) == ("M4", 2)


def test_files_that_are_no_parts(model, tmp_path, monkeypatch):
    """Catches a part that stands for a run, a run for a part, and samples of something else."""

    def refused(*arguments):
        return str(CliRunner().invoke(app, list(map(str, arguments))).exception)

    arguments = ["--model", model, "--output", tmp_path, "--pictures", 4, "--steps", 1]
    run_command(monkeypatch, "scenes", *arguments, "--methods", "exact", "--part", "1/1")
    whole, part = tmp_path / "scenes_levels0.json", tmp_path / "scenes_levels0_part1of1.json"
    document = json.loads(part.read_text())
    del document["part"]
    whole.write_text(json.dumps(document))
    samples = part.with_suffix(".safetensors")

    output = tmp_path / "x.json"
    is_part = f"{part} is a part of a run; join its parts by pool first."
    assert refused("merge", part, part, "--output", output) == is_part
    assert refused("table", part, "--output", tmp_path) == is_part
    message = refused("pool", whole, "--output", output)
    assert message == f"only parts of a run are pooled, but {whole} is a whole one."
    samples.write_bytes(samples.read_bytes()[:-9])
    message = refused("pool", part, "--output", output)
    assert message.startswith(f"{samples} does not hold the samples of scenes: ")
    samples.unlink()
    message = refused("pool", part, "--output", output)
    assert message == f"there is no file {samples}."
    assert not output.exists()

"""Faults on the real commands, a few of each kind, and proof that the checks can fail."""

import io
import json
import shutil
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from eval import fault_jobs, faults
from eval.__main__ import app
from eval.fault_damages import DAMAGES
from eval.fault_jobs import FORKED, PRELOADED, Job, prepare_jobs
from eval.faults import contents, disk_faults, kill_repeatedly

# The processes of one test run share one server, whoever starts it.
FORKED.set_forkserver_preload([*PRELOADED, "pytest", "scipy.linalg", "safetensors.torch"])

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def jobs(place):
    """Jobs by kind, each run once undisturbed."""
    kinds = ("calibration", "distillation", "generation")
    return {job.kind: job for job in prepare_jobs(place, kinds)}


def test_a_killed_command_ends_in_the_same_bytes(jobs, tmp_path):
    """Catches a half-written file under its final name, and a mixture of old and new codebooks."""
    row = kill_repeatedly(jobs["calibration"], tmp_path, 2, seed=time.time_ns())
    assert row["failures"] == []
    assert row["kills"] == 2
    assert row["finished"] >= 1
    assert row["seconds_undisturbed"] > 0.1


@pytest.mark.parametrize("kind", ["calibration", "generation"])
def test_full_and_read_only_disks_are_named_and_harmless(jobs, tmp_path, kind):
    """Catches an earlier result that is lost, a traceback, and a command that cannot go on."""
    rows = list(disk_faults(jobs[kind], tmp_path))
    assert faults.failures_of(rows) == []
    assert [row["fault"] for row in rows] == [
        "full disk, 0 KiB left",
        "full disk, 8 KiB left",
        "read-only folder",
    ]
    for row in rows[:2]:
        assert row["exit_code"] == 2
        assert "could not be written" in row["message"]
        assert "No space left" in row["message"] or "File too large" in row["message"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "damages", "messages"),
    [
        (
            "calibration",
            range(7),
            [
                *("not a whole", "not a whole", "does not hold the tensors", "must have shape"),
                *("does not hold the tensors", "holds NaN", "not a JSON file"),
            ],
        ),
        ("distillation", [2, 4], ["is not the file that was saved", "holds NaN"]),
        ("generation", [0], ["not a whole"]),
    ],
    ids=["calibration", "distillation", "generation"],
)
def test_damaged_files_are_refused(jobs, tmp_path, monkeypatch, kind, damages, messages):
    """Catches weights that are read as far as they go, of another step, or not looked at."""
    chosen = [DAMAGES[kind][number] for number in damages]
    monkeypatch.setitem(DAMAGES, kind, chosen)
    rows = list(faults.damage_faults(jobs[kind], tmp_path))
    assert faults.failures_of(rows) == []
    assert [row["exit_code"] for row in rows] == [2] * len(rows)
    for row, message in zip(rows, messages, strict=True):
        assert message in row["message"]


def test_a_sheet_that_could_not_be_drawn_is_drawn_later(jobs, tmp_path):
    """Catches a checkpoint that is saved before its sheet: a kill in between loses the sheet."""
    job, folder = jobs["distillation"], tmp_path / "run"
    job.earlier(folder)
    (sheet,) = (folder / "samples").glob("*10.png")
    sheet.unlink()
    obstacle = sheet.with_name(f".writing-{sheet.name}")
    obstacle.mkdir()
    code, output = job.start(folder).finish()
    assert code == 1
    assert f"error: {sheet} could not be written ([Errno 21] Is a directory" in output
    obstacle.rmdir()
    assert job.start(folder).finish()[0] == 0
    assert contents(folder) == contents(job.undisturbed)


# Commands that do it wrong


def half():
    """Writes a picture bit by bit."""
    folder, noise = Path(sys.argv[1]), io.BytesIO()
    folder.mkdir(exist_ok=True)
    Image.effect_noise((32, 32), 50).save(noise, format="png")
    with (folder / "0.png").open("wb") as file:
        for byte in range(0, len(noise.getvalue()), 40):
            file.write(noise.getvalue()[byte : byte + 40])
            file.flush()
            time.sleep(0.02)


def counting():
    """Leaves another result after a kill than without."""
    path = Path(sys.argv[1]) / "runs.txt"
    path.parent.mkdir(exist_ok=True)
    time.sleep(0.3)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    time.sleep(0.1)


def mixed():
    """Replaces two files that belong together, one long after the other."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / "one.txt").write_text("newer")
    (folder / "two.txt").write_text("old")
    time.sleep(0.3)
    (folder / "two.txt").write_text("newer")


def in_place():
    """Opens its earlier result for writing."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps({"rows": list(range(10_000))}))


@pytest.fixture
def careless_job(tmp_path, monkeypatch):
    """A job by the name of its function, run once undisturbed."""

    def make(name, earlier=lambda folder: folder.mkdir()):
        monkeypatch.setitem(fault_jobs.PROGRAMS, name, ("test_faults", name, f"{name}: "))
        job = Job("careless", name, (fault_jobs.FOLDER,), tmp_path / "undisturbed", earlier)
        assert job.start(job.undisturbed).finish()[0] == 0
        return job

    return make


@pytest.mark.parametrize(
    ("name", "kills", "complaint"),
    [("half", 4, "0.png is not whole"), ("counting", 2, "another result: runs.txt")],
)
def test_half_written_files_and_lost_state_are_found(
    careless_job, tmp_path, name, kills, complaint
):
    """Fails where kills come too late to hit anything, or nobody looks at what they left."""
    row = kill_repeatedly(careless_job(name), tmp_path, kills, seed=0)
    assert any(complaint in text for text in row["failures"]), row


def test_a_mixture_of_two_results_is_found(careless_job, tmp_path):
    """Fails where every file for itself is compared to either result."""

    def earlier(folder):
        folder.mkdir()
        for file in ("one.txt", "two.txt"):
            (folder / file).write_text("old")

    job = careless_job("mixed", earlier)
    row = kill_repeatedly(job, tmp_path, 4, seed=0)
    assert any("after kill" in text and "two.txt" in text for text in row["failures"]), row


def test_results_that_are_lost_are_found(careless_job, tmp_path):
    """Fails where a traceback passes for a message, or an earlier result is not compared."""

    def earlier(folder):
        folder.mkdir()
        (folder / "result.json").write_text('{"rows": []}')

    job = careless_job("in_place", earlier)
    full, *_ = disk_faults(job, tmp_path)
    assert full["exit_code"] == 1
    assert "exit code 1 and not 2" in full["failures"]
    assert "not an error of one line" in full["failures"]
    assert any("half-written: result.json is not whole" in text for text in full["failures"])
    assert any("what was there has changed: result.json" in text for text in full["failures"])
    table = faults.faults_table([], [full])
    assert "| exit code 1 and not 2; " in table


def test_contents_knows_what_is_whole(jobs, tmp_path):
    """Catches readers that stop at the header, and a cut line of a log taken for a whole one."""
    shutil.copytree(jobs["distillation"].undisturbed, tmp_path / "run")
    before, damaged = contents(tmp_path / "run")
    assert damaged == []
    (picture,) = (tmp_path / "run" / "samples").glob("*10.png")
    (weights,) = (tmp_path / "run" / "codebooks").glob("*.safetensors")
    for path in (picture, weights, tmp_path / "run" / "codebooks" / "config.json"):
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        _, damaged = contents(tmp_path / "run")
        assert [text.split(" is ")[0] for text in damaged] == [
            str(path.relative_to(tmp_path / "run"))
        ]
        path.write_bytes(content)
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    assert contents(tmp_path / "run") == (before, [])


def test_the_command_counts_failures(tmp_path, monkeypatch):
    """Catches a command that writes its file and hides what went wrong."""
    killed = [{"job": "a", "kills": 1, "kills_with_progress": 1, "kills_while_writing": 0}]
    killed[0] |= {"finished": 1, "failures": ["after kill 1: x.png is not whole"]}
    skipped = [{"job": "a", "fault": "read-only folder", "skipped": "why"}]
    monkeypatch.setattr(faults, "run_faults", lambda *_, **__: (killed, skipped))
    monkeypatch.setattr(sys, "argv", ["eval", "faults"])
    result = CliRunner().invoke(app, ["faults", "--kills", "1", "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "failure: a, kills: after kill 1: x.png is not whole" in result.stderr
    assert "| a | read-only folder | - | skipped |" in result.stdout
    document = json.loads((tmp_path / "faults_cpu.json").read_text())
    assert document["num_failures"] == 1
    assert document["command"].startswith("python -m eval faults")
    with pytest.raises(ValueError, match=r"--jobs must be some of calibration, .* but got 'x'"):
        prepare_jobs(tmp_path, ["x"])

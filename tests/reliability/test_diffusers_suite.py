"""The command that runs diffusers' own tests with AVQ, on a stand-in for its checkout."""

import json
import subprocess
import sys

import pytest
from typer import Typer
from typer.testing import CliRunner

from eval.diffusers_suite import EXPECTED, compare, diffusers_suite, same_error, summary

TESTS = """
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from transformers import CLIPTextModel, CLIPTokenizer


def build():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


@torch.no_grad()
def predict(unet):
    generator = torch.Generator().manual_seed(1)
    sample = 9 * torch.randn(3, 4, 8, 8, generator=generator)
    return unet(sample, 1, torch.ones(3, 2, 8)).sample


def processors(unet):
    return {type(x.processor).__name__ for x in unet.modules() if isinstance(x, Attention)}


class TestTiny:
    def test_attention_is_exact(self):
        unet = build()
        predicted = predict(unet)
        unet.set_attn_processor(AttnProcessor2_0())
        torch.testing.assert_close(predicted, predict(unet), atol=1e-5, rtol=1e-5)

    def test_saves(self, tmp_path):
        build().save_pretrained(tmp_path)
        unet = UNet2DConditionModel.from_pretrained(tmp_path)
        unet.set_default_attn_processor()
        torch.testing.assert_close(predict(unet), predict(build()), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("size", [8])
    def test_knows_its_processors(self, size):
        assert processors(build()) == {"AttnProcessor2_0"}

    def test_hub(self):
        tokenizer = CLIPTokenizer.from_pretrained("hf-internal-testing/tiny-random-clip")
        encoder = CLIPTextModel.from_pretrained("peft-internal-testing/tiny-clip-text-2")
        ids = tokenizer("a red fox", return_tensors="pt").input_ids
        assert encoder(ids).last_hidden_state.shape == (1, ids.shape[1], 32)
        assert encoder.config.vocab_size > ids.max()

    def test_stored_numbers(self):
        assert predict(build()).std().item() < 0.001

    def test_fails_in_two_ways(self):
        raise ValueError(" and ".join(sorted(processors(build()))))

    def test_skips(self):
        pytest.skip("no reason")
"""
PREFIX = "tests/test_tiny.py::TestTiny::test_"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_tiny.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def command(checkout, tmp_path_factory):
    """Run the command; the outcomes of test files stay from one run to the next."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("GIT_COMMIT", "one")  # outcomes of another commit would be refused
    kept = tmp_path_factory.mktemp("kept")

    def run(*arguments):
        app = Typer()
        app.command()(diffusers_suite)
        options = ["--checkout", checkout, "--tests", "tests/*.py", "--jobs", 2]
        options += ["--folder", kept / "suite", "--output", kept, *arguments]
        return CliRunner().invoke(app, list(map(str, options)))

    run.folder = kept
    yield run
    monkeypatch.undo()


@pytest.fixture(scope="module")
def first_run(command):
    return command()


@pytest.fixture(scope="module")
def result(first_run, command):
    return json.loads((command.folder / "diffusers_suite_cpu.json").read_text())


@pytest.mark.long
class TestCommand:
    def test_counts(self, result):
        """Catches a run without AVQ, and one whose AVQ is not exact."""
        assert result["totals"] == {
            "plain": {"passed": 4, "failed": 2, "skipped": 1},
            "avq": {"passed": 3, "failed": 3, "skipped": 1},
        }
        # Four layers in each prediction, of which four have AVQ and one diffusers' processor.
        assert result["calls"] == {"AVQ": 16}
        assert result["files"] == [
            {"file": "tests/test_tiny.py", **result["totals"], "calls": {"AVQ": 16}}
        ]

    def test_differences(self, result):
        (new,) = result["new_failures"]
        assert new["test"] == PREFIX + "knows_its_processors[8]"
        assert new["plain"] == "passed"
        assert new["avq"].startswith("failed: AssertionError")
        assert "Extra items in the left set: 'AVQProcessor'" in new["avq"]
        (changed,) = result["changed_failures"]
        assert changed["test"] == PREFIX + "fails_in_two_ways"
        assert changed["plain"] == "failed: ValueError: AttnProcessor2_0"
        assert changed["avq"] == "failed: ValueError: AVQProcessor and AttnProcessor2_0"

    def test_says_what_was_tested(self, result):
        assert result["suite"]["diffusers"] == result["environment"]["diffusers"]
        assert result["suite"]["tests_commit"] == "unknown"
        assert result["suite"]["commit"] == result["environment"]["commit"] == "one"

    def test_answer(self, first_run):
        assert first_run.exit_code == 1
        assert "| avq | 3 | 3 | 1 |" in first_run.output
        assert "Calls of AVQ layers: AVQ: 16" in first_run.output
        assert f"Fail only with AVQ: 1\n- {PREFIX}knows_its_processors[8]" in first_run.output

    def test_resumes(self, result, command):
        """Catches outcomes that are thrown away, and a file that is run anew."""
        kept = command.folder / "suite" / "plain" / "tests-test_tiny.json"
        outcomes = json.loads(kept.read_text())
        for name in ("knows_its_processors[8]", "fails_in_two_ways"):
            outcomes["tests"][PREFIX + name] = {"outcome": "skipped"}
        kept.write_text(json.dumps(outcomes))
        assert "| plain | 3 | 1 | 3 |" in command().output

    def test_other_settings(self, result, command):
        answer = command("--hub")
        assert isinstance(answer.exception, ValueError)
        assert "holds outcomes with hub False, not True" in str(answer.exception)

    def test_no_checkout(self, command, tmp_path):
        answer = command("--checkout", tmp_path)
        assert isinstance(answer.exception, ValueError)
        assert "must be a checkout of diffusers, but has no tests/*.py" in str(answer.exception)


class TestCompare:
    def folder(self, tmp_path, plain, avq, calls):
        for run, tests in (("plain", plain), ("avq", avq)):
            (tmp_path / run).mkdir()
            content = {"tests": {x: {"outcome": y} for x, y in tests.items()}, "calls": calls}
            (tmp_path / run / "tests-a.json").write_text(json.dumps(content))
        return tmp_path

    def test_unfinished(self, tmp_path):
        """Catches a crash of the process that hides the tests it did not come to."""
        folder = self.folder(tmp_path, {"a::b": "passed", "a::c": "skipped"}, {}, {})
        result = compare(folder, ["tests/a.py"])
        assert [x["test"] for x in result["new_failures"]] == ["a::b", "a::c"]
        assert "did not finish" in summary(result)

    def test_dead(self, tmp_path):
        """Catches a process that dies in both runs and so looks like a file without tests."""
        folder = self.folder(tmp_path, {}, {}, {})
        for run in ("plain", "avq"):
            dead = {"tests": {}, "calls": {}, "exit": -9}
            (folder / run / "tests-a.json").write_text(json.dumps(dead))
        result = compare(folder, ["tests/a.py"])
        assert result["dead_files"] == [
            {"file": "tests/a.py", "plain": "exit -9", "avq": "exit -9"}
        ]
        assert "Files whose process died: 1\n- tests/a.py\n  - plain: exit -9" in summary(result)

    def test_expected(self, tmp_path):
        """Catches a reason that excuses another error of the same test."""
        (text, reason), *_ = EXPECTED.items()
        folder = self.folder(tmp_path, {"a::b": "passed", "a::c": "passed"}, {}, {})
        failed = [{"outcome": "failed", "error": x} for x in (f"AssertionError: {text}.", "other")]
        content = {"tests": dict(zip(("a::b", "a::c"), failed, strict=True)), "calls": {}}
        (folder / "avq" / "tests-a.json").write_text(json.dumps(content))
        result = compare(folder, ["tests/a.py"])
        assert [x["test"] for x in result["new_failures"]] == ["a::c"]
        (expected,) = result["expected_failures"]
        assert (expected["test"], expected["reason"]) == ("a::b", reason)
        assert reason in summary(result)

    def test_hidden(self, tmp_path):
        """Catches a test that AVQ makes skip; one that it makes pass is no failure."""
        plain = {"a::b": "passed", "a::c": "skipped"}
        avq = {"a::b": "skipped", "a::c": "passed"}
        result = compare(self.folder(tmp_path, plain, avq, {"AVQ": 2}), ["tests/a.py"])
        assert [x["test"] for x in result["new_failures"]] == ["a::b"]


@pytest.mark.long
def test_a_file_whose_process_died_runs_again(tmp_path, monkeypatch):
    """Catches a crash that counts as done, and one that ends with code 0."""
    monkeypatch.setenv("GIT_COMMIT", "one")
    file = tmp_path / "tests" / "test_dies.py"
    file.parent.mkdir()
    file.write_text("import os\nos._exit(9)\n")
    app = Typer()
    app.command()(diffusers_suite)
    options = ["--checkout", tmp_path, "--tests", "tests/*.py", "--folder", tmp_path / "kept"]
    options = list(map(str, [*options, "--output", tmp_path]))
    answer = CliRunner().invoke(app, options)
    assert answer.exit_code == 1
    assert "Files whose process died: 1\n- tests/test_dies.py\n  - plain: exit 9" in answer.output

    file.write_text("def test_passes():\n    pass\n")
    answer = CliRunner().invoke(app, options)
    assert "Files whose process died: 0" in answer.output
    assert "| avq | 1 | 0 | 0 |" in answer.output


@pytest.mark.long
def test_a_session_that_breaks_off_is_not_done(tmp_path, monkeypatch):
    """Catches outcomes of the tests before an error of pytest's own that count as all."""
    monkeypatch.setenv("GIT_COMMIT", "one")
    file = tmp_path / "tests" / "test_some.py"
    file.parent.mkdir()
    file.write_text("def test_one():\n    pass\n\ndef test_two():\n    pass\n")
    (tmp_path / "tests" / "conftest.py").write_text(
        "def pytest_runtest_logstart(nodeid): assert 'two' not in nodeid\n"
    )
    app = Typer()
    app.command()(diffusers_suite)
    options = ["--checkout", tmp_path, "--tests", "tests/test_*.py", "--folder", tmp_path / "kept"]
    answer = CliRunner().invoke(app, list(map(str, [*options, "--output", tmp_path])))
    assert "pytest did not finish tests/test_some.py" in str(answer.exception)
    assert not (tmp_path / "diffusers_suite_cpu.json").exists()


@pytest.mark.long
def test_a_process_that_dies_in_a_test(tmp_path, monkeypatch):
    """Catches other tests of the file that are lost, and a crash that is no failure."""
    monkeypatch.setenv("GIT_COMMIT", "one")
    file = tmp_path / "tests" / "test_dies.py"
    file.parent.mkdir()
    file.write_text(
        "import os\n\n"
        "def test_before():\n    pass\n\n"
        "def test_dies():\n    os._exit(9)\n\n"
        "def test_dies_with_avq():\n"
        "    from diffusers import UNet2DConditionModel\n"
        "    if UNet2DConditionModel.__init__.__code__.co_filename.endswith('_plugin.py'):\n"
        "        os.abort()\n\n"
        "def test_after():\n    pass\n"
    )
    app = Typer()
    app.command()(diffusers_suite)
    options = ["--checkout", tmp_path, "--tests", "tests/*.py", "--folder", tmp_path / "kept"]
    answer = CliRunner().invoke(app, list(map(str, [*options, "--output", tmp_path])))
    result = json.loads((tmp_path / "diffusers_suite_cpu.json").read_text())
    assert result["totals"] == {
        "plain": {"passed": 3, "failed": 1},
        "avq": {"passed": 2, "failed": 2},
    }
    (new,) = result["new_failures"]
    assert new["test"] == "tests/test_dies.py::test_dies_with_avq"
    assert new["avq"] == "failed: the process died: exit -6"
    assert result["changed_failures"] == result["dead_files"] == []
    assert answer.exit_code == 1


@pytest.mark.long
def test_the_program_ends_a_mistake_with_one_sentence(tmp_path):
    """Catches a traceback where the folder is no checkout."""
    command = [sys.executable, "-m", "eval.diffusers_suite", "--checkout", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"eval: {tmp_path} must be a checkout of diffusers, but has no tests/")


def test_results_that_cannot_be_written_are_refused_before_the_tests(command):
    """Catches hours of tests that end in nothing."""
    answer = command("--output", __file__)
    assert str(answer.exception) == f"--output must be a folder, but {__file__} is a file."


def test_same_error():
    """Catches a picture that changed behind an error that both runs have."""
    assert same_error("assert 0.51234 < 0.01", "assert 0.51240 < 0.01")
    assert same_error("array([0.2567 , 1])", "array([0.25671, 1])")
    assert same_error("array([0.25671,\\n 1, 2])", "array([0.2567, 1,\\n 2])")
    assert same_error("<Tensor at 0x7f381b396f10>", "<Tensor at 0x7f9e57b04740>")
    assert not same_error("assert 0.51234 < 0.01", "assert 0.516 < 0.01")
    assert not same_error("assert 0.5 < 0.01", "ValueError: 0.5 < 0.01")
    assert not same_error("2 tensors, 3 wanted", "2 tensors")

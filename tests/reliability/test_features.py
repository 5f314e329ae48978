"""The table of features: outcomes read from real pytest runs, columns kept, nothing claimed."""

import json
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from eval import features, full_size
from eval.features import (
    GROUPS,
    features_table,
    read_outcomes,
    run_features,
    run_tests,
)
from eval.full_size import FullSize, run_full_size

CPU = torch.device("cpu")
ENVIRONMENT = {"device": "H200", "torch": "2.11", "commit": "abc"}

CONFTEST = """
def pytest_collection_modifyitems(items):
    for item in items:
        device = "cuda" if "gpu" in item.keywords else "cpu"
        item.user_properties += [(device, mark.args[0]) for mark in item.iter_markers("feature")]
"""
TESTS = """
import pytest

@pytest.mark.feature("img2img")
@pytest.mark.parametrize("number", [1, 2])
def test_passes(number): pass

@pytest.mark.feature("inpainting")
def test_fails(): assert 0, "too dark"

@pytest.mark.feature("inpainting")
def test_works_in_part(): pass

@pytest.mark.feature("DeepCache")
def test_skips(): pytest.importorskip("a_package_of_nobody")

@pytest.mark.feature("every scheduler")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_skips_one(number):
    if number == 3: pytest.skip("two are enough")

@pytest.mark.gpu
@pytest.mark.feature("img2img")
@pytest.mark.feature("CUDA graphs")
def test_on_a_gpu(): pytest.skip("needs a CUDA device")

def test_without_a_feature(): assert 0
"""


@pytest.fixture(scope="module")
def tests(tmp_path_factory):
    """A folder of tests in place of this one."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    feature(name)\n")
    return folder


def cells(table):
    """Group, CPU and GPU of every line of a table."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}


def outcomes(**numbers):
    return {name: {"passed": n, "failed": 0, "skipped": 0, "reasons": []}
            for name, n in numbers.items()}  # fmt: skip


def test_every_feature_has_a_test():
    """Catches a marker that the table does not know, and a line of the table without a test."""
    found = Counter()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        if path != Path(__file__):
            found.update(re.findall(r'\bfeature\("([^"]+)"\)', path.read_text()))
    names = [name for group in GROUPS.values() for name in group]
    assert len(set(names)) == len(names)
    assert set(found) == set(names)


class TestRun:
    @pytest.fixture(autouse=True)
    def on_a_cpu(self, tests, monkeypatch):
        monkeypatch.setattr(features, "TESTS", tests)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def test_first(self, tmp_path):
        """Catches failures or skips counted as passes, and one device's tests as the other's."""
        assert not run_features(tmp_path, command="on a CPU")
        columns = json.loads((tmp_path / "features.json").read_text())["columns"]
        counts = {
            device: {
                name: (x["passed"], x["failed"], x["skipped"])
                for name, x in column["features"].items()
            }
            for device, column in columns.items()
        }
        assert counts == {
            "cpu": {
                "img2img": (2, 0, 0),
                "inpainting": (1, 1, 0),
                "DeepCache": (0, 0, 1),
                "every scheduler": (2, 0, 1),
            },
            "cuda": {"img2img": (0, 0, 1), "CUDA graphs": (0, 0, 1)},
        }
        assert "environment" not in columns["cuda"]
        assert columns["cpu"]["environment"]["torch"] == version("torch")
        text = (tmp_path / "features.md").read_text()
        assert re.search(r"- CPU, inpainting: test_fails: .*too dark", text)
        assert re.search(r"- CPU, DeepCache: test_skips: .*a_package_of_nobody", text)
        table = cells(text)
        assert table["Pipelines"] == ["img2img; **failed**: inpainting", "not run: img2img"]
        assert table["Sampling"] == ["every scheduler (2 of 3)", "-"]
        assert table["Other tools"] == ["not run: DeepCache", "-"]
        assert table["Compilation"] == ["-", "not run: CUDA graphs"]

    def test_again(self, tmp_path):
        """Catches a run on one device that loses, or takes over, what ran on the other."""
        on_a_gpu = {"environment": ENVIRONMENT, "features": outcomes(img2img=1)}
        full_size = {"rows": [{"model": "SD1.5", "dtype": "float32"}]}
        before = {"features": outcomes(upscaling=1), "full_size": full_size}
        path = tmp_path / "features.json"
        path.write_text(json.dumps({"columns": {"cpu": before, "cuda": on_a_gpu}}))
        run_features(tmp_path, command="on a CPU")
        columns = json.loads(path.read_text())["columns"]
        assert columns["cuda"]["environment"] == ENVIRONMENT
        table = cells((tmp_path / "features.md").read_text())
        assert table["feature"][1] == "GPU: 1 tests passed, H200, torch 2.11, abc"
        assert table["Pipelines"] == ["img2img; **failed**: inpainting", "img2img"]
        assert table["Compilation"][1] == "not run: CUDA graphs"
        assert table[features.FULL_SIZE][0] == "SD1.5 (float32)"

    def test_on_a_gpu(self, tests):
        assert run_tests(tests, "cuda")["cpu"] == {}

    def test_broken_tests(self, tmp_path, monkeypatch):
        """Catches a table of half the tests."""
        monkeypatch.setattr(features, "TESTS", tmp_path)
        (tmp_path / "test_other.py").write_text("import a_package_of_nobody")
        with pytest.raises(RuntimeError, match=r"pytest did not run all tests: exit code 2\."):
            run_features(tmp_path, command="")
        assert not (tmp_path / "features.json").exists()

    def test_no_tests(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"tests are those of a checkout, .* no .*none"):
            run_tests(tmp_path / "none", "cpu")

    def test_unknown_feature(self, tmp_path):
        case = '<testcase name="t"><properties><property name="cpu" value="{}"/></properties>'
        path = tmp_path / "junit.xml"
        path.write_text(f"<testsuite>{case.format('img2img')}</testcase></testsuite>")
        assert read_outcomes(path)["cpu"]["img2img"]["passed"] == 1
        path.write_text(f"<testsuite>{case.format('img3img')}</testcase></testsuite>")
        with pytest.raises(ValueError, match=r"those of GROUPS, but a test is for 'img3img'"):
            read_outcomes(path)


class TestTable:
    def test_only_what_passed(self):
        """Catches a feature that appears as working without a passing test."""
        columns = {"cpu": {"features": {}}, "cuda": {"features": {}}}
        table = features_table(columns)
        assert {cell for row in list(cells(table).values())[1:] for cell in row} == {"-"}
        assert "No test: text to image, img2img" in table

    def test_is_short(self):
        """A reader sees it at one glance."""
        columns = {
            name: {"features": outcomes(**{x: 1 for names in GROUPS.values() for x in names})}
            for name in ("cpu", "cuda")
        }
        assert len(features_table(columns).splitlines()) < 15


class TestFullSize:
    @pytest.fixture
    def small(self, monkeypatch):
        """SDXL's topology at a width that a test has time for, in place of SDXL."""
        config = full_size.MODELS["SDXL base"].config | {
            "block_out_channels": (32, 32, 64),
            "attention_head_dim": (2, 2, 4),
            "cross_attention_dim": 32,
            "transformer_layers_per_block": (1, 1, 2),
        }
        monkeypatch.setitem(full_size.MODELS, "small", FullSize((1, 2), config, torch.bfloat16))

    def test_step(self, small):
        """Catches memory that no layer has filled, and levels without AVQ."""
        row = run_full_size("small", CPU)
        assert "failed" not in row
        assert row["dtype"] == "bfloat16"
        assert row["layers"] == [
            {"level": 1, "tokens": 256, "runs": {"AVQ (torch backend)": 5}},
            {"level": 2, "tokens": 64, "runs": {"AVQ (torch backend)": 12}},
        ]
        assert 0.001 < row["difference_from_exact"] < 1

    def test_too_large(self, small, monkeypatch):
        monkeypatch.setattr(full_size, "_free_memory", lambda device: 2**20)
        row = run_full_size("small", CPU)
        assert re.fullmatch(r"needs \d+ GiB, 0 are free", row["not_run"])
        assert "layers" not in row

    def test_avq_that_does_not_run(self, small, monkeypatch):
        """Negative control: each check can fail."""
        monkeypatch.setattr(full_size, "apply_avq", lambda unet, codebooks, route: unet)
        row = run_full_size("small", CPU)
        assert row["failed"] == ["a layer did not run AVQ", "AVQ changed nothing"]

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("SD1.5", 859_520_964),
            ("SD 2.1", 865_910_724),
            ("SDXL base", 2_567_463_684),
            ("SDXL refiner", 2_259_526_660),
        ],
    )
    def test_number_of_parameters(self, name, parameters, monkeypatch):
        """Catches a configuration that is not the published model's."""
        monkeypatch.setattr(full_size, "_free_memory", lambda device: 0)
        assert run_full_size(name, CPU)["parameters"] == parameters

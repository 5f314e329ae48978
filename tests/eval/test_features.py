"""The table of features: no failure or skip counts as a pass, and nothing is claimed untested."""

import json
import re
from pathlib import Path

import pytest

from eval.support import features

RESULTS = Path(__file__).parents[2] / "eval" / "results"

JUNIT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="cpu" value="img2img"/></properties></testcase>
<testcase name="b"><properties><property name="cpu" value="inpainting"/></properties></testcase>
<testcase name="c"><properties><property name="cpu" value="inpainting"/></properties><failure/>
</testcase>
<testcase name="d"><properties><property name="cpu" value="AnimateDiff"/></properties><skipped/>
</testcase>
<testcase name="e"><properties><property name="cuda" value="CUDA graphs"/></properties></testcase>
<testcase name="f"/>
</testsuite></testsuites>"""


def test_every_feature_has_a_test():
    """Catches a marker that the table does not know, and a line of the table without a test."""
    tests = Path(__file__).parents[1]
    texts = [path.read_text() for path in tests.rglob("test_*.py")]
    marked = re.findall(r'\bfeature\("([^"]+)"\)', "".join(texts))
    marked += re.findall(r'"([\w. ]+ at full size)":', "".join(texts))
    # Tables of kinds and cases hold the names of their rows.
    hosts = "".join(path.read_text() for path in (tests / "hosts").glob("*.py"))
    known = {name for names in features.GROUPS.values() for name in names}
    marked += [name for name in known if f'"{name}"' in hosts]
    assert set(marked) == known


def save(path, **content):
    path.write_text(json.dumps(content))


def test_one_column_is_written_and_the_other_stays(tmp_path, monkeypatch):
    made = {"device": "a", "torch": "2", "commit": "c"}
    monkeypatch.setattr(features, "environment", lambda device: made)
    monkeypatch.setattr(features, "save_json", save)
    (tmp_path / "junit.xml").write_text(JUNIT)
    features.write_features(tmp_path / "junit.xml", tmp_path, "cuda")
    features.write_features(tmp_path / "junit.xml", tmp_path, "cpu")
    text = (tmp_path / "features.md").read_text()
    header, _, *rows = text[text.index("| feature ") :].splitlines()
    assert re.search(r"CPU: 2 tests passed, a, .*GPU: 1 tests passed, a, ", header)
    assert rows[0] == "| Pipelines | img2img; **failed**: inpainting; not run: AnimateDiff | - |"
    assert "| Compilation | - | CUDA graphs |" in rows


def test_unknown_features_are_refused(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT.replace("img2img", "img3img"))
    with pytest.raises(ValueError, match="those of GROUPS, but a test is for 'img3img'"):
        features.read_outcomes(tmp_path / "junit.xml")


def test_the_stored_table_is_that_of_the_stored_results():
    columns = json.loads((RESULTS / "features.json").read_text())["columns"]
    assert (RESULTS / "features.md").read_text() == features.features_table(columns) + "\n"

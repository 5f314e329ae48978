"""The table of models: nothing is claimed that no test has run, and it is what the code says."""

import json
from pathlib import Path

import pytest
from hosts.kinds import KINDS
from tiny_transformers import FLUX3, ROWS

from eval.support import models

pytestmark = pytest.mark.skipif(not FLUX3, reason="the table is of diffusers 0.42")
RESULTS = Path(__file__).parents[2] / "eval" / "results"
STORED = json.loads((RESULTS / "models.json").read_text())


def test_the_stored_table_is_that_of_the_stored_results():
    assert (RESULTS / "models.md").read_text() == models.models_table(STORED) + "\n"


def test_every_served_class_has_a_row():
    """Catches an adapter's row that no model has run, and a class that is both served and not."""
    tested = {*ROWS, "QwenImage21Transformer2DModel"}
    assert {name for name in models.SERVED if "UNet" not in name} <= tested
    assert not models.NOT_SERVED.keys() & models.BUT_FOR.keys()
    assert models.BUT_FOR.keys() <= models.SERVED


@pytest.mark.long
def test_the_installed_diffusers():
    """Catches a class that is new in diffusers, and a row without its model in the contract."""
    tested = {type(kind.model).__name__ for kind in KINDS if kind.part}
    assert models.SERVED - tested == {"QwenImage21Transformer2DModel", "UNetMotionModel"}
    found = models.found()
    if found["diffusers"] == STORED["diffusers"]:
        assert found == {name: STORED[name] for name in found}

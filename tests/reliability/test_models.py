"""The table of models: nothing is claimed that no test has run, and it is what the code says."""

import json

import models
import pytest
from hosts.kinds import KINDS
from tiny_transformers import FLUX3

from avq_diffusers.hosts.models.grids import FAMILIES

pytestmark = pytest.mark.skipif(not FLUX3, reason="the table is of diffusers 0.42")
CONTROLNETS = {"FluxControlNetModel", "QwenImageControlNetModel"}
STORED = json.loads((models.RESULTS / "models.json").read_text())


def test_the_stored_table_is_that_of_the_stored_results():
    assert (models.RESULTS / "models.md").read_text() == models.models_table(STORED) + "\n"


def test_every_family_has_a_row():
    """Catches an adapter's row that no model has run."""
    names = {name for family in FAMILIES for name in family.models}
    assert names - CONTROLNETS <= models.ROWS
    assert not models.NOT_SERVED.keys() & models.BUT_FOR.keys()
    assert models.BUT_FOR.keys() <= models.ROWS


@pytest.mark.long
def test_the_installed_diffusers():
    """Catches a class that is new in diffusers, and a row without its model in the contract."""
    tested = {type(kind.model).__name__ for kind in KINDS if kind.part}
    assert models.ROWS - tested == {"QwenImage21Transformer2DModel", "UNetMotionModel"}
    found = models.found()
    if found["diffusers"] == STORED["diffusers"]:
        assert found == {name: STORED[name] for name in found}

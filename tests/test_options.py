"""What the programs share before they read an option."""

import logging
import os

import pytest

from avq_diffusers.options import hide_torchvision_notes, restore_threads


def test_only_notes_of_torchvision_are_hidden(monkeypatch):
    logger, seen = logging.getLogger("transformers.utils.import_utils"), []
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "callHandlers", lambda record: seen.append(record.getMessage()))
    hide_torchvision_notes()
    for message in ("`CLIPImageProcessor` requires torchvision (not installed)", "another note"):
        logger.error(message)
    assert seen == ["another note"]


@pytest.mark.parametrize("launched", [True, False])
def test_accelerates_single_thread_is_not_kept(monkeypatch, launched):
    """Catches a single process on one of many cores, and a user's own number that is lost."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    if launched:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    restore_threads()
    assert ("OMP_NUM_THREADS" in os.environ) != launched

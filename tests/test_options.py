"""What the programs share before they read an option."""

import logging
import os
from pathlib import Path

import pytest

from avq_diffusers.options import (
    check_writable,
    hide_torchvision_notes,
    numbers_of,
    read_prompts,
    restore_threads,
    tolerances_of,
)


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


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that root cannot write in")
def test_a_read_only_folder_is_refused():
    """Catches minutes of work that end in nothing, also root's, which may write by the mode."""
    with pytest.raises(ValueError, match="--out: the folder /proc is not writable"):
        check_writable("--out", Path("/proc/new/codebooks"))


def test_prompts_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"--prompts .* cannot be read"):
        read_prompts("--prompts", tmp_path)


@pytest.mark.parametrize("text", ["\u0663", "1,\u0663", 5000 * "9"])
def test_numbers_are_ascii_and_short(text):
    assert numbers_of("--levels", "0, 12") == (0, 12)
    with pytest.raises(ValueError, match="--levels must be numbers such as 0 or 0,1"):
        numbers_of("--levels", text)


def test_tolerances():
    assert tolerances_of("--tolerances", "0.05,.5") == (0.05, 0.5)
    for text, message in (
        ("0.1,", "--tolerances must be numbers such as 0.1 or 0.05,0.1, but got '0.1,'"),
        ("0.1,-1", "--tolerances must be above 0 and at most 0.5, where 0.02 is 2 %, but got -1.0"),
        ("nan", "--tolerances must be above 0 and at most 0.5, where 0.02 is 2 %, but got nan"),
        ("2", "0.02 is 2 %, but got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            tolerances_of("--tolerances", text)

"""Fixtures of the tests of distillation."""

from pathlib import Path

import datasets
import pytest
from tiny import tiny_pipe
from tiny_training import trained_unet
from toy_data import SAMPLES_PER_SHARD

from distill.data import cache


@pytest.fixture
def no_traces(tmp_path, monkeypatch):
    """A cache of `datasets` of the test's own, and small shards."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".datasets"))
    monkeypatch.setattr(cache, "SHARD", SAMPLES_PER_SHARD)
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a saved pipeline with self-attention at levels 0 and 1 only."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_pipe(trained_unet()).save_pretrained(folder)
    return folder

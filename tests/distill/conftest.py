"""Fixtures of the tests of distillation."""

import datasets
import pytest

from distill.data import cache

SAMPLES_PER_SHARD = 8


@pytest.fixture
def no_traces(tmp_path, monkeypatch):
    """A cache of `datasets` of the test's own, and small shards."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".datasets"))
    monkeypatch.setattr(cache, "SHARD", SAMPLES_PER_SHARD)
    datasets.disable_progress_bars()

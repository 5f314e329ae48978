"""Likeness to exact attention: `python -m eval compare`."""

from dataclasses import replace

import numpy as np
import pytest
from eval_helpers import CALIBRATION
from tiny import three_level_pipe

from eval.methods.registry import EXACT, NO_ATTENTION
from eval.quality import compare, metrics
from eval.quality.generation import Sampling, generate


def test_compare_measures_against_exact_at_equal_prompts_and_seeds(tmp_path):
    """Fails for a pairing of prompts and seeds that differs between methods, or from its order."""
    pipe = three_level_pipe()
    prompts, seeds, methods = ["a", "bb"], range(2), ("M4P2C2", NO_ATTENTION)
    settings = Sampling(num_inference_steps=2)
    rows, images = compare.compare(
        pipe, methods, prompts, seeds, settings, calibration_prompts=CALIBRATION
    )
    assert list(images) == [EXACT, *methods]
    expected = generate(pipe, ["a", "bb", "a", "bb"], [0, 0, 1, 1], settings)
    assert np.array_equal(images[EXACT], expected)
    for row, method in zip(rows, methods, strict=True):
        assert row["method"] == method
        values = metrics.psnr(images[method], expected)
        assert row["psnr"] == pytest.approx(values.tolist())
        assert row["psnr_median"] == pytest.approx(np.median(values))
        assert row["psnr_p10"] == min(values)
        assert row["ssim"] == pytest.approx(metrics.ssim(images[method], expected).tolist())
        assert row["ssim_median"] == pytest.approx(np.median(row["ssim"]))
    table = compare.compare_table(rows).splitlines()
    assert [line.split("|")[1].strip() for line in table] == ["method", "---", *methods]
    assert [line.split("|")[2].strip() for line in table[2:]] == ["8", "-"]
    compare.compare_sheet(tmp_path / "sheet.png", images, prompts)
    assert (tmp_path / "sheet.png").stat().st_size > 1000


def test_compare_shows_what_scalecrafter_does():
    """Fails where both rows are drawn with it, or both without, or where methods are compared to
    the row without it."""
    pipe = three_level_pipe()
    settings = Sampling(num_inference_steps=2, size=256, is_dilated=True)
    (row,), images = compare.compare(
        pipe, [NO_ATTENTION], ["a"], range(1), settings, calibration_prompts=CALIBRATION
    )
    assert list(images) == [compare.UNDILATED, EXACT, NO_ATTENTION]
    for name in ("psnr", "ssim"):
        figures = getattr(metrics, name)(images[NO_ATTENTION], images[EXACT])
        assert row[name] == pytest.approx(figures.tolist())
    plain = generate(pipe, ["a"], [0], replace(settings, is_dilated=False))
    assert np.array_equal(images[compare.UNDILATED], plain)
    assert not np.array_equal(images[EXACT], plain)

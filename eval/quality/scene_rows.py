"""Rows of `scenes`: what they hold, and their tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.names import EXACT, method_cells
from eval.store.markdown import markdown_table, with_error

LIKENESS = ("fid_to_exact", "psnr_median", "psnr_p10")
METRICS = ("fid", "clip_score", "copy_agreement", *LIKENESS, "seconds_per_image")
# What `merge` adds: a figure less that of exact attention's images of equal noise.
LESS_EXACT = {name: f"{name}_less_exact" for name in ("fid", "clip_score", "copy_agreement")}
MEASURED = {f"{name}{end}" for name in (*METRICS, *LESS_EXACT.values()) for end in ("", "_sem")}
PROTOCOL = ("num_inference_steps", "dtype", "size", "scalecrafter")
# Older files lack some of these; what a file does not say is not compared.
MAKING = ("model", "model_sha256", "scorer", "scorer_sha256", "guidance_scale")
HEADER = ("FID", "FID to exact", "CLIP score", "copy agreement", "PSNR dB, median (p10)")
REAL = "real scenes"
BROKEN = "real scenes, copies broken"


def row_key(row: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The method and levels of a row; exact attention is the same at any levels."""
    levels = () if row["method"] == EXACT else tuple(row.get("levels") or ())
    return row["method"], levels


def scenes_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(
        ["method", "effective codewords", "levels", *HEADER],
        ([*_row_cells(row), *metric_cells(row)] for row in rows),
    )


def differences_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The differences in `LESS_EXACT` of merged rows, as a Markdown table."""
    fid, clip_score, copy_agreement = LESS_EXACT.values()
    return markdown_table(
        ["method", "effective codewords", "levels", "FID", "CLIP score", "copy agreement"],
        (
            [
                *_row_cells(row),
                _cell(row, fid, "+.3f"),
                _cell(row, clip_score, "+.3f"),
                _cell(row, copy_agreement, "+.4f"),
            ]
            for row in rows
            if row.get(fid) is not None
        ),
    )


def metric_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row under `HEADER`; ± is one standard error."""
    median = _cell(row, "psnr_median", ".1f")
    if row.get("psnr_p10") is not None:
        median += f" ({row['psnr_p10']:.1f})"
    return [
        _cell(row, "fid", ".3f"),
        _cell(row, "fid_to_exact", ".3f"),
        _cell(row, "clip_score", ".2f"),
        _cell(row, "copy_agreement", ".3f"),
        median,
    ]


def _row_cells(row: Mapping[str, Any]) -> list[str]:
    return [*method_cells(row), ", ".join(map(str, row_key(row)[1])) or "-"]


def _cell(row: Mapping[str, Any], name: str, form: str) -> str:
    return with_error(row.get(name), row.get(f"{name}_sem"), form)

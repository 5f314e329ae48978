"""What a rank moves and computes for a layer's attention under context parallelism: no measurement.

Ulysses exchanges queries, keys, values and outputs for heads; ring attention gathers all keys and
values. Run this module to print the table.
"""

from math import prod
from typing import NamedTuple

from avq_diffusers.attention.flops import forward_flops
from avq_diffusers.config import Spec
from eval.benchmarks.models import TRANSFORMER_COLUMNS
from eval.store.markdown import markdown_table

DEGREES = (1, 2, 4, 8)
BYTES = 2  # of a number in half precision
SPEC = Spec()


class Video(NamedTuple):
    """The sequence of a video transformer, and the heads of a layer."""

    title: str
    tokens: int
    heads: int
    head_dim: int = 128


VIDEOS = (Video("Wan 14B, 720p", 75600, 40), Video("MiniMax-H3", 104478, 56))


def moved_bytes(video: Video, degree: int, *, ring: bool = False) -> float:
    """Bytes that a rank receives in a layer."""
    tokens = video.tokens * (degree - 1) / degree
    parts = 2 if ring else 4 / degree
    return parts * tokens * video.heads * video.head_dim * BYTES


def operations(video: Video, degree: int, *, exact: bool) -> int:
    """Operations of a rank's heads; two per multiply-add, products only."""
    shape = 1, video.heads // degree, video.tokens, video.head_dim
    if exact:
        return 4 * prod(shape) * video.tokens
    further = round(TRANSFORMER_COLUMNS[0]) - SPEC.num_parents  # beside the parents
    return forward_flops(shape, video.tokens, further, SPEC)


def costs_table() -> str:
    """A row per video and degree."""
    header = ["video", "tokens", "degree", "Ulysses moves, GB", "ring moves, GB"]
    header += ["exact, TFLOP", "AVQ, TFLOP"]
    rows = [
        [
            video.title,
            f"{video.tokens}",
            f"{degree}",
            *(f"{moved_bytes(video, degree, ring=ring) / 1e9:.2f}" for ring in (False, True)),
            *(f"{operations(video, degree, exact=x) / 1e12:.3g}" for x in (True, False)),
        ]
        for video in VIDEOS
        for degree in DEGREES
    ]
    return markdown_table(header, rows)


if __name__ == "__main__":
    print(costs_table())

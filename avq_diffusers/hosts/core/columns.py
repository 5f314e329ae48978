"""The columns that a layer with a threshold needs: its time depends on them."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from avq_diffusers.config import Spec
from avq_diffusers.hosts.core.ranks import Ranks, agreed
from avq_diffusers.hosts.core.routing import Workload, next_power_of_two

USUAL_COLUMNS = 192  # until a layer's first call told, such as in compiled code
LAST_READING = 16  # calls after which the choice of attention stays, so that images repeat


def with_columns(spec: Spec, columns: int) -> tuple[Spec, int]:
    """Options of the paper's form, and a number of keys, that show about as many columns.

    Rounded up to two binary digits, so that few calls are measured.

    Args:
        spec: options with a threshold.
        columns: codewords and keys that a query tile attends to.
    """
    further = max(0, columns - spec.num_parents)
    refined = min(spec.most_refined, _rounded_up(-(-further // max(1, spec.num_children))))
    num_keys = _rounded_up(max(0, further - refined * spec.num_children))
    return spec.changed(num_refined=refined), num_keys


def _rounded_up(number: int) -> int:
    step = max(1, next_power_of_two(number) // 4)
    return -(-number // step) * step


@dataclass
class Needed:
    """The columns that a layer needs in calls of one kind, read rarely: that waits for the GPU.

    Attributes:
        kind: options and number of tokens; the paper's form needs no columns read.
        columns: codewords and keys of a query tile, on average, at the last reading.
        num_calls: earlier calls, counted as the next one begins.
        num_read: how many there were at the last reading.
        workloads: those of calls with these columns, by batch, dtype, device and ranks: making one
            takes the host longer than the rest of a layer's hooks.
    """

    kind: tuple[Spec, int] | None = None
    columns: int = USUAL_COLUMNS
    num_calls: int = 0
    num_read: int = 0
    workloads: dict[tuple[Any, ...], Workload] = field(default_factory=dict)

    def count(self, shown: Tensor | None, ranks: Ranks | None) -> None:
        """Count a call, and read its columns if it was the first or calls doubled since.

        Args:
            shown: `Attended.shown` of the last AVQ call; None if there was none.
            ranks: the ranks that run the layer together.
        """
        self.num_calls += 1
        if self.num_read < LAST_READING and self.num_calls >= max(1, 2 * self.num_read):
            self.columns = agreed(ranks, lambda: self._columns_of(shown))
            self.num_read = self.num_calls
            self.workloads.clear()

    def _columns_of(self, shown: Tensor | None) -> int:
        if shown is None:
            return self.columns
        return math.ceil(shown.sum(dim=-1, dtype=torch.float32).mean().item())

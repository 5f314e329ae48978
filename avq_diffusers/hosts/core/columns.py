"""The columns that a layer with a threshold needs: its time depends on them."""

import math
from dataclasses import dataclass

from torch import Tensor

from avq_diffusers.attention.tensors import mean_columns
from avq_diffusers.config import Spec
from avq_diffusers.hosts.core.ranks import Ranks, agreed
from avq_diffusers.hosts.core.routing import next_power_of_two

USUAL_COLUMNS = 192  # until a layer's first call told, such as in compiled code
LAST_READING = 16  # calls after which the choice of attention stays, so that images repeat


def rounded(columns: int) -> int:
    """To three binary digits, so that few numbers of columns are measured."""
    step = max(1, next_power_of_two(columns) // 8)
    return round(columns / step) * step


@dataclass
class Needed:
    """The columns that a layer needs in calls of one kind, read rarely: that waits for the GPU.

    Attributes:
        kind: options and number of tokens; the paper's form needs no columns read.
        columns: codewords and keys of a query tile, on average, at the last reading.
        num_calls: earlier calls, counted as the next one begins.
        num_read: how many there were at the last reading.
    """

    kind: tuple[Spec, int] | None = None
    columns: int = USUAL_COLUMNS
    num_calls: int = 0
    num_read: int = 0

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

    def _columns_of(self, shown: Tensor | None) -> int:
        return self.columns if shown is None else math.ceil(mean_columns(shown))

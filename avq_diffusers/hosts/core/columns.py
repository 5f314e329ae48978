"""The columns that a layer with a threshold needs: its time depends on them."""

import math
from dataclasses import dataclass

from torch import Tensor

from avq_diffusers.attention.tensors import mean_columns
from avq_diffusers.hosts.core.ranks import Ranks, agreed
from avq_diffusers.hosts.core.routing import next_power_of_two

USUAL_COLUMNS = 192  # until a layer's first call told, such as in compiled code
LAST_READING = 16  # calls after which the choice of attention stays, so that images repeat
MOST_KINDS = 16  # of calls, whose columns are remembered


def rounded(columns: int) -> int:
    """To three binary digits, so that few numbers of columns are measured."""
    step = max(1, next_power_of_two(columns) // 8)
    return round(columns / step) * step


@dataclass
class Needed:
    """The columns that a layer needs in calls with the same options and number of tokens, read
    rarely: that waits for the GPU.

    Attributes:
        has_begun: whether such a call has.
        shown: `Attended.shown` of the last AVQ call outside compiled code and CUDA graphs.
        columns: codewords and keys of a query tile, on average, at the last reading.
        num_calls: earlier calls, counted as the next one begins.
        num_read: how many there were at the last reading.
    """

    has_begun: bool = False
    shown: Tensor | None = None
    columns: int = USUAL_COLUMNS
    num_calls: int = 0
    num_read: int = 0

    def count(self, ranks: Ranks | None) -> None:
        """Count a call, and read its columns if it was the first or calls doubled since.

        Args:
            ranks: the ranks that run the layer together.
        """
        self.num_calls += 1
        if self.num_read < LAST_READING and self.num_calls >= max(1, 2 * self.num_read):
            self.columns = agreed(ranks, self._columns_shown)
            self.num_read = self.num_calls

    def _columns_shown(self) -> int:
        return self.columns if self.shown is None else math.ceil(mean_columns(self.shown))

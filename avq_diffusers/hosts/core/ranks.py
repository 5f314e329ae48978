"""The processes that run one model together, and the decisions that they share."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor

Decision = TypeVar("Decision")


class Joined(NamedTuple):
    """The order of a sequence joined from the shards of several ranks.

    Each rank concatenates its shard of the text and of the grid, so that text and grid alternate.

    Attributes:
        indices: (S,) where each token of one process's sequence is in the joined sequence.
        tokens: (S,) which token of one process's sequence each joined token is.
    """

    indices: Tensor
    tokens: Tensor


class Ranks(NamedTuple):
    """The ranks that run a model's calls together; each attends with a part of the heads.

    Attributes:
        group: the process group.
        degree: number of parts that the heads are split into.
        kind: the kind of parallelism, in words.
        has_shards: whether the tokens are split, too, and joined for attention.
    """

    group: Any
    degree: int
    kind: str
    has_shards: bool

    def __str__(self) -> str:
        return f"{self.kind}, degree {self.degree}"

    @property
    def is_first(self) -> bool:
        """Whether this process is the first rank, which decides."""
        return torch.distributed.get_rank(self.group) == 0

    def agree(self, decide: Callable[[], Decision]) -> Decision:
        """The decision of the first rank; all ranks must call this at the same time.

        Args:
            decide: makes the decision, with contents that can be pickled; only the first rank calls
                it.
        """
        found: list[Any] = [decide() if self.is_first else None]
        torch.distributed.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]


def agreed(ranks: Ranks | None, decide: Callable[[], Decision]) -> Decision:
    """`decide()`, by the first rank if there are several."""
    return decide() if ranks is None else ranks.agree(decide)


@lru_cache(maxsize=64)
def joined_order(
    num_beside: int, num_grid: int, beside_first: bool, degree: int, device: torch.device
) -> Joined:
    """How the shards of a grid and of other tokens beside it are joined.

    Args:
        num_beside, num_grid: tokens of each.
        beside_first: whether the others come before the grid.
        degree: number of ranks; sizes that do not divide are split as by `torch.tensor_split`.
        device: device of the order. This is a cached tensor: do not write to it.
    """
    sizes = (num_beside, num_grid) if beside_first else (num_grid, num_beside)

    def build() -> Joined:
        every = torch.arange(sum(sizes), device="cpu").split(sizes)
        shards = zip(*(part.tensor_split(degree) for part in every), strict=True)
        tokens = torch.cat([part for shard in shards for part in shard])
        return Joined(tokens.argsort().to(device), tokens.to(device))

    with ThreadPoolExecutor(max_workers=1) as worker:  # a cached tensor outlives inference mode
        return worker.submit(build).result()

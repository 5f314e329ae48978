"""ToMe-SD: tokens are merged before attention."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import Self

from eval.methods.avq import level_label
from eval.methods.base import UNET_IMAGES, UNET_STEP, Word

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

MOST = 0.75  # of each 2 x 2 tokens, one is kept


class ToMe(Word):
    """`tome` merges half of the tokens, `tome@.75` more, `tome@L01` at levels 0 and 1."""

    kind = example = "tome"
    places = (UNET_IMAGES, UNET_STEP)
    title = "ToMe r={:g}"
    takes_setting = takes_levels = True
    usual_setting, usual_levels = 0.5, (0,)  # tomesd's defaults

    @classmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> Self | None:
        found = super().parse(name, levels)
        if found is None:
            return None
        if not 0 < found.setting <= MOST:
            raise ValueError(
                f"tome merges a share above 0 and at most {MOST} of the tokens, but got {name!r}."
            )
        chosen = found.levels or levels
        if set(chosen) != set(range(len(chosen))):
            raise ValueError(
                f"tome merges tokens from level 0 on, leaving none out, but got levels {chosen}."
            )
        return found

    @property
    def label(self) -> str:
        is_usual = self.levels in (None, self.usual_levels)
        return super().label + ("" if is_usual else f", {level_label(self.levels)}")

    @property
    def scheme(self) -> str:
        return "ToMe"

    def check(self, weight: Tensor) -> None:
        if find_spec("tomesd") is None:
            raise ValueError("method tome needs the package tomesd: pip install tomesd.")

    def applied(self, pipe: Any) -> AbstractContextManager[None]:
        return merged_tokens(pipe.unet, self.levels, self.setting)


@contextmanager
def merged_tokens(
    unet: "UNet2DConditionModel", levels: tuple[int, ...], ratio: float
) -> Iterator[None]:
    """Run a UNet with ToMe-SD merging a share of the tokens, down to the last of these levels.

    Unlike tomesd's default, destinations are fixed: a step can then be captured in a graph, and an
    image does not depend on earlier ones.
    """
    import tomesd

    tomesd.apply_patch(unet, ratio=ratio, max_downsample=2 ** max(levels), use_rand=False)
    try:
        yield
    finally:
        tomesd.remove_patch(unet)

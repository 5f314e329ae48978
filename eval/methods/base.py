"""What every attention that is compared has: a name, a label, and ways to run."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from avq_diffusers import AVQConfig
from avq_diffusers.attention.tensors import Tensors

# Where attentions run.
UNET_IMAGES, TRANSFORMER_IMAGES, KEYS = "images by a UNet", "images by a transformer", "keys"
UNET_STEP, TRANSFORMER_STEP = "steps of a UNet", "steps of a transformer"
IMAGES, STEPS = (UNET_IMAGES, TRANSFORMER_IMAGES), (UNET_STEP, TRANSFORMER_STEP)
SETTING = re.compile(r"\d*\.?\d+")
AT_LEVELS = re.compile(r"L(\d+)")


@dataclass(frozen=True)
class AttentionMethod(ABC):
    """One attention that is compared, as its name says.

    Attributes:
        source: a word, a configuration or a folder.
        config: the configuration with all suffixes applied; None for words and folders.
        own: whether codewords come from the keys of each call.
        levels: levels in the suffix of a word.
        num_refined: refined parents in a folder's suffix.
        setting: a peer's density or threshold, or ToMe's share of merged tokens.
        kind: the word, or what configurations of its class have in common.
        example: an example name.
        places: where it runs.
        title: label in tables of times, with a placeholder for the setting.
        is_stored: whether codewords come from a codebook.
    """

    source: str
    config: AVQConfig | None = None
    own: bool = False
    levels: tuple[int, ...] | None = None
    num_refined: int | None = None
    setting: float | None = None

    kind: ClassVar[str]
    example: ClassVar[str]
    places: ClassVar[tuple[str, ...]]
    title: ClassVar[str] = ""
    is_stored: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> Self | None:
        """What the name says; None if it is another attention's.

        Raises:
            ValueError: the name is malformed.
        """

    @property
    def label(self) -> str:
        """What tables and plots print."""
        return self.title.format(self.setting)

    @property
    def scheme(self) -> str:
        """What the points of a curve share: how columns are made, but not how many."""
        return self.source

    def columns(self, num_tokens: int) -> int | None:
        """Means and keys that a query attends to; unknown (None) where a call says it."""
        return None

    def check(self, weight: Tensor) -> None:
        """Refuse what cannot run where a model with this weight does.

        Raises:
            ImportError, ValueError: it cannot.
        """
        return None


class Word(AttentionMethod):
    """An attention with a name of its own: `kind`, `kind@setting` or `kind@Llevels`."""

    takes_setting: ClassVar[bool] = False
    takes_levels: ClassVar[bool] = False
    usual_setting: ClassVar[float | None] = None

    @classmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> Self | None:
        word, is_longer, suffix = name.partition("@")
        if word != cls.kind:
            return None
        if form := AT_LEVELS.fullmatch(suffix):
            if not cls.takes_levels:
                raise ValueError(f"methods: {word} takes no levels, but got {name!r}.")
            return cls(word, levels=tuple(map(int, form[1])), setting=cls.usual_setting)
        if cls.takes_setting and SETTING.fullmatch(suffix):
            return cls(word, setting=float(suffix))
        needs_setting = cls.takes_setting and cls.usual_setting is None
        return None if is_longer or needs_setting else cls(word, setting=cls.usual_setting)

    def levels_of(self, levels: tuple[int, ...]) -> tuple[int, ...]:
        """The levels that it changes, where a command asks for these.

        Raises:
            ValueError: it cannot change these alone.
        """
        return levels

    def applied(self, pipe: Any, levels: tuple[int, ...]) -> AbstractContextManager[None]:
        """Run a pipeline's self-attention with it inside the `with` block, if `places` has images.

        Raises:
            NotImplementedError: it has none.
        """
        raise NotImplementedError(f"{self.kind} makes no images.")

    def on_keys(self, call: Tensors, *, timed: bool) -> Callable[[], Tensor]:
        """The function that computes a call, if `places` has keys.

        Raises:
            NotImplementedError: it has none.
        """
        raise NotImplementedError(f"{self.kind} takes no keys.")

"""What every attention that is compared has: a name, a label, and ways to run.

A name is parsed without a model. `loaded` reads what it needs for a pipeline, `calibrated` makes
missing codebooks, and `applied` runs it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from avq_diffusers import AVQConfig
from avq_diffusers.attention.tensors import Tensors
from eval.methods.running import network_of

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
        name: the name, with suffixes.
        source: a word, a configuration or a folder.
        config: the configuration with all suffixes applied; None for words and folders.
        own: whether codewords come from the keys of each call.
        levels: levels in the suffix of a word, or of a configuration; once loaded, the levels that
            it changes.
        num_refined: refined parents in a folder's suffix.
        setting: a peer's density or threshold, or ToMe's share of merged tokens.
        sha256: once loaded, digest of its folder.
        kind: the word, or what configurations of its class have in common.
        example: an example name.
        places: where it runs.
        title: label in tables of times, with a placeholder for the setting.
        origin: `"distilled"`, `"calibrated"` or `"own"`; None without codewords or LinFusion.
    """

    name: str
    source: str
    config: AVQConfig | None = None
    own: bool = False
    levels: tuple[int, ...] | None = None
    num_refined: int | None = None
    setting: float | None = None
    sha256: str | None = None

    kind: ClassVar[str]
    example: ClassVar[str]
    places: ClassVar[tuple[str, ...]]
    title: ClassVar[str] = ""
    origin: ClassVar[str | None] = None

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

    @abstractmethod
    def loaded(self, pipe: Any, levels: tuple[int, ...]) -> "AttentionMethod":
        """Itself for this pipeline, ready for `calibrated`; see `load_methods`."""

    def calibrated(self, pipe: Any, prompts: Sequence[str]) -> Self:
        """Itself with its codebooks, if it has any."""
        return self

    def applied(self, pipe: Any) -> AbstractContextManager[None]:
        """Run a pipeline's self-attention with it inside the `with` block, if `places` has images.

        Raises:
            NotImplementedError: it has none.
        """
        raise NotImplementedError(f"{self.kind} makes no images.")

    def facts(self) -> dict[str, Any]:
        """The method's fields in a row.

        `config` gives the sizes and form of the codewords and the layers kept exact, or
        `"LinFusion"`. Effective codewords, M0 + P C, are what a query attends to, the paper's cost,
        averaged over layers; None with a threshold, where they depend on the image. `fields`, if
        any, are non-default ones that change the computation and that `config` does not give.
        """
        return {
            "method": self.name,
            "config": None,
            "origin": self.origin,
            "sha256": self.sha256,
            "levels": list(self.levels),
            "effective_codewords": None,
        }


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
            return cls(name, word, levels=tuple(map(int, form[1])), setting=cls.usual_setting)
        if cls.takes_setting and SETTING.fullmatch(suffix):
            return cls(name, word, setting=float(suffix))
        needs_setting = cls.takes_setting and cls.usual_setting is None
        return None if is_longer or needs_setting else cls(name, word, setting=cls.usual_setting)

    def loaded(self, pipe: Any, levels: tuple[int, ...]) -> Self:
        self.check(next(network_of(pipe).parameters()))
        return replace(self, levels=self.levels or levels)

    def on_keys(self, call: Tensors, *, timed: bool) -> Callable[[], Tensor]:
        """The function that computes a call, if `places` has keys.

        Raises:
            NotImplementedError: it has none.
        """
        raise NotImplementedError(f"{self.kind} takes no keys.")

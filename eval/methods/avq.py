"""AVQ and flat VQ: a configuration string, with these suffixes before its `/`, in this order.

@L01                    levels 0 and 1 instead of --levels
-up_blocks.1            the layers of this block stay exact
@P8                     8 refined parents

`/means` in place of `/stored` takes cells and leaves from a codebook, and represents them by means.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from typing_extensions import Self

from avq_diffusers import AVQCodebooks, AVQConfig, calibrate, select_layers
from avq_diffusers.hosts import has_unet
from eval.methods.base import IMAGES, KEYS, STEPS, UNET_IMAGES, AttentionMethod
from eval.methods.running import avq_in

LEVELS = (0, 1)
USUAL, COMPUTATION = AVQConfig(), ("query_tile", "query_order", "key_norm")
CALIBRATION_SEED = 1_000_000_000  # its noise is shared with no image of a table
FORM = re.compile(r"(.+?)(?:@L(\d+))?(?:-([^\d@/][^@/]*))?(?:@P(\d+))?(/means|/stored)?")


@dataclass(frozen=True)
class AVQMethod(AttentionMethod):
    """What runs AVQ.

    Attributes:
        codebooks: calibrated or loaded ones; None without, and before.
    """

    codebooks: AVQCodebooks | None = None

    def applied(self, pipe: Any) -> AbstractContextManager[None]:
        return avq_in(pipe, self.codebooks or self.config, num_refined=self.num_refined)

    @property
    def layer_configs(self) -> list[AVQConfig]:
        """The layers' configurations; one for all without codebooks."""
        if self.codebooks is None:
            return [self.config]
        found = [self.codebooks.layer_config(name) for name in self.codebooks.layer_specs]
        if self.num_refined is None:
            return found
        return [config.changed(num_refined=self.num_refined) for config in found]

    def facts(self) -> dict[str, Any]:
        books, configs = self.codebooks, self.layer_configs
        config, own = self.config, self.own
        unusual: dict[str, Any] = {}
        if books is not None:
            config, own = books.avq_config, books.config["own_codewords"]
            values = {name: getattr(config, name) for name in COMPUTATION}
            unusual = {x: value for x, value in values.items() if value != getattr(USUAL, x)}
        labels = dict.fromkeys(config_label(each, own=own) for each in configs)
        effective = [each.columns for each in configs]
        return {
            **super().facts(),
            "config": ", ".join([*labels, *exact_labels(config)]),
            "effective_codewords": None if None in effective else mean(effective),
            **({"fields": unusual} if unusual else {}),
        }


class Configuration(AVQMethod):
    """A configuration; its subclasses are the ways to get codewords."""

    @classmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> "Configuration":
        source, digits, exact, refined, form = FORM.fullmatch(name).groups()
        config = AVQConfig.parse(
            source + ("/stored" if form == "/stored" else ""),
            levels=tuple(map(int, digits)) if digits else levels,
            exact=(exact,) if exact else (),
        )
        if refined is not None:
            config = replace(config, num_refined=int(refined))
        made = Stored if form else Own
        return made(name, source, config, own=form is None, levels=config.levels)

    def loaded(self, pipe: Any, levels: tuple[int, ...]) -> Self:
        if has_unet(pipe):
            select_layers(pipe.unet, self.config.levels, self.config.exact)
        return self

    @property
    def label(self) -> str:
        levels = []
        if self.config.levels != LEVELS:
            levels = [level_label(self.config.levels)]
        sizes = method_name(self.config, own=self.own)
        return ", ".join([sizes, *levels, *exact_labels(self.config)])

    @property
    def scheme(self) -> str:
        config = self.config
        parts = ["AVQ" if config.num_children else "flat VQ", "own" if self.own else "stored"]
        if not self.own and config.means:
            parts.append("mean keys")
        if config.threshold is not None:
            parts.append("threshold")
        return ", ".join(parts)


class Own(Configuration):
    """Codewords from the keys of each call."""

    kind, example = "own", "M64C8T1e-4, M64P16C8"
    places = (*IMAGES, *STEPS, KEYS)
    origin = "own"


class Stored(Configuration):
    """Codewords from a codebook, calibrated first."""

    kind, example = "stored", "M64P16C8/stored"
    places = (UNET_IMAGES, KEYS)
    origin = "calibrated"

    def calibrated(self, pipe: Any, prompts: Sequence[str]) -> Self:
        # With the default number of steps: codebooks do not depend on that of the images.
        codebooks = calibrate(pipe, prompts, self.config, seed=CALIBRATION_SEED)
        return replace(self, codebooks=codebooks.to(pipe.device))


def source_of(name: str) -> str:
    """The name without suffixes."""
    return FORM.fullmatch(name)[1]


def config_label(config: AVQConfig, *, own: bool = False) -> str:
    """Sizes and form of the codewords: `M64C8T1e-4`, `M64P16C8/stored` or `M64P16C8/means`."""
    return str(config) if own or not config.means else f"{config}/means"


def method_name(config: AVQConfig, *, own: bool = False) -> str:
    """`AVQ 64/16/8` or `VQ 256`, as in the paper's table, plus options the paper does not have."""
    sizes = [config.num_parents, config.num_refined, config.num_children]
    if config.num_children:
        name = f"AVQ {'/'.join(str(size) for size in sizes if size is not None)}"
    else:
        name = f"VQ {config.num_parents}"
    forms = []
    if config.threshold is not None:
        forms.append(f"threshold {str(config).rpartition('T')[2]}")
    if not own:
        forms.append("mean keys" if config.means else "stored codewords")
    return ", ".join([name, *forms])


def level_label(levels: tuple[int, ...]) -> str:
    """`level 0` or `levels 0 and 1`."""
    return f"level{'s' * (len(levels) > 1)} {' and '.join(map(str, levels))}"


def exact_labels(config: AVQConfig) -> list[str]:
    """Labels of the layers kept exact."""
    return [f"{name} exact" for name in config.exact]

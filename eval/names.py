"""Names of self-attention methods: their grammar, where they can run, and the labels of tables.

A name is a word, a configuration or a folder, with suffixes in this order:

    exact, value-projection, tome, fa2, cudnn, limit, linfusion
    tome@.75                ToMe, merging 0.75 of the tokens instead of half
    pooled@256              pooled blocks of neighbours, with the best 256 keys exact
    pisa@.15, pisa0@.15     PISA of first or zeroth order, with 0.15 of the blocks exact
    sol@1.3                 Sol-Attn with a threshold of 1.3
    M64C8T1e-4              a threshold, with codewords from the call's own keys
    M64P16C8, M192          the paper's sizes and flat VQ, to calibrate
    runs/m64/codebooks      a folder of codebooks or LinFusion layers
    @L01                    levels 0 and 1 instead of --levels (tome and configurations)
    -up_blocks.1            the layers of this block stay exact (configurations)
    @P8                     8 refined parents (configurations and codebooks)
    /fastest, /tuned        the default route, or changed projections
    /means                  mean keys in place of stored codewords
    /own, /own1             mean keys, with codewords from the call's own keys; with one update
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from avq_diffusers import AVQConfig
from avq_diffusers.config import sizes_of
from eval.store.markdown import figure

EXACT = "exact"
AVQ = "avq"  # `apply_avq(pipe)`, in `bench steps`
NO_ATTENTION = "value-projection"
TOME = "tome"
POOLED = "pooled"
PISA, PISA_ZEROTH, SOL = "pisa", "pisa0", "sol"
PEERS = (PISA, PISA_ZEROTH, SOL)
KEYS_ONLY = (POOLED, *PEERS)
FA2, CUDNN, LIMIT, LINFUSION = "fa2", "cudnn", "limit", "linfusion"
WORDS = (EXACT, NO_ATTENTION, TOME, FA2, CUDNN, LIMIT, LINFUSION)
FOLDER, STORED, OWN, FASTEST, TUNED = "folder", "stored", "own", "fastest", "tuned"
LINFUSION_CONFIG = "LinFusion"  # the `config` of its rows
WORD_FORM = re.compile(rf"({'|'.join(WORDS)})(?:@L(\d+))?")
SETTING_FORM = re.compile(rf"({'|'.join((TOME, POOLED, *PEERS))})@(\d*\.?\d+)")
CONFIG_FORM = re.compile(
    r"(.+?)(?:@L(\d+))?(?:-([^\d@/][^@/]*))?(?:@P(\d+))?(?:/(?:(fastest|tuned|means)|own(\d*)))?"
)
FOLDER_FORM = re.compile(r"(.+?)(?:@P(\d+))?")
PATH_SIGNS = "/\\"  # no configuration contains one
TOME_LEVELS, TOME_RATIO = (0,), 0.5  # tomesd's defaults
LEVELS = (0, 1)

# Where methods run.
UNET_IMAGES, TRANSFORMER_IMAGES, KEYS = "images by a UNet", "images by a transformer", "keys"
UNET_STEP, TRANSFORMER_STEP = "steps of a UNet", "steps of a transformer"
IMAGES, STEPS = (UNET_IMAGES, TRANSFORMER_IMAGES), (UNET_STEP, TRANSFORMER_STEP)


@dataclass(frozen=True)
class Kind:
    """What the methods of one kind have in common.

    Attributes:
        example: an example name.
        places: where they run.
        label: label in tables of times, with a placeholder for the setting.
    """

    example: str
    places: tuple[str, ...]
    label: str = ""


KINDS = {
    EXACT: Kind(EXACT, (*IMAGES, *STEPS, KEYS), "SDPA default"),
    NO_ATTENTION: Kind(NO_ATTENTION, (*IMAGES, KEYS)),
    TOME: Kind(TOME, (UNET_IMAGES, UNET_STEP), "ToMe r={:g}"),
    FA2: Kind(FA2, (), "FA2"),
    CUDNN: Kind(CUDNN, (), "cuDNN"),
    LIMIT: Kind(LIMIT, STEPS, "limit"),
    LINFUSION: Kind(LINFUSION, (UNET_STEP,), "LinFusion"),
    POOLED: Kind("pooled@256", (KEYS,)),
    PISA: Kind(
        "pisa@.15", (TRANSFORMER_IMAGES, TRANSFORMER_STEP, KEYS), "PISA, {:.0%} of the blocks"
    ),
    PISA_ZEROTH: Kind(
        "pisa0@.15", (TRANSFORMER_STEP, KEYS), "PISA, zeroth order, {:.0%} of the blocks"
    ),
    SOL: Kind("sol@1.3", (TRANSFORMER_STEP, KEYS), "Sol-Attn, threshold {:g}"),
    FOLDER: Kind("runs/m64/codebooks", (UNET_IMAGES, UNET_STEP)),
    STORED: Kind("M64P16C8", (UNET_IMAGES, KEYS)),
    OWN: Kind("M64C8T1e-4, M64P16C8/own", (*IMAGES, *STEPS, KEYS)),
    FASTEST: Kind("M64C8T1e-4/fastest", STEPS),
    TUNED: Kind("M64P16C8/tuned", ()),
}


@dataclass(frozen=True)
class MethodName:
    """A parsed name.

    Attributes:
        source: one of `WORDS` or `KEYS_ONLY`, a configuration or a folder.
        kind: its key in `KINDS`.
        config: the configuration with all suffixes applied; None for words and folders.
        own: whether codewords come from the keys of each call.
        levels: levels in tome's suffix.
        num_refined: refined parents in a folder's suffix.
        setting: a peer's density or threshold, exact keys of pooled blocks, tome's share of merged
            tokens.
    """

    source: str
    kind: str
    config: AVQConfig | None = None
    own: bool = False
    levels: tuple[int, ...] | None = None
    num_refined: int | None = None
    setting: float | None = None

    @property
    def route(self) -> str:
        """AVQ's route; `"fastest"` leaves layers exact where that is faster."""
        return "fastest" if self.kind == FASTEST else "always"

    @property
    def tuned(self) -> bool:
        """Whether projections change, as in distilled codebooks."""
        return self.kind == TUNED

    @property
    def is_stored(self) -> bool:
        """Whether codewords come from a codebook."""
        return self.kind == STORED


def parse_method(name: str, levels: tuple[int, ...]) -> MethodName:
    """Parse the name of a method; configurations without `@L` get `levels`.

    Raises:
        ValueError: the name is malformed, there is no such folder, or it is both a folder and a
            configuration.
    """
    if form := WORD_FORM.fullmatch(name):
        word, digits = form.groups()
        if digits and word != TOME:
            raise ValueError(f"methods: {word} takes no levels, but got {name!r}.")
        setting = TOME_RATIO if word == TOME else None
        return MethodName(word, word, levels=_levels_of(digits), setting=setting)
    if form := SETTING_FORM.fullmatch(name):
        return MethodName(form[1], form[1], setting=float(form[2]))
    folder, refined = FOLDER_FORM.fullmatch(name).groups()
    if Path(name).is_dir():
        folder, refined = name, None
    source, digits, exact, config_refined, way, updates = CONFIG_FORM.fullmatch(name).groups()
    try:
        own = updates is not None or ("threshold" in sizes_of(source) and way != "means")
        config = AVQConfig.parse(
            source,
            levels=_levels_of(digits) or levels,
            exact=(exact,) if exact else (),
            codewords="means" if own or way == "means" else "stored",
            num_updates=int(updates or 0),
        )
        if config_refined is not None:
            config = replace(config, num_refined=int(config_refined))
    except ValueError as error:
        if Path(folder).is_dir():
            number_refined = None if refined is None else int(refined)
            return MethodName(folder, FOLDER, num_refined=number_refined)
        if any(sign in source for sign in PATH_SIGNS):
            raise ValueError(f"methods: there is no folder {folder}.") from None
        raise ValueError(
            f"methods must be {', '.join(WORDS)}, folders of codebooks or of LinFusion layers, or "
            f"configurations such as M64C8T1e-4, M64P16C8, M64P16C8@L0, M64P16C8-up_blocks.2 or "
            f"M64P16C8@P8: {error}"
        ) from None
    if Path(folder).is_dir():
        raise ValueError(
            f"methods: {folder} is a configuration, but also a folder here; write ./{folder} for "
            "the folder."
        )
    kind = way if way in (FASTEST, TUNED) else OWN if own else STORED
    return MethodName(source, kind, config, own)


def check_place(name: str, place: str) -> None:
    """Refuse a method that does not run in one of the places of `KINDS`.

    Raises:
        ValueError: it does not run there, or there is no such method.
    """
    if place not in KINDS[parse_method(name, LEVELS).kind].places:
        known = [kind.example for kind in KINDS.values() if place in kind.places]
        raise ValueError(f"methods for {place} are {', '.join(known)}, but got {name!r}.")


def timed_method(name: str) -> MethodName:
    """Parse the name of a method for a step; default levels are 0 and 1, for tome its own.

    Raises:
        ValueError: see `parse_method`.
    """
    method = parse_method(name, LEVELS)
    return replace(method, levels=method.levels or TOME_LEVELS) if method.kind == TOME else method


def _levels_of(digits: str | None) -> tuple[int, ...] | None:
    return tuple(int(digit) for digit in digits) if digits else None


def config_label(config: AVQConfig, *, own: bool = False) -> str:
    """Sizes and form of the codewords: `M64C8T1e-4`, `M64P16C8`, `M64/means`, `M64P16C8/own1`."""
    if own and config.threshold is not None and not config.num_updates:
        return str(config)
    if own:
        return f"{config}/own{config.num_updates or ''}"
    return f"{config}/means" if config.codewords == "means" else str(config)


def codewords_form(label: str) -> str:
    """The form of the codewords in a `config_label`: `/own1`, `/means` or nothing."""
    found = re.search(r"/(own\d*|means)", label)
    return found[0] if found else ""


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
    elif own:
        forms.append("own codewords")
    if own and config.num_updates:
        forms.append(f"{config.num_updates} update{'s' * (config.num_updates > 1)}")
    elif not own and config.codewords == "means":
        forms.append("mean keys")
    return ", ".join([name, *forms])


def method_label(name: str) -> str:
    """What tables and plots print; an unknown name, as an older result may have, stays as it is."""
    try:
        method = timed_method(name)
    except ValueError:
        return name
    config = method.config
    if config is None:
        levels = _level_labels(method.levels, TOME_LEVELS) if method.kind == TOME else []
        return ", ".join([KINDS[method.kind].label.format(method.setting), *levels])
    ways = {FASTEST: ["fastest route"], TUNED: ["tuned projections"]}.get(method.kind, [])
    sizes = method_name(config, own=method.own)
    return ", ".join([sizes, *_level_labels(config.levels, LEVELS), *exact_labels(config), *ways])


def _level_labels(levels: tuple[int, ...], usual: tuple[int, ...]) -> list[str]:
    if levels == usual:
        return []
    return [f"level{'s' * (len(levels) > 1)} {' and '.join(map(str, levels))}"]


def exact_labels(config: AVQConfig) -> list[str]:
    """Labels of the layers kept exact."""
    return [f"{name} exact" for name in config.exact]


def row_label(row: Mapping[str, Any]) -> str:
    """The method, with its configuration if the name does not give it."""
    name, config = row["method"], row.get("config")
    return name if config in (None, name) else f"{name} ({config})"


METHOD_COLUMNS = {"method": row_label, "effective codewords": figure("effective_codewords")}

"""`Spec`: the options of an attention call. `AVQConfig`: these, and the layers that make it."""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, TypeVar

QUERY_ORDERS = ("gilbert", "raster", "random")
CODEWORDS = ("means", "stored")
LARGEST_TOLERANCE = 0.5  # a larger error leaves nothing of the output; 2 meant as percent is 0.02
LARGEST_COUNT = 2**31 - 1  # kernels index with 32 bits
MOST_CODEWORDS_PER_KEY = 16  # own codewords: more would mostly be unused, and fill memory
# `int` refuses thousands of digits.
_CONFIGURATION = re.compile(
    r"M(?P<num_parents>\d{1,18})(?:P(?P<num_refined>\d{1,18}))?(?:C(?P<num_children>\d{1,18}))?"
    r"(?:T(?P<threshold>(?:\d{1,18}(?:\.\d{0,20})?|\.\d{1,20})(?:e[+-]?\d{1,3})?|inf))?"
    r"(?P<stored>/stored)?",
    re.ASCII | re.IGNORECASE,
)
DEFAULT_THRESHOLD = 1e-4
SIZES = ("num_parents", "num_children")
RESOLUTIONS = ("threshold", "num_refined")  # exactly one decides

AnySpec = TypeVar("AnySpec", bound="Spec")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The options of an attention call; `str()` is the configuration string, such as `M64C8T1e-4`.

    Args:
        num_parents: parent codewords per head, M0.
        num_children: children per parent; 0 is flat VQ-attention.
        threshold: the attention's error that a further column must fix to be shown, at least 0: 0
            is exact attention, infinity flat VQ. 1e-4 if neither this nor `num_refined` is given.
        num_refined: in place of a threshold, parents refined per query tile, the paper's P; at most
            `num_parents`.
        codewords: what represents the keys of a leaf or cell: `"means"` is their mean in each call,
            `"stored"` the codeword of a codebook, the paper's form, without a threshold.
        query_tile: number of consecutive queries (in the query order) that share one choice of
            columns.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or two of them contradict each other.
    """

    num_parents: int = 64
    num_children: int = 8
    threshold: float | None = None
    num_refined: int | None = None
    codewords: str = "means"
    query_tile: int = 128

    def __post_init__(self) -> None:
        check_int("num_parents", self.num_parents, 1, LARGEST_COUNT)
        check_int("num_children", self.num_children, 0, LARGEST_COUNT)
        check_int("query_tile", self.query_tile, 1, LARGEST_COUNT)
        if self.codewords not in CODEWORDS:
            raise ValueError(
                f"codewords must be one of {', '.join(CODEWORDS)}, but got {self.codewords!r}."
            )
        if self.num_refined is not None:
            if self.threshold is not None:
                raise ValueError(
                    f"threshold and num_refined exclude each other, but got {self.threshold} and "
                    f"{self.num_refined}."
                )
            self._check_refined()
            return
        if not self.means:
            raise ValueError('codewords="stored" needs num_refined in place of a threshold.')
        threshold = DEFAULT_THRESHOLD if self.threshold is None else self.threshold
        object.__setattr__(self, "threshold", check_threshold(threshold))

    def _check_refined(self) -> None:
        check_int("num_refined", self.num_refined, 0, LARGEST_COUNT)
        assert self.num_refined is not None
        if self.num_refined > self.num_parents:
            raise ValueError(
                f"num_refined must be at most num_parents, {self.num_parents}, but got "
                f"{self.num_refined}."
            )
        if self.num_refined > self.most_refined:
            raise ValueError(
                f"num_refined must be 0 without children (flat VQ), but got {self.num_refined}."
            )

    def __str__(self) -> str:
        children = f"C{self.num_children}" if self.num_children else ""
        if self.num_refined is None:
            return f"M{self.num_parents}{children}T{digits_of(self.threshold)}"
        refined = f"P{self.num_refined}" if children else ""
        return f"M{self.num_parents}{refined}{children}{'' if self.means else '/stored'}"

    @property
    def long_name(self) -> str:
        """The configuration string and everything else that a call's time depends on."""
        return f"{self}, tiles of {self.query_tile}"

    @property
    def means(self) -> bool:
        """Whether the mean of its keys represents a leaf or cell, else the stored codeword."""
        return self.codewords == "means"

    @property
    def num_leaves(self) -> int:
        """M0 (1 + C), with one leaf for what stays with each parent."""
        return self.num_parents * (1 + self.num_children)

    @property
    def columns(self) -> int | None:
        """M0 + P C, the codewords that a query tile sees (the paper's cost); None with a threshold,
        where they depend on queries and keys."""
        if self.num_refined is None:
            return None
        return self.num_parents + self.num_refined * self.num_children

    @property
    def limit(self) -> float:
        """What a further column must be worth more than, given a threshold; at 0 all are shown,
        also those whose worth underflows."""
        assert self.threshold is not None
        return self.threshold or -1.0

    @property
    def any_refinement(self) -> "Spec":
        """The same with one threshold in place of any other, or one number of refined parents in
        place of any other but none and all."""
        if self.threshold is not None:
            return self.changed(threshold=DEFAULT_THRESHOLD)
        return self.changed(num_refined=1) if self.refines_some else self

    @property
    def refines_some(self) -> bool:
        """Whether tiles may refine different parents."""
        return self.num_refined is None or 0 < self.num_refined < self.num_parents

    @property
    def most_refined(self) -> int:
        """The largest valid `num_refined`: all parents, or 0 for flat VQ-attention."""
        return self.num_parents if self.num_children else 0

    @property
    def least_keys(self) -> int:
        """The fewest keys that the codewords of a call can be taken from."""
        return -(-self.num_leaves // MOST_CODEWORDS_PER_KEY)

    @property
    def numbers(self) -> list[int]:
        """The options but the threshold as integers, for an operator's schema; -1 is None."""
        values = {name: getattr(self, name) for name in _INTEGERS}
        values["codewords"] = CODEWORDS.index(self.codewords)
        return [-1 if x is None else x for x in values.values()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int], threshold: float | None) -> "Spec":
        """The inverse of `numbers`.

        Args:
            numbers: a spec's `numbers`.
            threshold: its threshold.
        """
        values: dict[str, Any] = dict(zip(_INTEGERS, numbers, strict=True))
        values["codewords"] = CODEWORDS[values["codewords"]]
        if values["num_refined"] < 0:
            values["num_refined"] = None
        return cls(**values, threshold=threshold)

    def changed(self: AnySpec, **values: Any) -> AnySpec:
        """The same with other values; a threshold takes the place of `num_refined`, and vice versa.

        Args:
            **values: new values of fields.
        """
        if any(values.get(name) is not None for name in RESOLUTIONS):
            values = dict.fromkeys(RESOLUTIONS) | values
        return replace(self, **values)


_SPEC_FIELDS = tuple(field.name for field in fields(Spec))
_INTEGERS = tuple(name for name in _SPEC_FIELDS if name != "threshold")


@dataclass(frozen=True, kw_only=True)
class AVQConfig(Spec):
    """Configuration of AVQ attention: the options of its calls, and the layers that make them.

    Args:
        num_parents, num_children, threshold, num_refined, codewords, query_tile: as in `Spec`.
        query_order: `"gilbert"`, `"raster"` or `"random"` order of the grid's tokens.
        levels: UNet levels whose self-attention is replaced, where it has any; 0 is the highest
            resolution, and all of a transformer.
        exact: layers at these levels that keep exact attention: names of layers, or of modules
            such as `"up_blocks.1"` for all layers in them.
        key_norm: normalize keys with a learnable LayerNorm before quantizing them.
        overrides: other values of `num_parents`, `num_children`, `threshold` or `num_refined`. A
            key is a level such as `"1"`, or the name of a layer or module such as `"up_blocks.3"`.
            Names take precedence over levels, and longer names over shorter ones. The mapping is
            copied. `apply_avq` refuses a key that matches no layer.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or an override names another field.
    """

    query_order: str = "gilbert"
    levels: tuple[int, ...] = (0, 1)
    exact: tuple[str, ...] = ()
    key_norm: bool = False
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_order not in QUERY_ORDERS:
            raise ValueError(
                f"query_order must be one of {', '.join(QUERY_ORDERS)}, but got "
                f"{self.query_order!r}."
            )
        if not isinstance(self.key_norm, bool):
            raise TypeError(f"key_norm must be a bool, but got {self.key_norm!r}.")
        if not isinstance(self.levels, list | tuple):
            raise TypeError(f"levels must be a tuple of ints, but got {self.levels!r}.")
        levels = tuple(self.levels)
        if not levels:
            raise ValueError("levels must name at least one UNet level, but got ().")
        for level in levels:
            check_int("levels", level, 0)
        object.__setattr__(self, "levels", tuple(sorted(set(levels))))
        if not isinstance(self.exact, list | tuple) or not all(
            isinstance(name, str) for name in self.exact
        ):
            raise TypeError(f"exact must be a tuple of layer names, but got {self.exact!r}.")
        object.__setattr__(self, "exact", tuple(self.exact))
        if not isinstance(self.overrides, Mapping):
            raise TypeError(f"overrides must be a mapping, but got {self.overrides!r}.")
        for key, values in self.overrides.items():
            if not isinstance(key, str):
                raise TypeError(f"overrides must have strings as keys, but got {key!r}.")
            if not isinstance(values, Mapping):
                raise TypeError(f"overrides[{key!r}] must be a mapping, but got {values!r}.")
            unknown = set(values) - {*SIZES, *RESOLUTIONS}
            if unknown:
                raise ValueError(
                    f"overrides[{key!r}] may set {', '.join((*SIZES, *RESOLUTIONS))}, but got "
                    f"{', '.join(sorted(map(str, unknown)))}."
                )
            self._with(values)
        copied = {key: dict(values) for key, values in self.overrides.items()}
        object.__setattr__(self, "overrides", copied)

    @cached_property
    def spec(self) -> Spec:
        """The options of a call."""
        return Spec(**{name: getattr(self, name) for name in _SPEC_FIELDS})

    @classmethod
    def parse(cls, text: str, **other_fields: Any) -> "AVQConfig":
        """Parse `"M64C8T1e-4"` (threshold), `"M64P16C8"` (the paper's sizes), `"M256"` (flat VQ) or
        `"M64P16C8/stored"` (the paper's form, with a codebook's codewords).

        Args:
            text: the configuration string.
            **other_fields: passed to the constructor.

        Raises:
            TypeError: `text` is not a string, or a field is given twice.
            ValueError: `text` is malformed.
        """
        return cls(**_fields_of(text), **other_fields)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AVQConfig":
        """Build from a mapping of field names, as read from JSON or YAML.

        Raises:
            TypeError: `values` is no mapping.
            ValueError: a key is not a field.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"a configuration must be a mapping, but got {values!r}.")
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown AVQConfig keys: {', '.join(sorted(map(str, unknown)))}.")
        return cls(**values)

    def for_layer(self, name: str, level: int) -> "AVQConfig":
        """The configuration of one layer, with its overrides applied."""
        config = self._with(self.overrides.get(str(level), {}))
        prefixes = [key for key in self.overrides if is_within(name, key)]
        for prefix in sorted(prefixes, key=len):
            config = config._with(self.overrides[prefix])
        return config

    def _with(self, values: Mapping[str, Any]) -> "AVQConfig":
        return self.changed(overrides={}, **values)


def _fields_of(text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise TypeError(f"expected a configuration such as 'M64C8T1e-4', but got {text!r}.")
    match = _CONFIGURATION.fullmatch(text.strip())
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    if match is None:
        raise ValueError(
            f"expected a configuration such as M64C8T1e-4, M64P16C8 or M256, but got {shown!r}."
        )
    parents, refined, children, threshold, stored = match.groups()
    if (refined is None) == (threshold is None) and not (refined is children is None):
        raise ValueError(
            f"expected either a threshold, as in M64C8T1e-4, or refined parents, as in M64P16C8, "
            f"but got {shown!r}."
        )
    values: dict[str, Any] = {"num_parents": int(parents), "num_children": int(children or 0)}
    if stored is not None:
        values["codewords"] = "stored"
    if threshold is not None:
        return values | {"threshold": float(threshold)}
    return values | {"num_refined": int(refined or 0)}


def digits_of(value: float | None) -> str:
    """The shortest digits of a number that parse to it, such as 1e-4 and 0.02."""
    number = Decimal(repr(value)).normalize()
    if number.is_infinite():
        return "inf"
    is_short = not number or Decimal("1e-3") <= number < Decimal("1e16")
    return f"{number:f}" if is_short else f"{number:e}"


def is_within(layer: str, name: str) -> bool:
    """Whether `name` is the layer or a module that contains it."""
    return f"{layer}.".startswith(f"{name}.")


def check_tolerance(value: Any, name: str = "tolerance") -> float:
    """Check that a tolerance is above 0 and at most `LARGEST_TOLERANCE`, and return it as a float.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is out of range.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number such as 0.02, but got {value!r}.")
    if not 0 < value <= LARGEST_TOLERANCE:
        raise ValueError(
            f"{name} must be above 0 and at most {LARGEST_TOLERANCE}, but got {value}; 0.02 is 2 %."
        )
    return float(value)


def check_threshold(value: Any, name: str = "threshold") -> float:
    """Check that a threshold is a number of at least 0, and return it as a float.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is negative or NaN.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, but got {value!r} ({type(value).__name__}).")
    if not 0 <= value <= math.inf:
        raise ValueError(f"{name} must be at least 0, but got {value}.")
    return float(value) if value <= sys.float_info.max else math.inf


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Check that `value` is an int of at least `minimum` and, if given, at most `maximum`.

    Raises:
        TypeError: `value` is not an int.
        ValueError: `value` is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, but got {value!r} ({type(value).__name__}).")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, but got {value}.")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, but got {value}.")


def check_text(name: str, text: str) -> str:
    """Refuse text with lone surrogates, which no tokenizer reads; errors start with `name`.

    Raises:
        ValueError: `text` has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be text, but its character {error.start + 1} is a lone surrogate, "
            f"{text[error.start]!a}."
        ) from error
    return text

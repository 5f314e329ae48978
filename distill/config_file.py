"""Configurations: frozen dataclasses, and YAML files that state what differs from their defaults.

A field's type defines its valid values: `steps: Count`, `precision: Literal["fp32", "bf16"]`.
Nested dataclasses are sections of the file. `base: NAME.yaml` names a file in the same folder that
this one starts from; sections are merged, other values replaced.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from avq_diffusers.files import atomic_write
from avq_diffusers.options import LARGEST_SEED

ConfigType = TypeVar("ConfigType", bound="Config")

MAX_BYTES = 100_000  # of a file; the longest in `configs` has 1 % of them
# `safe_load` also raises these, for values that contradict their tag and for deep nesting.
YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError, TypeError)


class Values(NamedTuple):
    """The values that a field takes, and how messages describe them."""

    hold: Callable[[Any], bool]
    named: str


Count = Annotated[int, Values(lambda x: x >= 1, "at least 1")]
Natural = Annotated[int, Values(lambda x: x >= 0, "at least 0")]
Seed = Annotated[int, Values(lambda x: 0 <= x <= LARGEST_SEED, f"between 0 and {LARGEST_SEED}")]
Finite = Annotated[float, Values(math.isfinite, "finite")]
Weight = Annotated[float, Values(lambda x: 0 <= x < math.inf, "at least 0 and finite")]
Positive = Annotated[float, Values(lambda x: x > 0, "above 0")]
Share = Annotated[float, Values(lambda x: 0 <= x <= 1, "in [0, 1]")]
Decay = Annotated[float, Values(lambda x: 0 <= x < 1, "in [0, 1)")]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration that checks its values against its field types when built.

    Raises:
        ValueError: a field has an invalid value.
    """

    @classmethod
    def resolved(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Expand shorthands that a file may use into field values."""
        return values

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, values, suffix = getattr(self, name), _values(hint), ""
            if NoneType in get_args(hint):
                values, suffix = _values(get_args(hint)[0]), " or null"
            items = value if isinstance(value, tuple) else (value,)
            if values is not None and value is not None and not all(map(values.hold, items)):
                raise ValueError(f"{name} must be {values.named}{suffix}, but got {value!r}.")


def _values(hint: Any) -> Values | None:
    """The constraint in a type, or in a tuple's items; None if any value is valid."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return Values(choices.__contains__, f"one of {', '.join(choices)}")
    return get_args(hint)[1] if get_origin(hint) is Annotated else None


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, where YAML silently takes the last value, and aliases, with which a
    few bytes stand for gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"write the values of the alias *{self.peek_event().anchor} again")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = Counter(str(key.value) for key, _ in node.value)
        for name, count in names.items():
            if count > 1:
                raise ValueError(f"the key {name} is given twice")
        return super().construct_mapping(node, deep)


def load_config(path: str | Path, kind: type[ConfigType], overrides: list[str]) -> ConfigType:
    """Read a YAML file as a `kind`, after `section.key=value` overrides.

    Raises:
        FileNotFoundError: the file or its base does not exist.
        ValueError: a key is unknown, missing or repeated, or a value is out of range.
        TypeError: a value has the wrong type. The message lists all problems.
    """
    values = _read(Path(path), ())
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ValueError(f"--set must be key=value, but got {override!r}.")
        changes = _parse_yaml(value, f"--set {key} is not YAML")
        for name in reversed(key.split(".")):
            changes = {name: changes}
        values = _merged(values, changes)
    reader = _Reader(str(path))
    config = reader.section(kind.resolved(values), kind, "")
    if problems := reader.problems:
        error = TypeError if all(isinstance(x, TypeError) for x in problems) else ValueError
        raise error("; ".join(str(problem).removesuffix(".") for problem in problems) + ".")
    return config


def save_config(config: Any, output: Path) -> None:
    """Write the complete configuration as `output / "config.yaml"`, which `load_config` reads.

    Raises:
        OSError: the disk is full or not writable.
    """
    output.mkdir(parents=True, exist_ok=True)
    with atomic_write(output / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(plain_values(config), sort_keys=False))


def differing_keys(config: Any, saved: Mapping[str, Any], *, ignored: tuple[str, ...]) -> list[str]:
    """Return the dotted names of the fields in which two configurations differ.

    Args:
        config: a dataclass.
        saved: what `plain_values` returned for the other configuration.
        ignored: fields and sections that may differ.
    """
    current, other = flatten(plain_values(config)), flatten(saved)
    absent = object()
    return sorted(
        name
        for name in current.keys() | other.keys()
        if current.get(name, absent) != other.get(name, absent)
        and not any(f"{name}.".startswith(f"{field}.") for field in ignored)
    )


def plain_values(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON values, with lists instead of tuples."""
    return json.loads(json.dumps(asdict(config)))


def flatten(values: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping whose keys are joined by `separator`."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, separator, f"{prefix}{key}{separator}")
        else:
            flat[prefix + key] = value
    return flat


def _parse_yaml(text: str | bytes, complaint: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except YAML_ERRORS as error:
        raise ValueError(f"{complaint}: {' '.join(str(error).split())}.") from error


def _read(path: Path, derived: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file and its bases; `derived` are the files that start from it."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a regular file.")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} must have at most {MAX_BYTES} bytes, but has more.")
    values = _parse_yaml(content, f"{path} is not a YAML file")
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a YAML mapping, but holds {type(values).__name__}.")
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str) or path in derived:
        raise ValueError(f"base must be another file beside {path}, but got {base!r}.")
    return _merged(_read(path.with_name(base), (*derived, path)), values)


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Replace values, and within sections key by key. `overrides` is a value, not a section."""
    merged = dict(values)
    for key, value in changes.items():
        old = values.get(key)
        is_section = isinstance(old, dict) and isinstance(value, dict) and key != "overrides"
        merged[key] = _merged(old, value) if is_section else value
    return merged


class _Reader:
    """Builds dataclasses from a file's values and collects the problems."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[TypeError | ValueError] = []

    def section(self, values: Mapping[str, Any], kind: type[Any], prefix: str) -> Any:
        """Build a dataclass from a mapping of its fields; None if there are problems."""
        names = {field.name for field in fields(kind)}
        needed = {x.name for x in fields(kind) if x.default is x.default_factory is MISSING}
        before = len(self.problems)
        for wrong, complaint in (
            (set(values) - names, "has the unknown key {} for"),
            (needed - set(values), "lacks the key {} of"),
        ):
            if wrong:
                listed = complaint.format(", ".join(sorted(f"{prefix}{name}" for name in wrong)))
                self.problems.append(ValueError(f"{self.source} {listed} {kind.__name__}."))
        hints, read = get_type_hints(kind), {}
        for name in [name for name in values if name in names]:
            try:
                read[name] = self.value(values[name], hints[name], prefix + name)
            except TypeError as error:
                self.problems.append(error)
        if len(self.problems) == before:
            try:
                return kind(**read)
            except (TypeError, ValueError) as error:
                section = f"{prefix.removesuffix('.')}: " if prefix else ""
                self.problems.append(type(error)(f"{section}{error}"))
        return None

    def value(self, value: Any, hint: Any, name: str) -> Any:
        """Convert a YAML value to the type of its field: sections, tuples and floats."""
        kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
        if value is None and NoneType in kinds:
            return None
        kind = str if get_origin(kinds[0]) is Literal else kinds[0]
        origin = get_origin(kind)
        if is_dataclass(kind) and isinstance(value, dict):
            return self.section(value, kind, f"{name}.")
        if origin is tuple and isinstance(value, list):
            items = get_args(kind)
            if items[-1] is Ellipsis:
                items = items[:1] * len(value)
            if len(items) == len(value):
                pairs = enumerate(zip(value, items, strict=True))
                return tuple(self.value(x, item, f"{name}[{i}]") for i, (x, item) in pairs)
        if origin is Mapping and isinstance(value, dict):
            return value
        if kind is float and type(value) in (int, str):
            with suppress(ValueError, OverflowError):
                return float(value)  # YAML 1.1 reads 1e-3 as a string
        if type(value) is not kind:
            plain = hint.__name__ if isinstance(hint, type) and origin is None else str(hint)
            shown = "a section" if is_dataclass(kind) else plain
            raise TypeError(f"{name} must be {shown}, but got {value!r}.")
        return value

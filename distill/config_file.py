"""Configurations as files: complete YAML in which every field is visible, read strictly.

`load_config` reads any frozen dataclass; nested dataclasses are sections of the file. The dataclass
checks itself when it is built, by the `check_` functions.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from avq_diffusers.cli.options import LARGEST_SEED

Config = TypeVar("Config")

# What yaml lets through of values that its tags or its patterns promise, and of deep nesting.
YAML_ERRORS = (ValueError, AttributeError, LookupError, RecursionError, TypeError)


class _Loader(yaml.SafeLoader):
    """Refuses aliases, as a few nested ones can stand for more than any memory holds, and a key
    that is given twice.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = Counter(str(key.value) for key, _ in node.value)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"the key {twice[0]} is given twice")
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not supported")
        return super().compose_node(parent, index)


def load_config(path: str | Path, kind: type[Config], overrides: list[str]) -> Config:
    """Read the complete YAML file `path` as a `kind`, after `dotted.key=value` overrides.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a key is unknown or missing, or a value does not fit.
        TypeError: a value has the wrong type.
    """
    values = _parse_yaml(Path(path).read_bytes(), f"{path} is not a YAML file")
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a YAML mapping, but holds {type(values).__name__}.")
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ValueError(f"--set must be key=value, but got {override!r}.")
        _set(values, key, _parse_yaml(value, f"--set {key} is not YAML"))
    return config_from_values(values, kind, str(path))


def config_from_values(
    values: Mapping[str, Any], kind: type[Config], source: str, prefix: str = ""
) -> Config:
    """Build a `kind` from a mapping that has exactly its fields.

    Args:
        values: field names and plain values.
        kind: a dataclass whose hints are plain types, tuples, mappings, `| None` and dataclasses.
        source: what messages call the mapping.
        prefix: of the keys in messages, such as `"data."`.
    """
    names = {field.name for field in fields(kind)}
    if unknown := sorted(prefix + str(name) for name in set(values) - names):
        raise ValueError(f"{source} has the unknown key {', '.join(unknown)} for {kind.__name__}.")
    if missing := sorted(prefix + name for name in names - set(values)):
        raise ValueError(f"{source} lacks the key {', '.join(missing)} of {kind.__name__}.")
    hints = get_type_hints(kind)
    read = {name: _as_declared(values[name], hints[name], source, prefix + name) for name in values}
    try:
        return kind(**read)
    except (TypeError, ValueError) as error:
        if not prefix:
            raise
        raise type(error)(f"{prefix.removesuffix('.')}: {error}") from error


def differing_keys(config: Any, saved: Mapping[str, Any], *, ignored: tuple[str, ...]) -> list[str]:
    """The dotted names of the fields in which `config` and a saved mapping differ.

    Args:
        config: a dataclass.
        saved: what `plain_values` gave for the other one.
        ignored: fields and sections that may differ.
    """
    current, other = flatten(plain_values(config)), flatten(saved)
    differing = {
        name
        for name in current.keys() | other.keys()
        if (name in current, current.get(name)) != (name in other, other.get(name))
    }
    return sorted(
        name for name in differing if not any(f"{name}.".startswith(f"{x}.") for x in ignored)
    )


def plain_values(config: Any) -> dict[str, Any]:
    """The fields as JSON has them (lists instead of tuples)."""
    return _plain(asdict(config))


def flatten(values: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, the keys joined by `separator`."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, separator, f"{prefix}{key}{separator}")
        else:
            flat[prefix + key] = value
    return flat


def check_at_least_one(config: Any, *names: str) -> None:
    """Raise ValueError for a field below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, but got {getattr(config, name)}.")


def check_at_least_one_or_none(config: Any, name: str) -> None:
    """Raise ValueError for a field below 1 that is not None."""
    value = getattr(config, name)
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1 or null, but got {value}.")


def check_not_negative(config: Any, *names: str) -> None:
    """Raise ValueError for a field below 0 or NaN."""
    for name in names:
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name} must be at least 0, but got {getattr(config, name)}.")


def check_seed(config: Any) -> None:
    """Raise ValueError for a `seed` that PyTorch cannot take."""
    if not 0 <= config.seed <= LARGEST_SEED:
        raise ValueError(f"seed must be between 0 and {LARGEST_SEED}, but got {config.seed}.")


def check_finite(config: Any, *names: str) -> None:
    """Raise ValueError for a field that is infinite or NaN."""
    for name in names:
        if not math.isfinite(getattr(config, name)):
            raise ValueError(f"{name} must be finite, but got {getattr(config, name)}.")


def check_positive(config: Any, name: str) -> None:
    """Raise ValueError for a field that is not above 0, or NaN."""
    if not getattr(config, name) > 0:
        raise ValueError(f"{name} must be above 0, but got {getattr(config, name)}.")


def check_one_of(config: Any, name: str, values: Collection[str]) -> None:
    """Raise ValueError for a field that is none of `values`."""
    if getattr(config, name) not in values:
        raise ValueError(
            f"{name} must be one of {', '.join(values)}, but got {getattr(config, name)!r}."
        )


def _parse_yaml(text: str | bytes, complaint: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, *YAML_ERRORS) as error:
        raise ValueError(f"{complaint}: {' '.join(str(error).split())}.") from error


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for depth, section in enumerate(sections):
        values = values.get(section)
        if not isinstance(values, dict):
            raise ValueError(f"--set names the unknown section {'.'.join(sections[: depth + 1])}.")
    values[name] = value


def _as_declared(value: Any, hint: Any, source: str, name: str) -> Any:
    """`value` as the type that a field declares; YAML and JSON know no tuples."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return None
    kind = next(kind for kind in kinds if kind is not NoneType)
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        return config_from_values(value, kind, source, f"{name}.")
    if origin is tuple and isinstance(value, list):
        items = get_args(kind)
        if items[-1] is Ellipsis:
            items = items[:1] * len(value)
        if len(items) == len(value):
            pairs = enumerate(zip(value, items, strict=True))
            return tuple(_as_declared(x, item, source, f"{name}[{i}]") for i, (x, item) in pairs)
    if origin is Mapping and isinstance(value, dict):
        return value
    if kind is float and type(value) in (int, str):
        with suppress(ValueError, OverflowError):
            return float(value)  # YAML 1.1 reads 1e-3 as a string
    if type(value) is not kind:
        raise TypeError(f"{name} must be {_name(hint)}, but got {value!r}.")
    return value


def _name(hint: Any) -> str:
    if is_dataclass(hint):
        return "a section"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

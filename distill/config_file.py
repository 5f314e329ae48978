"""Configurations: frozen dataclasses, and YAML files that state what differs from their defaults.

Pydantic checks fields against their types: `steps: Count`, `precision: Literal["fp32", "bf16"]`.
Nested dataclasses are sections of the file. `base: NAME.yaml` names a file in the same folder that
this one starts from; sections are merged, other values replaced.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from avq_diffusers.files import write_text
from avq_diffusers.options import LARGEST_SEED

ConfigType = TypeVar("ConfigType", bound="Config")

CONFIG_FILE = "config.yaml"  # of a run
MAX_BYTES = 100_000  # of a file; the longest in `configs` has 1 % of them
# `safe_load` also raises these, for values that contradict their tag and for deep nesting.
YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError, TypeError)

Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Seed = Annotated[int, Field(strict=True, ge=0, le=LARGEST_SEED)]
Number = Annotated[float, Field(strict=True)]  # else true is 1
Finite = Annotated[Number, Field(allow_inf_nan=False)]
Weight = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Config:
    """A configuration that checks its values when built.

    Raises:
        ValueError: a field has an invalid value.
    """

    @classmethod
    def resolved(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Expand shorthands that a file may use into field values."""
        return values


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


# YAML 1.1 takes 1e-4 for text.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$"),
    list("+-0123456789"),
)


def load_config(path: str | Path, kind: type[ConfigType], overrides: list[str]) -> ConfigType:
    """Read a YAML file as a `kind`, after `section.key=value` overrides.

    Raises:
        FileNotFoundError: the file or its base does not exist.
        ValueError: a key is unknown, missing or repeated, or a value is of the wrong type or out of
            range. The message lists all problems.
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
    try:
        return TypeAdapter(kind).validate_python(kind.resolved(values))
    except ValidationError as error:
        problems = (_problem(found) for found in error.errors())
        raise ValueError(f"{path}: {'; '.join(problems)}.") from None


def save_config(config: Any, output: Path) -> None:
    """Write the complete configuration as `output / CONFIG_FILE`, which `load_config` reads.

    Raises:
        OSError: the disk is full or not writable.
    """
    write_text(output / CONFIG_FILE, yaml.safe_dump(plain_values(config), sort_keys=False))


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


def _problem(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as part of a sentence."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"the key {name} is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"the key {name} is unknown"
    if error["type"] == "value_error":  # raised by a class of ours
        return f"{name}: {error['ctx']['error']}".removeprefix(": ").removesuffix(".")
    message = error["msg"].removeprefix("Input ").replace("should", "must", 1)
    return f"{name} {message}, but got {error['input']!r}"

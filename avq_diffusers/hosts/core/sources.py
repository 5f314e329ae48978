"""Where AVQ takes its codewords from, and the layer states built from that."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeAlias, runtime_checkable

from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.core.layers import Layer, LayerSpec, chosen_layers
from avq_diffusers.hosts.core.state import LayerState
from avq_diffusers.hosts.core.weights import LayerWeights


@runtime_checkable
class StoredSource(Protocol):
    """Codebooks of a model's layers: `AVQCodebooks`."""

    avq_config: AVQConfig

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        """Refuse layers of another model."""

    def layer_weights(self, name: str) -> LayerWeights:
        """A layer's codebook, key norm and projection changes."""


# Codewords from the keys of each call, or from codebooks.
AVQSource: TypeAlias = AVQConfig | StoredSource
CONFIG_FIELDS = frozenset(field.name for field in fields(AVQConfig))


def resolved_source(
    source: AVQSource | str | None, config_fields: Mapping[str, Any], default: AVQConfig
) -> AVQSource:
    """Codebooks as they are, or a configuration with some of its fields replaced.

    Args:
        source: codebooks, a configuration, its string, or None for the default.
        config_fields: fields of `AVQConfig`.
        default: taken for None; also gives the levels that a string does not name.
    """
    if not isinstance(source, StoredSource | AVQConfig | str | None):
        raise TypeError(
            f"expected AVQCodebooks, an AVQConfig, a string such as 'M64C8T1e-4' or nothing, but "
            f"got {type(source).__name__}."
        )
    if isinstance(source, StoredSource):
        if config_fields:
            raise TypeError(
                f"codebooks have a configuration of their own; drop {', '.join(config_fields)}."
            )
        return source
    if isinstance(source, str):
        source = AVQConfig.parse(source, levels=default.levels)
    return (source or default).changed(**config_fields)


def check_known(
    function: str, given: Iterable[str], known: Iterable[str], *, is_open: bool = False
) -> None:
    """Refuse arguments of `function` that are not `known`.

    Args:
        function: name of the function.
        given, known: names of arguments.
        is_open: whether it passes others on; then only names close to known ones are refused.
    """
    known = set(known)
    for name in given:
        close = difflib.get_close_matches(name, known - {name}, 1)
        if name not in known and (close or not is_open):
            hint = f"did you mean {close[0]}?" if close else f"see help({function})."
            raise TypeError(f"{function} takes no argument {name}; {hint}")


def make_states(
    layers: Sequence[Layer], source: AVQSource, backend: str, route: str | int
) -> dict[Layer, LayerState]:
    """New states for the layers that `source` chooses."""
    if isinstance(source, StoredSource):
        config = source.avq_config
        source.check_layers(chosen_layers(layers, config.levels, config.exact, ()))
        return states_of_config(layers, config, backend, route, source.layer_weights)
    for name, needs in (
        ('codewords="stored"', source.codewords == "stored"),
        ("key_norm", source.key_norm),
    ):
        if needs:
            raise ValueError(f"{name} needs codebooks, which calibrate or gather_codebooks makes.")
    return states_of_config(layers, source, backend, route)


def states_of_config(
    layers: Sequence[Layer],
    config: AVQConfig,
    backend: str = "auto",
    route: str | int = "always",
    weights_of: Callable[[str], LayerWeights] = lambda name: LayerWeights(),
) -> dict[Layer, LayerState]:
    """New states for the layers of a configuration, without codebooks unless given by name."""
    chosen = chosen_layers(layers, config.levels, config.exact, config.overrides)
    return {
        x: LayerState(x, config.for_layer(x.name, x.level), weights_of(x.name), backend, route)
        for x in chosen
    }

"""Where AVQ takes its codewords from, and the layer states built from that."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.codebooks import AVQCodebooks
from avq_diffusers.hosts.layer_weights import LayerWeights
from avq_diffusers.hosts.layers import Layer, chosen_layers
from avq_diffusers.hosts.state import LayerState

# Codewords from the keys of each call, or from codebooks.
AVQSource: TypeAlias = AVQConfig | AVQCodebooks
WITHOUT_CODEBOOKS = (
    "a tolerance chooses sizes for codewords from the keys of each call; apply it without "
    "codebooks."
)


def check_source(source: Any) -> None:
    """Refuse anything AVQ cannot take codewords from.

    Raises:
        TypeError: `source` is neither codebooks, nor a configuration, nor None.
    """
    if not isinstance(source, AVQCodebooks | AVQConfig | None):
        raise TypeError(
            f"expected AVQCodebooks, an AVQConfig or nothing, but got {type(source).__name__}."
        )


def make_states(
    layers: Sequence[Layer], source: AVQSource, backend: str, route: str | int
) -> dict[Layer, LayerState]:
    """New states for the layers that `source` chooses.

    Raises:
        ValueError: codebooks belong to another model, or a configuration needs codebooks or does
            not fit the layers.
    """
    if isinstance(source, AVQCodebooks):
        config = source.avq_config
        chosen = chosen_layers(layers, config.levels, config.exact, ())
        source.check_layers(chosen)
        return {
            x: LayerState(
                x, source.layer_config(x.name), source.layer_weights(x.name), backend, route
            )
            for x in chosen
        }
    for name, needs in (
        ('codewords="stored"', source.codewords == "stored"),
        ("key_norm", source.key_norm),
    ):
        if needs:
            raise ValueError(f"{name} needs codebooks, which calibrate or gather_codebooks makes.")
    return states_of_config(layers, source, backend, route)


def states_of_config(
    layers: Sequence[Layer], config: AVQConfig, backend: str = "auto", route: str | int = "always"
) -> dict[Layer, LayerState]:
    """New states for the layers of a configuration, without codebooks.

    Raises:
        ValueError: the configuration does not fit the layers.
    """
    chosen = chosen_layers(layers, config.levels, config.exact, config.overrides)
    return {
        x: LayerState(x, config.for_layer(x.name, x.level), LayerWeights(), backend, route)
        for x in chosen
    }

"""The models of a pipeline, their adapters and their layers."""

from collections.abc import Iterable
from typing import Any, TypeVar

from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.hosts.core import Hosted, Layer, chosen_layers, entrance_of
from avq_diffusers.hosts.models.dispatch import ADDED, DISPATCH
from avq_diffusers.hosts.models.joint import JOINT
from avq_diffusers.hosts.models.unet import FOR_UNETS, UNET, AVQProcessor
from avq_diffusers.hosts.models.vision import VISION

# One per kind of model; the first that recognises a model gets it.
HOSTS = (ADDED, UNET, JOINT, DISPATCH, VISION)
# For functions that return the pipeline or model they were given.
AnyModel = TypeVar("AnyModel", bound=DiffusionPipeline | nn.Module)
# Parts of a pipeline that AVQ is applied to -> prefix of their layers' names.
DENOISERS = {
    **{"unet": "", "transformer": "", "transformer_2": "transformer_2."},
    "unconditional_transformer": "unconditional_transformer.",
}


def find_model(module: nn.Module) -> Hosted | None:
    """The model in a module, wrapped or not, with its adapter; None if there is none."""
    for host in HOSTS:
        model = host.find(module)
        if model is not None:
            return Hosted(host, model, entrance_of(module, model), "")
    return None


def models_of(pipe: DiffusionPipeline | nn.Module) -> list[Hosted]:
    """The models of a pipeline that AVQ is applied to, or `pipe` itself."""
    found: list[tuple[str, Any]] = [("", pipe)]
    if not isinstance(pipe, nn.Module):
        found = [(prefix, getattr(pipe, name, None)) for name, prefix in DENOISERS.items()]
    models = []
    for prefix, module in found:
        if module is None:
            continue
        hosted = find_model(module)
        is_unet = hosted is not None and hosted.host is UNET
        processors = (getattr(x, "processor", None) for x in module.modules())
        if not is_unet and any(isinstance(x, AVQProcessor) for x in processors):
            raise TypeError(FOR_UNETS)
        if hosted is None:
            raise TypeError(
                f"AVQ does not know the attention of {type(module).__name__}; it knows UNets and "
                f"image and video transformers of diffusers, and vision models on the "
                f"AttentionInterface of transformers that attend to all patches of an image, "
                f"without windows or position biases."
            )
        models.append(hosted._replace(prefix=prefix))
    if not models:
        raise TypeError(
            f"expected a pipeline with a unet or a transformer, or a model, but got "
            f"{type(pipe).__name__}."
        )
    return models


def all_models_of(pipe: DiffusionPipeline | nn.Module) -> list[Hosted]:
    """`models_of`, plus a pipeline's ControlNets."""
    models = models_of(pipe)
    controlnet = None if isinstance(pipe, nn.Module) else getattr(pipe, "controlnet", None)
    if isinstance(controlnet, nn.Module):
        nets = getattr(controlnet, "nets", None)
        several = {f"nets.{i}.": net for i, net in enumerate(nets or ())} or {"": controlnet}
        for name, net in several.items():
            hosted = find_model(net)
            if hosted is not None:
                models.append(hosted._replace(prefix=f"controlnet.{name}"))
    return models


def name_of(pipe: DiffusionPipeline | nn.Module) -> str | None:
    """The Hub id or folder a pipeline or model was loaded from."""
    owner = models_of(pipe)[0].model if isinstance(pipe, nn.Module) else pipe
    return getattr(getattr(owner, "config", None), "_name_or_path", None)


def unet_of(pipe: DiffusionPipeline | nn.Module) -> Hosted:
    """The UNet of a pipeline or in a module, wrapped or not."""
    module = pipe if isinstance(pipe, nn.Module) else getattr(pipe, "unet", None)
    model = None if module is None else UNET.find(module)
    if module is None or model is None:
        what = pipe if module is None else module
        raise TypeError(
            f"expected a pipeline with a unet, or a UNet with down_blocks, but got "
            f"{type(what).__name__}."
        )
    return Hosted(UNET, model, entrance_of(module, model), "")


def has_unet(pipe: DiffusionPipeline | nn.Module) -> bool:
    """Whether AVQ is applied to a UNet of `pipe`."""
    return models_of(pipe)[0].host is UNET


def select_layers(
    model: nn.Module,
    levels: tuple[int, ...] | None = None,
    exact: tuple[str, ...] = (),
    overrides: Iterable[str] = (),
) -> list[Layer]:
    """The self-attention layers of a model in which AVQ may run, in module order.

    Args:
        model: a UNet, ControlNet or transformer of diffusers, or a vision model of transformers.
        levels: UNet levels to choose, 0 being the highest resolution, of those with self-attention;
            None chooses all. Other models only have level 0.
        exact: names of layers to leave out, or of modules to leave out with all their layers.
        overrides: keys of `AVQConfig.overrides`; each must match a chosen layer.

    Raises:
        TypeError: `model` has no such layers.
        ValueError: no self-attention is at these levels, a name in `exact` matches no layer there,
            no layer is left, or an override matches none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, but got {type(model).__name__}.")
    hosted = models_of(model)[0]
    return chosen_layers(hosted.host.layers(hosted.model), levels, exact, overrides)

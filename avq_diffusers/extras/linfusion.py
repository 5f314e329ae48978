"""LinFusion's linear attention, for comparison with AVQ: its processor, and trained layers on disk.

    output_i = q_i (sum_j k_j^T v_j) / (q_i sum_j k_j + N epsilon),    q, k = elu(.) + 1

Liu et al., "LinFusion: 1 GPU, 1 Minute, 16K Image", arXiv 2409.02097. Shapes: B batch, H heads,
N tokens, D head dim.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from diffusers.models.attention_processor import Attention
from safetensors.torch import save_file
from torch import Tensor, nn

from avq_diffusers.codebook.tensor_files import (
    check_names,
    check_tensors,
    load_tensors,
    read_config,
    tensor_digest,
)
from avq_diffusers.files import atomic_save
from avq_diffusers.hosts.core import LayerSpec, check_specs
from avq_diffusers.hosts.models import AnyModel, select_layers, unet_of

FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
EPSILON = 1e-4


class LinFusionProcessor(nn.Module):
    """Attention processor that runs LinFusion's attention, at a cost linear in N.

    Queries and keys are projected from x + phi(x). The small network phi is initialized to 0.

    Args:
        channels: channels of the tokens.
        tuned: hold projections that replace the layer's own, including any LoRA on them.
    """

    runs = "LinFusion"  # for `summary`

    def __init__(self, channels: int, *, tuned: bool = False) -> None:
        super().__init__()
        # The processor that `load_linfusion` replaced; in a tuple, so it is not registered.
        self.replaced: tuple[Any, ...] = ()
        self.phi_q = _phi(channels)
        self.phi_k = _phi(channels)
        self.tuned = tuned
        if tuned:
            self.to_q = nn.Linear(channels, channels, bias=False)
            self.to_k = nn.Linear(channels, channels, bias=False)
            self.to_v = nn.Linear(channels, channels, bias=False)
            self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend within hidden_states (B, N, channels); the output has the same shape.

        Raises:
            NotImplementedError: the call is cross-attention, or has a mask.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise NotImplementedError(
                "LinFusion's attention is self-attention without a mask; keep the layer's own "
                "processor for other calls."
            )
        projections = self if self.tuned else attn
        query = projections.to_q(hidden_states + self.phi_q(hidden_states))
        key = projections.to_k(hidden_states + self.phi_k(hidden_states))
        value = projections.to_v(hidden_states)
        heads = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value))
        output = projections.to_out[0](linear_attention(*heads).transpose(1, 2).flatten(2))
        return attn.to_out[1](output) / attn.rescale_output_factor


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """LinFusion's linear attention.

    Args:
        query, key, value: (B, H, N, D), of one dtype.

    Returns:
        (B, H, N, D), of the same dtype.
    """
    # Contiguous, because torch.compile expects a different layout for elu's gradient.
    query, key = (F.elu(x.contiguous()) + 1 for x in (query, key))
    query = query / (query @ key.mean(dim=2)[..., None] + EPSILON)
    # On both keys and values, as in the authors' code: products stay in float16's range.
    scale = key.shape[2] ** -0.5
    return query @ ((key * scale).mT @ (value * scale))


def save_linfusion(
    pipe: DiffusionPipeline | nn.Module,
    layers: Mapping[str, Mapping[str, Tensor]],
    path: str | Path,
    *,
    base_model: str | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write trained layers to a folder, for `load_linfusion`.

    Args:
        pipe: a pipeline with the UNet that the layers are for, or the UNet.
        layers: by name, for each of `select_layers(unet)`: the state of a `LinFusionProcessor` with
            tuned projections.
        path: the folder; created if missing.
        base_model: name of the model they are for; informational.
        training: summary of the training; informational.

    Raises:
        TypeError: `pipe` has no UNet.
        ValueError: names or shapes do not fit the UNet, or a tensor holds NaN or infinity.
        OSError: the folder cannot be written; the message says whether its previous content is
            intact.
    """
    specs = [layer for layer in select_layers(unet_of(pipe).model) if layer.name in layers]
    check_names("LinFusion layers", layers, [spec.name for spec in specs])
    tensors = _by_path(layers)
    check_tensors("LinFusion layers", tensors, _by_path(_states(_empty_processors(specs))))
    config = {
        "_class_name": LinFusionProcessor.__name__,
        "format_version": FORMAT_VERSION,
        "base_model": base_model,
        "layers": [spec.stored for spec in specs],
        "sha256": tensor_digest(tensors),
        "training": training,
    }
    with atomic_save(Path(path), CONFIG_FILE, "LinFusion layers") as folder:
        save_file(
            {name: x.detach().cpu().contiguous() for name, x in tensors.items()},
            folder / WEIGHTS_FILE,
        )
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_linfusion(pipe: AnyModel, path: str | Path) -> AnyModel:
    """Replace self-attention layers of a UNet by LinFusion layers that `save_linfusion` wrote.

    Earlier LinFusion layers are removed first. The layers bring their own projections, on the
    UNet's device and in its dtype; the UNet's own stay unchanged, for `remove_linfusion`. Load or
    unload IP-Adapters before calling this: they make diffusers rebuild the self-attention
    processors without the arguments these need.

    Args:
        pipe: a pipeline with the UNet of the layers' base model, or the UNet.
        path: the folder.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet.
        FileNotFoundError: the folder lacks a file.
        ValueError: a file is damaged, has an unknown format, or does not match its config.json; the
            layers belong to another model; or the UNet has AVQ or is offloaded sequentially.
    """
    unet = unet_of(pipe).model
    folder = Path(path).expanduser()
    config_path, weights_path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    config = read_config(config_path, LinFusionProcessor.__name__, FORMAT_VERSION)
    specs = _specs(config_path, config)
    if not weights_path.is_file():
        raise FileNotFoundError(f"LinFusion layers: there is no file {weights_path}.")
    layers = {layer.name: layer for layer in select_layers(unet)}
    if any(layer.avq_state for layer in layers.values()):
        raise ValueError("this UNet has AVQ; call remove_avq(unet) first.")
    if unet.device.type == "meta":
        raise ValueError(
            "this UNet keeps its weights on the meta device; call load_linfusion before "
            "enable_sequential_cpu_offload."
        )
    chosen = [layer for name, layer in layers.items() if name in specs]
    check_specs(str(config_path), specs, chosen, "the file has")
    processors = _empty_processors(specs.values())
    expected = _by_path(_states(processors))
    tensors = load_tensors(weights_path, expected, config.get("sha256"))

    remove_linfusion(unet)
    for name, processor in processors.items():
        state = {key: tensors[f"{name}.{key}"] for key in processor.state_dict()}
        processor.load_state_dict(state, assign=True)
        processor.requires_grad_(False).to(unet.device, unet.dtype)
        attn = layers[name].attn
        processor.replaced = (attn.processor,)
        attn.set_processor(processor)
    return pipe


def remove_linfusion(pipe: AnyModel) -> AnyModel:
    """Undo `load_linfusion`: put the original processor objects back; return `pipe`.

    A processor that another tool has since set over LinFusion's stays. Does nothing without
    LinFusion.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    for module in unet_of(pipe).model.modules():
        processor = module._modules.get("processor")
        if isinstance(processor, LinFusionProcessor) and processor.replaced:
            module.set_processor(*processor.replaced)
    return pipe


def _phi(channels: int) -> nn.Sequential:
    last = nn.Linear(channels, channels)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Linear(channels, channels), nn.LayerNorm(channels), nn.LeakyReLU(), last
    )


def _empty_processors(specs: Iterable[LayerSpec]) -> dict[str, LinFusionProcessor]:
    with torch.device("meta"):
        return {
            spec.name: LinFusionProcessor(spec.num_heads * spec.head_dim, tuned=True)
            for spec in specs
        }


def _states(processors: Mapping[str, LinFusionProcessor]) -> dict[str, dict[str, Tensor]]:
    return {name: processor.state_dict() for name, processor in processors.items()}


def _by_path(layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}.{key}": x for name, tensors in layers.items() for key, x in tensors.items()}


def _specs(path: Path, config: Mapping[str, Any]) -> dict[str, LayerSpec]:
    """The layers in a config, by name."""
    try:
        specs = {layer["name"]: LayerSpec(**layer) for layer in config["layers"]}
    except (KeyError, TypeError):
        specs = {}
    if not specs:
        names = ", ".join(field.name for field in fields(LayerSpec))
        raise ValueError(f"{path} must list layers with {names}.")
    return specs

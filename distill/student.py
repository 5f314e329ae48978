"""The student: the teacher with trained self-attention at chosen levels.

It runs AVQ like any UNet, or another function through `train_attention`; LinFusion's attention is a
processor.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from avq_diffusers import AVQConfig, AVQProcessor, select_layers
from avq_diffusers.extras.linfusion import LinFusionProcessor
from distill.attention import attend_exactly, train_attention
from distill.stored import learn_attention

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


class TrainedProcessor(AVQProcessor):
    """Runs a layer with trained float32 weights in the dtype of its tokens, or autocast's."""

    def __call__(self, attn: Attention, hidden_states: Tensor, **conditions: None) -> Tensor:
        with _autocast(hidden_states):
            return super().__call__(attn, hidden_states, **conditions)


class LinearSelfAttention(LinFusionProcessor):
    """LinFusion's attention with trained float32 weights, computed in the dtype of its tokens."""

    def forward(self, attn: Attention, hidden_states: Tensor, **conditions: None) -> Tensor:
        with _autocast(hidden_states):
            return super().forward(attn, hidden_states, **conditions)


def make_student(
    teacher: UNet2DConditionModel,
    config: AVQConfig,
    *,
    attention: str,
    diveq: bool,
    teacher_dtype: torch.dtype | None,
) -> UNet2DConditionModel:
    """Convert the teacher to `teacher_dtype`; return a UNet that shares its frozen weights.

    The self-attention layers that `config` replaces are float32 copies from before the conversion,
    with the teacher's LoRA merged. Arguments and errors as in `Objective`.
    """
    if diveq and attention != "avq":
        raise ValueError(f'diveq needs attention="avq", but got {attention!r}.')
    trained = {
        id(layer.attn): _trainable(layer.attn)
        for layer in select_layers(teacher, config.levels, config.exact, config.overrides)
    }
    nn.Module.to(teacher, dtype=teacher_dtype)  # diffusers' own `to` would warn
    shared = {id(tensor): tensor for tensor in chain(teacher.parameters(), teacher.buffers())}
    student = copy.deepcopy(teacher, {**shared, **trained})
    layers = select_layers(student, config.levels, config.exact)
    if attention == "linfusion":
        for layer in layers:
            processor = LinearSelfAttention(layer.attn.query_dim)
            layer.attn.set_processor(processor.to(student.device))
        return student
    if attention == "exact":
        train_attention(student, {layer.name: attend_exactly for layer in layers}, config)
    else:
        learn_attention(student, config, diveq=diveq)
    for layer in layers:
        layer.attn.set_processor(TrainedProcessor())
    return student


def tuned_parameters(attn: Attention) -> dict[str, Tensor]:
    """Return copies of a layer's projections and LinFusion's phi."""
    found = {
        f"{name}.{path}": value
        for name in PROJECTIONS
        for path, value in attn.get_submodule(name).named_parameters()
    }
    if isinstance(attn.processor, LinFusionProcessor):
        found |= {f"processor.{path}": phi for path, phi in attn.processor.named_parameters()}
    return {name: value.detach().clone() for name, value in found.items()}


def _trainable(attn: Attention) -> Attention:
    """Return a trainable float32 copy, with PEFT's LoRA merged."""
    attn = copy.deepcopy(attn).float()
    attn.set_processor(AttnProcessor2_0())  # other processors would block AVQ
    for name in PROJECTIONS:
        projection = attn.get_submodule(name)
        if hasattr(projection, "base_layer"):
            projection.merge()
            attn.set_submodule(name, projection.get_base_layer())
    return attn.requires_grad_(True)


def _autocast(hidden_states: Tensor) -> AbstractContextManager:
    """Compute in the dtype of half-precision tokens."""
    if hidden_states.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(hidden_states.device.type, hidden_states.dtype)

"""The student: the teacher with trained self-attentions at chosen levels.

Shapes: B batch, H heads, N tokens, D head dim.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from avq_diffusers import AVQConfig, avq_attention, select_layers
from avq_diffusers.attention.diagnostics import capture
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.extras.linfusion import LinFusionProcessor
from distill.config import ObjectiveConfig
from distill.quantizer import Quantizer

ATTENTIONS = ("avq", "linfusion", "exact")
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


class ExactSelfAttention(nn.Module):
    """Attention processor of a student layer: softmax attention with trained float32 weights.

    The layer computes in the dtype of its tokens, or of autocast.
    """

    def forward(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
    ) -> Tensor:
        with _autocast(hidden_states):
            heads = (
                projection(hidden_states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
                for projection in (attn.to_q, attn.to_k, attn.to_v)
            )
            output = self.attend(*heads)
            output = attn.to_out[0](output.transpose(1, 2).flatten(2))
            return attn.to_out[1](output) / attn.rescale_output_factor

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output (B, H, N, D) for inputs (B, H, N, D)."""
        return F.scaled_dot_product_attention(query, key, value)


class AVQSelfAttention(ExactSelfAttention):
    """AVQ attention with codewords from its own keys, of cost linear in N.

    Args:
        config: configuration of this layer, with its overrides resolved.
    """

    def __init__(self, config: AVQConfig) -> None:
        super().__init__()
        self.config = config
        self.query_order: Tensor | None = None

    def pre_forward(self, transformer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Set the query order from the input (B, C, h, w) of the transformer."""
        height, width = inputs[0].shape[-2:]
        self.query_order = query_order(height, width, self.config.query_order, inputs[0].device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.avq_attention(query, key, value, None)

    def avq_attention(
        self, query: Tensor, key: Tensor, value: Tensor, codebook: Codebook | None
    ) -> Tensor:
        """Return `avq_attention` with the configuration of this layer."""
        return avq_attention(
            query,
            key,
            value,
            codebook,
            query_order=self.query_order,
            **self.config.attention_arguments,
        )


class StoredSelfAttention(AVQSelfAttention):
    """AVQ attention with a codebook that learns from the keys.

    With `full_spawning` it is exact attention over quantized keys.

    Args:
        num_heads: H.
        head_dim: D.
        config: configuration of this layer, with its overrides resolved.
        settings: of the objective.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        config: AVQConfig,
        settings: ObjectiveConfig,
    ) -> None:
        super().__init__(config)
        self.full_spawning = settings.full_spawning
        self.key_norm = nn.LayerNorm(head_dim) if config.key_norm else nn.Identity()
        self.quantizer = Quantizer(
            num_heads,
            head_dim,
            config,
            constrain=settings.project_children,
            diveq=settings.diveq,
        )
        # Arguments of `capture` for one image of the last batch.
        self.sample: dict[str, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        leaves = self.quantizer(self.key_norm(key.float()))
        if self.training:
            self.sample = {
                "query": query[:1].detach().clone(),
                "key": leaves.key[:1].detach().clone(),
                "query_order": self.query_order,
            }
        if self.full_spawning:
            key = self.quantizer.quantized_key(leaves).to(query.dtype)
            return F.scaled_dot_product_attention(query, key, value)
        key = leaves.key.to(query.dtype)
        return self.avq_attention(query, key, value, self.quantizer.codebook())

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """Return metrics (H,) of the quantizer and, unless the codebook is flat, capture."""
        metrics = self.quantizer.diagnostics()
        if self.config.num_refined:
            metrics["capture"] = capture(
                **self.sample,
                codebook=self.quantizer.codebook(),
                num_refined=self.config.num_refined,
                codewords="stored",
                query_tile=self.config.query_tile,
                importance_tile=self.config.importance_tile,
            )
        return metrics


class LinearSelfAttention(LinFusionProcessor):
    """LinFusion's attention with trained float32 weights, computed in the dtype of its tokens."""

    def forward(self, attn: Attention, hidden_states: Tensor, **conditions: None) -> Tensor:
        with _autocast(hidden_states):
            return super().forward(attn, hidden_states, **conditions)


def make_student(
    teacher: UNet2DConditionModel,
    config: AVQConfig,
    settings: ObjectiveConfig,
    *,
    attention: str,
    teacher_dtype: torch.dtype | None,
) -> UNet2DConditionModel:
    """Convert the teacher to `teacher_dtype`; return a UNet that shares its frozen weights.

    The self-attentions that `config` replaces are float32 copies from before the conversion, with
    the teacher's LoRA merged. Arguments and errors are those of `Objective`.
    """
    if attention not in ATTENTIONS:
        raise ValueError(
            f"attention must be one of {', '.join(ATTENTIONS)}, but got {attention!r}."
        )
    if settings.diveq and not (attention == "avq" and settings.full_spawning):
        raise ValueError(
            'diveq needs attention="avq" and full_spawning, where attention is a function of the '
            "codewords that has gradients."
        )
    rank = settings.lora_rank
    if rank is not None and rank < 1:
        raise ValueError(f"lora_rank must be at least 1 or None, but got {rank}.")
    trained = {
        id(layer.attn): _trainable(layer.attn, rank)
        for layer in select_layers(teacher, config.levels, config.exact, config.overrides)
    }
    nn.Module.to(teacher, dtype=teacher_dtype)  # diffusers' own `to` would warn
    shared = {id(tensor): tensor for tensor in chain(teacher.parameters(), teacher.buffers())}
    student = copy.deepcopy(teacher, {**shared, **trained})
    for layer in select_layers(student, config.levels, config.exact):
        if attention == "avq":
            of_layer = config.for_layer(layer.name, layer.level)
            processor = (
                AVQSelfAttention(of_layer)
                if config.codewords == "means"
                else StoredSelfAttention(layer.num_heads, layer.head_dim, of_layer, settings)
            )
            layer.transformer.register_forward_pre_hook(processor.pre_forward)
        elif attention == "linfusion":
            processor = LinearSelfAttention(layer.attn.query_dim)
        else:
            processor = ExactSelfAttention()
        layer.attn.set_processor(processor.to(student.device))
    return student


def tuned_parameters(attn: Attention) -> dict[str, Tensor]:
    """Return copies of a layer's projections, with LoRAs merged, and of LinFusion's phi."""
    found = {
        f"{name}.{path}": value
        for name in PROJECTIONS
        for path, value in _merged(attn.get_submodule(name)).named_parameters()
    }
    if isinstance(attn.processor, LinFusionProcessor):
        found |= {f"processor.{path}": phi for path, phi in attn.processor.named_parameters()}
    return {name: value.detach().clone() for name, value in found.items()}


def _trainable(attn: Attention, lora_rank: int | None) -> Attention:
    attn = copy.deepcopy(attn).float()
    for name in PROJECTIONS:
        attn.set_submodule(name, _merged(attn.get_submodule(name)))
    attn.requires_grad_(True)
    if lora_rank is not None:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules=list(PROJECTIONS))
        inject_adapter_in_model(config, attn)
    return attn


def _merged(projection: nn.Module) -> nn.Module:
    """Return a projection as a plain layer, with PEFT's LoRA merged."""
    if not hasattr(projection, "base_layer"):
        return projection
    projection = copy.deepcopy(projection)
    projection.merge()
    return projection.get_base_layer()


def _autocast(hidden_states: Tensor) -> AbstractContextManager:
    """Compute in the dtype of half-precision tokens."""
    if hidden_states.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(hidden_states.device.type, hidden_states.dtype)

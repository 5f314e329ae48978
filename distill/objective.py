"""`Objective`: the distillation losses, and the codebooks that learn from the keys.

Students with own codewords have no codebooks and no commitment loss.

    loss = noise_weight noise + output_weight output + guided_weight guided
         + feature_weight feature + commitment_weight commitment

noise       MSE(student output, target)
output      MSE_w(student output, teacher output)
guided      MSE_w(guided student output, guided teacher output), by classifier-free guidance:
            empty + guidance_scale (output - empty), with the output `empty` for an empty caption
feature     mean over replaced layers of MSE_w(student attn1 output, teacher attn1 output)
commitment  mean over replaced layers of MSE(keys, their leaves): the paper's E |k - leaf|^2,
            `commitment_loss`, over the head dim

MSE_w       mean over images of w(t) MSE, with t the image's timestep. w is 1, or a weight divided
            by its mean over all timesteps: 1 / alpha(t) with weighting_scheme inverse_alpha, where
            alpha(t) = sqrt(alphas_cumprod[t]), `sampling_weights` with sampling
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from avq_diffusers import AVQConfig, select_layers
from distill.attention import CHILD
from distill.config import ObjectiveConfig
from distill.quantizer import Quantizer, recorded
from distill.stored import StoredAttention
from distill.student import make_student, tuned_parameters

Batch = Mapping[str, Tensor]

SAMPLING_STEPS = 25


class Objective(nn.Module):
    """A frozen teacher, a student that shares its frozen weights, and the losses between them.

    `student` and `teacher` are UNets. This module's parameters, buffers, state and mode only cover
    the replaced layers, so build it on its final device.

    Args:
        teacher: UNet, frozen and converted here. The student starts from copies of its replaced
            self-attention layers and shares all other tensors.
        config: levels to replace, and sizes. `codewords="means"` is for own codewords.
        settings: loss weights, and what is trained. With `diveq`, the codewords are parameters
            whose names end in `_codewords`, and forward passes in training mode use torch's global
            generators.
        attention: `"avq"`, `"linfusion"` for LinFusion's linear attention, or `"exact"` for the
            teacher's own. Only AVQ with stored codewords has codebooks.
        teacher_dtype: dtype of the teacher and of the student's frozen weights, with or without
            autocast. None keeps the teacher's. Trained weights are float32.
        alphas_cumprod: (T,), from the noise schedule. Only a `weighting_scheme` needs it.
        empty_text_states: (1, tokens, channels), the text encoder's output for an empty caption.
            Only a `guided_weight` above 0 needs it.

    Raises:
        ValueError: `teacher` has no self-attention at a level or for an override, `diveq` lacks AVQ
            attention, a `weighting_scheme` lacks `alphas_cumprod` above 0, or
            `guided_weight` lacks `empty_text_states`.
    """

    def __init__(
        self,
        teacher: UNet2DConditionModel,
        config: AVQConfig,
        settings: ObjectiveConfig,
        *,
        attention: str,
        teacher_dtype: torch.dtype | None,
        alphas_cumprod: Tensor | None,
        empty_text_states: Tensor | None,
    ) -> None:
        super().__init__()
        if settings.guided_weight > 0 and empty_text_states is None:
            raise ValueError("guided_weight needs empty_text_states.")
        teacher.requires_grad_(False).eval()
        student = make_student(
            teacher,
            config,
            attention=attention,
            diveq=settings.diveq,
            teacher_dtype=teacher_dtype,
        )
        # nn.Module's setattr would add every frozen weight to the state.
        object.__setattr__(self, "teacher", teacher)
        object.__setattr__(self, "student", student)
        layers = select_layers(student, config.levels, config.exact)
        self.names = [layer.name for layer in layers]
        self.layers = nn.ModuleList(layer.attn for layer in layers)
        # The teacher's weights may get rounded to `teacher_dtype`.
        self.original_projections = self.projections()
        self.weights = {
            "noise": settings.noise_weight,
            "output": settings.output_weight,
            "guided": settings.guided_weight,
            "feature": settings.feature_weight,
            "commitment": settings.commitment_weight,
        }
        self.is_guided = settings.guided_weight > 0
        self.guidance_scale = settings.guidance_scale
        self.has_graphs = False
        # Not buffers: those are reserved for the replaced layers.
        self.empty_text_states = empty_text_states
        self.timestep_weights: Tensor | None = None
        if settings.weighting_scheme != "none":
            weights = timestep_weights(settings.weighting_scheme, alphas_cumprod)
            self.timestep_weights = weights.to(teacher.device)

    @property
    def stored(self) -> dict[str, StoredAttention]:
        """The attention modules with codebooks, by layer name."""
        pairs = zip(self.names, self.layers, strict=True)
        found = {name: getattr(attn, CHILD, None) for name, attn in pairs}
        return {name: x for name, x in found.items() if x is not None}

    @property
    def quantizers(self) -> dict[str, Quantizer]:
        """The quantizers by layer name."""
        return {name: attention.quantizer for name, attention in self.stored.items()}

    def compile_unets(self, *, student: bool) -> None:
        """Compile the teacher and, with `student`, the student into CUDA graphs.

        Compiled for a CPU by torch 2.13, diffusers' `UpBlock2D` has wrong gradients.
        A graph launches a UNet's kernels at once; with few images per batch, separate launches take
        the host longer than the kernels take the GPU. The next call of `forward` overwrites what a
        UNet returned, so zero gradients in place, do not set them to None.
        """
        self.has_graphs = True
        for unet in (self.teacher, self.student) if student else (self.teacher,):
            unet.compile(mode="reduce-overhead")
        for parameter in self.parameters():  # or the first gradient would be in a graph's memory
            parameter.grad = torch.zeros_like(parameter)

    def forward(
        self, noisy_latents: Tensor, timesteps: Tensor, text_states: Tensor, target: Tensor
    ) -> dict[str, Tensor]:
        """Return the unweighted losses and their weighted sum `loss`, float32 scalars.

        In training mode the keys enter the commitment loss and the statistics for
        `update_codebooks`; otherwise there is neither. With a `guided_weight`, keys and features
        come from both passes, with and without caption.

        Args:
            noisy_latents: (B, 4, h, w).
            timesteps: (B,).
            text_states: (B, tokens, channels), the text encoder's output.
            target: (B, 4, h, w), the noise or velocity to predict.
        """
        if self.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if self.is_guided:
            noisy_latents, timesteps = torch.cat([noisy_latents] * 2), torch.cat([timesteps] * 2)
            text_states = torch.cat([text_states, self.empty_text_states.expand_as(text_states)])
        inputs = (noisy_latents, timesteps, text_states)
        weights = None if self.timestep_weights is None else self.timestep_weights[timesteps]
        quantizers = self.quantizers.values() if self.training else ()
        teacher_layers = [self.teacher.get_submodule(name) for name in self.names]
        with torch.no_grad(), recorded(teacher_layers) as teacher_features:
            teacher_output = predict(self.teacher, *inputs)
        # The hooks are removed before gradient checkpointing reruns the layers.
        with recorded(self.layers) as features, recorded(quantizers) as leaves:
            output = predict(self.student, *inputs)

        distances = [
            mse(features[attn], teacher_features[teacher_attn], weights)
            for attn, teacher_attn in zip(self.layers, teacher_layers, strict=True)
        ]
        losses = {"feature": torch.stack(distances).mean()}
        if self.is_guided:
            output, empty = output.chunk(2)
            teacher_output, teacher_empty = teacher_output.chunk(2)
            weights = None if weights is None else weights[: len(output)]
            guided = self.guided(output, empty)
            losses["guided"] = mse(guided, self.guided(teacher_output, teacher_empty), weights)
        losses["noise"] = mse(output, target)
        losses["output"] = mse(output, teacher_output, weights)
        if quantizers:
            commitments = [leaves[quantizer].commitment() for quantizer in quantizers]
            losses["commitment"] = torch.stack(commitments).mean()
        for quantizer in quantizers:
            quantizer.observe(leaves[quantizer])
        loss = sum(self.weights[name] * value for name, value in losses.items())
        return {**losses, "loss": loss}

    def guided(self, output: Tensor, empty: Tensor) -> Tensor:
        """Return the prediction with classifier-free guidance, float32."""
        return torch.lerp(empty.float(), output.float(), self.guidance_scale)

    @torch.no_grad()
    def teacher_keys(self, batches: Iterable[Batch]) -> Iterator[dict[str, Tensor]]:
        """Yield the teacher's keys (H, N, D) for each image, by the layers of `stored`.

        Args:
            batches: arguments of `forward`.
        """
        layers = {name: self.teacher.get_submodule(name) for name in self.stored}
        for batch in batches:
            inputs = (batch[name] for name in ("noisy_latents", "timesteps", "text_states"))
            with recorded(attn.to_k for attn in layers.values()) as projected:
                predict(self.teacher, *inputs)
            for image in range(len(batch["timesteps"])):
                yield {
                    name: projected[attn.to_k][image]
                    .unflatten(-1, (attn.heads, -1))
                    .transpose(0, 1)
                    for name, attn in layers.items()
                }

    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        """Return metrics per head, (H,), by layer name and metric, without a host sync.

        The metrics are `quantization_error`, `active_ratio` and, unless the codebook is flat,
        `capture` of `config.num_refined` parents on one image, at the cost of exact attention.
        """
        return {name: attention.diagnostics() for name, attention in self.stored.items()}

    @torch.no_grad()
    def projections(self) -> dict[str, dict[str, Tensor]]:
        """Return float32 copies of the tuned projections, by layer and by name in `attn1`.

        Names are such as `to_out.0.bias`. LinFusion's phi is included.
        """
        pairs = zip(self.names, self.layers, strict=True)
        return {name: tuned_parameters(attn) for name, attn in pairs}

    def projection_changes(self) -> dict[str, dict[str, Tensor]]:
        """Return `projections` minus the teacher's own, with its LoRA merged."""
        return {
            name: {
                key: tuned - self.original_projections[name][key] for key, tuned in layer.items()
            }
            for name, layer in self.projections().items()
        }


def predict(
    unet: UNet2DConditionModel, noisy_latents: Tensor, timesteps: Tensor, text_states: Tensor
) -> Tensor:
    """Return the UNet's output in the UNet's dtype."""
    dtype = unet.conv_in.weight.dtype  # `unet.dtype` visits every module, which takes milliseconds
    noisy_latents, text_states = noisy_latents.to(dtype), text_states.to(dtype)
    # Autocast would run the norms of a half-precision UNet in float32.
    is_half = dtype != torch.float32
    with torch.autocast(noisy_latents.device.type, enabled=False) if is_half else nullcontext():
        return unet(noisy_latents, timesteps, text_states, return_dict=False)[0]


def timestep_weights(scheme: str, alphas_cumprod: Tensor | None) -> Tensor:
    """Return the weights of a scheme, normalized to mean 1, (T,).

    Raises:
        ValueError: `alphas_cumprod` is missing or not above 0.
    """
    if alphas_cumprod is None or not alphas_cumprod.all():
        raise ValueError(
            f"weighting_scheme {scheme} needs a noise schedule with alphas_cumprod above 0."
        )
    inverse_alpha = scheme == "inverse_alpha"
    weights = alphas_cumprod**-0.5 if inverse_alpha else sampling_weights(alphas_cumprod)
    return weights / weights.mean()


def sampling_weights(alphas_cumprod: Tensor) -> Tensor:
    """Approximate weight (T,) of a predicted noise's squared error in the image's squared error.

    A DDIM step from timestep t to s, the next of `SAMPLING_STEPS` timesteps, moves latents / alpha
    by sigma(t) - sigma(s) times the predicted noise, where sigma is noise over signal. With latents
    of unit variance, later steps keep 1 / sqrt(1 + sigma(t)^2) = alpha(t) of an error.
    """
    sigmas = ((1 - alphas_cumprod) / alphas_cumprod).sqrt()
    stride = max(1, len(sigmas) // SAMPLING_STEPS)
    steps = sigmas - F.pad(sigmas, (stride, 0))[: len(sigmas)]
    return steps.square() * alphas_cumprod


def mse(a: Tensor, b: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean squared error in float32, with a weight per image (B,)."""
    if weights is None:
        return F.mse_loss(a.float(), b.float())
    errors = (a.float() - b.float()).square().flatten(1).mean(dim=1)
    return (errors * weights).mean()

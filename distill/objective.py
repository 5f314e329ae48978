"""`Objective`: what distillation minimizes, and the codebooks that learn along with it.

    loss = noise_weight noise + output_weight output
         + feature_weight feature + commitment_weight commitment

noise       MSE(student output, target)
output      MSE(student output, teacher output)
feature     mean over replaced layers of MSE(student attn1 output, teacher attn1 output)
commitment  mean over replaced layers of MSE(keys, their leaves): the paper's E |k - leaf|^2,
            `commitment_loss`, over the head dim
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.ema import batch_statistics
from avq_diffusers.codebook.kmeans import fit_codebook
from distill.quantizer import Quantizer
from distill.student import AVQSelfAttention, make_student, tuned_parameters

Batch = Mapping[str, Tensor]


class Objective(nn.Module):
    """A frozen teacher, a student that shares its frozen part, and the losses between them.

    Parameters, buffers, state and mode of this module are those of the replaced layers only, so
    build it on the device where it stays. `student` and `teacher` are the UNets.

    Args:
        teacher: frozen and converted here; its replaced self-attentions are where the student
            starts, and all else is one set of tensors for both.
        config: which levels are replaced, and the sizes of their codebooks.
        attention: `"avq"`; `"linfusion"` for LinFusion's linear attention, or `"exact"` for the
            teacher's own, both without codebooks.
        full_spawning: refine all parents in training, whatever `config.num_refined` says.
        project_children: keep the children of each parent averaging to it.
        diveq: let gradients move the codewords, in place of EMA (paper, appendix "Alternative VQ
            Training Methods"). Their names end in `_codewords`. Forward passes in training mode
            draw from torch's global generators.
        lora_rank: train updates of this rank in place of the full projections.
        noise_weight, output_weight, feature_weight, commitment_weight: of the losses.
        teacher_dtype: of the teacher, and so of the student's frozen part, which compute in it with
            and without autocast; trained weights are float32 and are cast where they meet it.
            None keeps the teacher's.

    Raises:
        ValueError: `attention` is unknown, `teacher` has no self-attention at a level or of an
            override, `lora_rank` is below 1, or `diveq` comes without AVQ attention and full
            spawning.
    """

    def __init__(
        self,
        teacher: UNet2DConditionModel,
        config: AVQConfig,
        *,
        attention: str = "avq",
        full_spawning: bool = True,
        project_children: bool = True,
        diveq: bool = False,
        lora_rank: int | None = None,
        noise_weight: float = 1.0,
        output_weight: float = 0.5,
        feature_weight: float = 0.5,
        commitment_weight: float = 0.25,
        teacher_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        teacher.requires_grad_(False).eval()
        student = make_student(
            teacher,
            config,
            attention=attention,
            full_spawning=full_spawning,
            project_children=project_children,
            diveq=diveq,
            lora_rank=lora_rank,
            teacher_dtype=teacher_dtype,
        )
        # Past nn.Module, which would make every frozen weight part of the state.
        object.__setattr__(self, "teacher", teacher)
        object.__setattr__(self, "student", student)
        layers = select_layers(student, config.levels, config.exact)
        self.names = [layer.name for layer in layers]
        self.layers = nn.ModuleList(layer.attn for layer in layers)
        # The teacher's own may have lost digits to `teacher_dtype`.
        self.original_projections = self.projections()
        self.weights = {
            "noise": noise_weight,
            "output": output_weight,
            "feature": feature_weight,
            "commitment": commitment_weight,
        }

    @property
    def processors(self) -> dict[str, AVQSelfAttention]:
        """The processors that hold codebooks, by layer name."""
        pairs = zip(self.names, (attn.processor for attn in self.layers), strict=True)
        return {name: found for name, found in pairs if isinstance(found, AVQSelfAttention)}

    @property
    def quantizers(self) -> dict[str, Quantizer]:
        """The codebooks in the making, by layer name."""
        return {name: processor.quantizer for name, processor in self.processors.items()}

    def forward(
        self, noisy_latents: Tensor, timesteps: Tensor, text_states: Tensor, target: Tensor
    ) -> dict[str, Tensor]:
        """Return the unweighted losses and their weighted sum `loss`, float32 scalars.

        In training mode the keys go into the statistics for `update_codebooks`.

        Args:
            noisy_latents: (B, 4, h, w).
            timesteps: (B,).
            text_states: (B, tokens, channels) of the text encoder.
            target: (B, 4, h, w), what the UNet should predict.
        """
        inputs = (noisy_latents, timesteps, text_states)
        quantizers = self.quantizers.values()
        teacher_layers = [self.teacher.get_submodule(name) for name in self.names]
        with torch.no_grad(), recorded(teacher_layers) as teacher_features:
            teacher_output = predict(self.teacher, *inputs)
        # The hooks are gone when gradient checkpointing runs the layers again.
        with recorded(self.layers) as features, recorded(quantizers) as leaves:
            output = predict(self.student, *inputs)

        losses = {"noise": mse(output, target), "output": mse(output, teacher_output)}
        losses["feature"] = mean(
            mse(features[attn], teacher_features[teacher_attn])
            for attn, teacher_attn in zip(self.layers, teacher_layers, strict=True)
        )
        if quantizers:
            losses["commitment"] = mean(leaves[quantizer].commitment() for quantizer in quantizers)
        if self.training:
            for quantizer in quantizers:
                quantizer.observe(leaves[quantizer])
        loss = sum(self.weights[name] * value for name, value in losses.items())
        return {**losses, "loss": loss}

    @torch.no_grad()
    def start_codebooks(
        self,
        batches: Sequence[Batch],
        *,
        samples_per_step: int,
        keys_per_layer: int = 32768,
        seed: int = 0,
    ) -> None:
        """Fit the codebooks to keys of the teacher by k-means; those of process 0 count.

        Args:
            batches: a few batches of arguments of `forward`, of one latent size. Their split does
                not matter.
            samples_per_step: pictures per optimizer step over micro-batches and processes. It
                tells how many keys a codeword stands for, so that the first updates do not jump.
            keys_per_layer: size of each layer's sample.
            seed: of the samples and of k-means.

        Raises:
            ValueError: there are fewer keys than parents.
        """
        sampled = self._sample_keys(batches, keys_per_layer, seed)
        for name, processor in self.processors.items():
            keys, num_tokens = sampled[name]
            quantizer = processor.quantizer
            codebook = fit_codebook(
                keys,
                processor.config.num_parents,
                processor.config.num_children,
                seed=seed,
                constrain=quantizer.constrain,
            )
            _, counts = batch_statistics(keys, codebook)
            quantizer.start(codebook, counts * (samples_per_step * num_tokens / keys.shape[1]))
            if dist.is_initialized():
                for tensor in quantizer.state_dict().values():
                    dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def update_codebooks(self, decay: float) -> None:
        """Let all keys since the last update move the codebooks, once per optimizer step, after it.

        With DiVeQ the optimizer has moved the codewords; their statistics follow.

        Raises:
            RuntimeError: there was no forward in training mode since then.
        """
        for quantizer in self.quantizers.values():
            if quantizer.statistics is None:
                raise RuntimeError("update_codebooks needs a training forward since the last one.")
            key_sums, counts = quantizer.statistics
            if dist.is_initialized():
                dist.all_reduce(key_sums)
                dist.all_reduce(counts)
            quantizer.update(key_sums, counts, decay)
            quantizer.statistics = None

    @torch.no_grad()
    def reassign_dead(self, *, threshold: float, seed: int) -> None:
        """Move codewords of fewer than `threshold` keys per step to keys of the last batch.

        Call it after `update_codebooks`: statistics in the making are those of the old codewords.

        Args:
            threshold: EMA count below which a codeword is dead.
            seed: of the draws, equal on all processes, another one at every step.

        Raises:
            RuntimeError: there was no forward in training mode yet.
        """
        for processor in self._judged().values():
            if dist.is_initialized():
                dist.broadcast(processor.quantizer.kept_keys, src=0)
            processor.quantizer.reassign_dead(threshold=threshold, seed=seed)

    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        """Figures per head, (H,), by layer name; no host waits.

        `quantization_error` and `active_ratio`; and `capture` of `config.num_refined` parents on
        one picture, at the cost of exact attention, unless the codebook is flat.

        Raises:
            RuntimeError: there was no forward in training mode yet.
        """
        return {name: processor.diagnostics() for name, processor in self._judged().items()}

    @torch.no_grad()
    def codebooks(self) -> dict[str, Codebook]:
        """Copies of the codebooks by layer name."""
        return {
            name: Codebook(*(x.clone() for x in vars(quantizer.codebook()).values()))
            for name, quantizer in self.quantizers.items()
        }

    @torch.no_grad()
    def projections(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the tuned projections of the attn1 by layer name, float32.

        They have names in `attn1` such as `to_out.0.bias`, and a LoRA is merged into them; with
        LinFusion's attention its phi are among them.
        """
        pairs = zip(self.names, self.layers, strict=True)
        return {name: tuned_parameters(attn) for name, attn in pairs}

    def projection_changes(self) -> dict[str, dict[str, Tensor]]:
        """What training changed: `projections` minus those of the teacher, its LoRA merged."""
        return {
            name: {
                key: tuned - self.original_projections[name][key] for key, tuned in layer.items()
            }
            for name, layer in self.projections().items()
        }

    def key_norms(self) -> dict[str, nn.LayerNorm]:
        """The learned norms of the keys by layer name; empty unless `config.key_norm`."""
        found = {name: processor.key_norm for name, processor in self.processors.items()}
        return {name: norm for name, norm in found.items() if isinstance(norm, nn.LayerNorm)}

    def _sample_keys(
        self, batches: Sequence[Batch], keys_per_layer: int, seed: int
    ) -> dict[str, tuple[Tensor, int]]:
        """By layer a sample (H, S, D) of the teacher's keys, and the tokens of a picture."""
        generator = torch.Generator().manual_seed(seed)
        num_pictures = sum(len(batch["timesteps"]) for batch in batches)
        num_kept = math.ceil(keys_per_layer / num_pictures)
        teacher_layers = {name: self.teacher.get_submodule(name) for name in self.processors}
        samples = {name: [] for name in self.processors}
        num_tokens = {}
        for batch in batches:
            with recorded(attn.to_k for attn in teacher_layers.values()) as projected:
                predict(
                    self.teacher, batch["noisy_latents"], batch["timesteps"], batch["text_states"]
                )
            keys = {}
            for name, processor in self.processors.items():
                attn = teacher_layers[name]
                heads = projected[attn.to_k].unflatten(-1, (attn.heads, -1)).transpose(1, 2)
                keys[name] = processor.key_norm(heads.float())
                num_tokens[name] = heads.shape[2]
            for picture in range(len(batch["timesteps"])):
                for name, heads in keys.items():
                    kept = torch.randperm(num_tokens[name], generator=generator)[:num_kept]
                    samples[name].append(heads[picture][:, kept.to(heads.device)])
        return {name: (torch.cat(samples[name], dim=1), num_tokens[name]) for name in samples}

    def _judged(self) -> dict[str, AVQSelfAttention]:
        processors = self.processors
        if any(processor.quantizer.kept_keys is None for processor in processors.values()):
            raise RuntimeError("codebooks are judged by the keys of a training forward; run one.")
        return processors


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Any]]:
    """Collect what the modules return while the block runs."""
    outputs = {}

    def record(module: nn.Module, inputs: tuple, output: Any) -> None:
        outputs[module] = output

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(record))
        yield outputs


def predict(
    unet: UNet2DConditionModel, noisy_latents: Tensor, timesteps: Tensor, text_states: Tensor
) -> Tensor:
    """The UNet's output, in its own dtype."""
    noisy_latents, text_states = noisy_latents.to(unet.dtype), text_states.to(unet.dtype)
    # Autocast would widen what passes the norms of a half-precision UNet to float32.
    is_half = unet.dtype != torch.float32
    with torch.autocast(noisy_latents.device.type, enabled=False) if is_half else nullcontext():
        return unet(noisy_latents, timesteps, text_states, return_dict=False)[0]


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared error in float32."""
    return F.mse_loss(a.float(), b.float())


def mean(values: Iterable[Tensor]) -> Tensor:
    """Mean of scalars."""
    return torch.stack(list(values)).mean()

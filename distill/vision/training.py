"""Fine-tuning with transformers' `Trainer`."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from avq_diffusers import AVQConfig
from avq_diffusers.files import write_text
from distill.attention import CHILD
from distill.checkpointing.folders import DIGESTS, check_digests, write_digests
from distill.config_file import differing_keys, plain_values
from distill.data.stream import report_worker_errors
from distill.quantizer import recorded
from distill.stored import (
    StoredAttention,
    learned_codebooks,
    start_codebooks,
    update_codebooks,
)
from distill.vision.attention import keys_of_images, remove_attention, set_attention
from distill.vision.config import FIXED, VisionConfig, parse_attention
from distill.vision.images import IGNORED, Prepared, open_images
from distill.vision.models import at_size_of, load_model

METRICS = {"classification": "top1", "segmentation": "miou"}
CONFIG_FILE = "config.json"
# Fields that a resumed run may change.
FREE = tuple(
    f"trainer.{name}" for name in ("logging_steps", "save_total_limit", "dataloader_num_workers")
)
HEADS = ("classifier", "head", "neck", "auxiliary_head")


class Learner(nn.Module):
    """A model that takes uint8 images and, in training, adds the commitment loss to its loss.

    `layers` are the layers with codebooks that learn.
    """

    def __init__(self, model: PreTrainedModel, config: VisionConfig) -> None:
        super().__init__()
        self.model = model
        self.layers: Mapping[str, StoredAttention] = {}
        self.commitment_weight = config.codebooks.commitment_weight
        for name, values in (("mean", config.data.mean), ("std", config.data.std)):
            scaled = 255 * torch.tensor(values)[:, None, None]
            self.register_buffer(name, scaled, persistent=False)

    def normalized(self, pixels: Tensor) -> Tensor:
        """The model's input for uint8 images (B, 3, S, S)."""
        return (pixels.to(self.mean.device).float() - self.mean) / self.std

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return `loss` and `logits`, for labels from `Prepared`."""
        with recorded(layer.quantizer for layer in self.layers.values()) as leaves:
            outputs = self.model(pixel_values=self.normalized(pixel_values), labels=labels.long())
        loss = outputs.loss
        if leaves:  # only in training mode
            commitment = torch.stack([found.commitment() for found in leaves.values()]).mean()
            loss = loss + self.commitment_weight * commitment
        for quantizer, found in leaves.items():
            quantizer.observe(found)
        return {"loss": loss, "logits": outputs.logits}

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """For `Trainer`."""
        self.model.gradient_checkpointing_enable(**options)


class TrainingSteps(TrainerCallback):
    """What `Trainer` lacks: epochs for random crops, codebook updates, stopping on a NaN loss.

    The codebooks are updated from the keys of all micro-batches, once per optimizer step.
    """

    def __init__(
        self, config: VisionConfig, layers: Mapping[str, StoredAttention], images: Prepared
    ) -> None:
        self.task, self.settings = config.task, config.codebooks
        self.layers, self.images = layers, images

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.images.epoch = int(state.epoch + 1e-6)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        step = state.global_step
        update_codebooks(self.layers, self.settings, step, args.seed + step)

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_digests(folder)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **objects: Any
    ) -> None:
        loss = logs.get("loss", logs.get("train_loss", 0))  # at the end, the mean of all losses
        if not math.isfinite(loss):
            advice = "lower learning_rate, or choose bf16 or float32"
            if self.task == "segmentation":
                advice += ", or leave out images without a label: a batch needs one that is not 0"
            raise FloatingPointError(f"the loss is {loss} at step {state.global_step}; {advice}.")


@dataclass(frozen=True)
class VisionRun:
    """A model with its attention, ready to be trained or scored.

    Attributes:
        config: the run's configuration.
        model: the model with its attention.
        avq: configuration of the attention; None for exact attention.
        layers: layers with codebooks that learn, by name.
        trainer: trains the `Learner` around the model.
        images: some training images (B, 3, S, S), in the model's format.
    """

    config: VisionConfig
    model: PreTrainedModel
    avq: AVQConfig | None
    layers: Mapping[str, StoredAttention]
    trainer: Trainer
    images: Tensor

    def start_codebooks(self) -> None:
        """Fit the codebooks that learn to keys of the model."""
        args = self.trainer.args
        per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        settings = self.config.codebooks
        start_codebooks(
            self.layers,
            keys_of_images(self.model, self.images),
            num_images=len(self.images),
            images_per_step=per_step,
            keys_per_layer=settings.keys_per_layer,
            seed=args.seed,
            start_key_norms=True,
        )

    def save(self, output: Path) -> None:
        """Write `model`, with exact attention, and for stored codewords `codebooks`."""
        if self.layers:
            learned = learned_codebooks(self.model, self.avq, self.layers)
            learned.save_pretrained(output / "codebooks")
        if self.avq is not None:
            remove_attention(self.model)
        self.model.save_pretrained(output / "model")


def open_run(config: VisionConfig, output: Path) -> VisionRun:
    """Open a run's data and model; codebooks that learn are still NaN.

    Args:
        config: the run's configuration.
        output: folder for checkpoints.

    Raises:
        OSError, ValueError: data or model cannot be read, or do not fit together.
        TypeError: `TrainingArguments` has no such field.
    """
    args = TrainingArguments(
        output_dir=str(output),
        use_cpu=not torch.cuda.is_available(),
        metric_for_best_model=METRICS[config.task],
        **FIXED,
        **config.trainer,
    )
    args._n_gpu = 1  # with several visible GPUs Trainer would use `nn.DataParallel`
    (training, validation), classes = open_images(config, args.seed)
    if len(training) < args.train_batch_size:
        raise ValueError(
            f"training needs at least {args.train_batch_size} images, one batch, but got "
            f"{len(training)}."
        )
    torch.manual_seed(args.seed)
    model = load_model(config, classes)
    learner = Learner(model, config)
    images = learner.normalized(training.first(config.codebooks.start_images))
    avq = parse_attention(config.attention, key_norm=config.codebooks.key_norm)
    layers = set_attention(model, avq, diveq=config.codebooks.diveq)
    learner.layers = layers
    trainer = Trainer(
        model=learner,
        args=args,
        train_dataset=training,
        eval_dataset=validation,
        data_collator=torch.utils.data.default_collate,
        compute_metrics=metric_of(config.task, model.config.num_labels),
        preprocess_logits_for_metrics=partial(predictions, config.task),
        callbacks=[TrainingSteps(config, layers, training)],
        optimizers=(make_optimizer(model, args, config.head_rate), None),
    )
    return VisionRun(config, model, avq, layers, trainer, images.to(args.device))


def make_optimizer(
    model: nn.Module, args: TrainingArguments, head_rate: float
) -> torch.optim.Optimizer:
    """AdamW; the head has its own rate, and vectors and codewords have no weight decay."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim > 1 and CHILD not in name
        groups.setdefault((name.split(".")[0] in HEADS, decays), []).append(parameter)
    settings = [
        {
            "params": parameters,
            "lr": args.learning_rate * (head_rate if is_head else 1),
            "weight_decay": args.weight_decay * decays,
        }
        for (is_head, decays), parameters in groups.items()
    ]
    betas = args.adam_beta1, args.adam_beta2
    return torch.optim.AdamW(settings, betas=betas, eps=args.adam_epsilon)


def metric_of(task: str, num_labels: int) -> Callable[..., dict[str, float]]:
    """Accumulate batches of predictions; at the last one return the total score, in percent."""
    metric = (
        MulticlassJaccardIndex(num_labels, ignore_index=IGNORED, validate_args=False)
        if task == "segmentation"
        else MulticlassAccuracy(num_labels, average="micro", validate_args=False)
    )

    def add(batch: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        metric.to(batch.predictions.device).update(batch.predictions, batch.label_ids.long())
        if not compute_result:
            return {}
        score = 100 * float(metric.compute())
        metric.reset()
        return {METRICS[task]: score}

    return add


def predictions(task: str, logits: Tensor, labels: Tensor) -> Tensor:
    """The predicted classes, of the shape of the labels."""
    return (at_size_of(labels, logits) if task == "segmentation" else logits).argmax(dim=1)


def fine_tune(config: VisionConfig, output: Path, *, resume: bool) -> dict[str, float]:
    """Fine-tune a model and return its metrics on the validation images, such as `eval_top1`.

    Writes `model` to `output` and, for stored codewords, `codebooks` for `apply_avq`.

    Args:
        config: the run's configuration.
        output: the run's folder.
        resume: continue from the newest checkpoint, if there is one.

    Raises:
        OSError, ValueError, TypeError: as `open_run`, or the folder holds a run and `resume` is
            False, its settings differ, or its newest checkpoint is damaged.
        FloatingPointError: the loss is not finite.
    """
    is_main = PartialState().is_main_process
    if is_main:
        _check_folder(output / CONFIG_FILE, config, resume)
    found = newest_checkpoint(output)
    if found is not None:
        check_digests(found)
    run = open_run(config, output)
    if run.layers and found is None:
        run.start_codebooks()
    if is_main:  # not before, so that a folder stays free until everything fits
        write_text(output / CONFIG_FILE, json.dumps(plain_values(config), indent=2) + "\n")
    with report_worker_errors():
        run.trainer.train(resume_from_checkpoint=None if found is None else str(found))
        figures = run.trainer.evaluate()
    if is_main:
        run.save(output)
        print(f"{output / 'model'} holds the model, for from_pretrained.")
        if run.layers:
            print(
                f"{output / 'codebooks'} holds its codebooks: apply_avq(model, "
                f'AVQCodebooks.from_pretrained("{output / "codebooks"}"))'
            )
    return figures


def newest_checkpoint(output: Path) -> Path | None:
    """The newest complete checkpoint; a killed run can leave one without its digests."""
    found = [path.parent for path in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{DIGESTS}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _check_folder(path: Path, config: VisionConfig, resume: bool) -> None:
    """Check that a run with this configuration may write the folder."""
    if not path.is_file():
        return
    if not resume:
        raise ValueError(f"{path.parent} holds a run: add --resume or choose another --output.")
    differing = differing_keys(config, json.loads(path.read_text()), ignored=FREE)
    if differing:
        raise ValueError(
            f"{path.parent} holds a run with other settings ({', '.join(differing)}); choose "
            "another --output."
        )

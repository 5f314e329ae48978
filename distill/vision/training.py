"""Fine-tuning by transformers' `Trainer`."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from avq_diffusers.codebook.ema import ema_decay
from avq_diffusers.files import atomic_write
from distill.attention import CHILD
from distill.config_file import differing_keys, plain_values
from distill.quantizer import recorded
from distill.stored import StoredAttention
from distill.vision.attention import (
    learned_codebooks,
    remove_attention,
    set_attention,
    start_codebooks,
)
from distill.vision.config import CodebookConfig, VisionConfig, parse_attention
from distill.vision.images import IGNORED, Collator, Prepared, Shuffled, open_images, told_briefly
from distill.vision.models import at_size_of, load_classifier, load_segmenter

METRICS = {"classification": "top1", "segmentation": "miou"}
CONFIG_FILE, WEIGHTS = "config.json", "model.safetensors"
FREE = ("log_every", "keep_checkpoints", "data.workers", "data.preload")  # a resumed run may differ
HEADS = ("classifier", "head", "neck", "auxiliary_head")


class VisionTrainer(Trainer):
    """A `Trainer` that adds the commitment loss. The head has a learning rate of its own.

    Args:
        layers: those with codebooks that learn.
        config: of the run.
        **options: of `Trainer`.
    """

    def __init__(
        self, *, layers: Sequence[StoredAttention], config: VisionConfig, **options: Any
    ) -> None:
        super().__init__(**options)
        self.layers, self.config = layers, config
        # Losses are means over their batch, so accumulated ones are to be averaged.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        with recorded(layer.quantizer for layer in self.layers) as leaves:
            outputs = model(**inputs)
        loss = outputs.loss
        if leaves:  # in training mode only
            commitment = torch.stack([found.commitment() for found in leaves.values()]).mean()
            loss = loss + self.config.codebooks.commitment_weight * commitment
        for quantizer, found in leaves.items():
            quantizer.observe(found)
        return (loss, outputs) if return_outputs else loss

    # Trainer's own checkpoints have the names of older versions of transformers; it reads them
    # without those names, so a resumed model would lose its attention weights.
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / WEIGHTS))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        load_model(self.model, Path(resume_from_checkpoint) / WEIGHTS)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _get_train_sampler(self, train_dataset: Prepared | None = None) -> Shuffled:
        return Shuffled(self.train_dataset)

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        config = self.config
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            is_head = name.split(".")[0] in HEADS
            decays = parameter.ndim > 1 and CHILD not in name
            groups.setdefault((is_head, decays), []).append(parameter)
        rates = config.learning_rate, config.head_learning_rate or config.learning_rate
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": parameters,
                    "lr": rates[is_head],
                    "weight_decay": config.weight_decay * decays,
                }
                for (is_head, decays), parameters in groups.items()
            ]
        )
        return self.optimizer


class UpdateCodebooks(TrainerCallback):
    """Applies the statistics of the keys once per optimizer step, and revives dead codewords."""

    def __init__(self, layers: Sequence[StoredAttention], settings: CodebookConfig) -> None:
        self.layers, self.settings = layers, settings

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        settings, step = self.settings, state.global_step
        decay = ema_decay(
            step,
            round(settings.decay_warmup * state.max_steps),
            settings.decay_start,
            settings.decay_end,
        )
        is_due = settings.dead_threshold is not None and (step + 1) % settings.dead_every == 0
        for layer in self.layers:
            layer.quantizer.update(decay)
            if is_due:
                layer.quantizer.reassign_dead(
                    threshold=settings.dead_threshold, seed=args.seed + step
                )


class SetEpoch(TrainerCallback):
    """Tells the images their epoch; the data loader of a resumed epoch would say 0."""

    def __init__(self, images: Prepared) -> None:
        self.images = images

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.images.epoch = int(state.epoch + 1e-6)


class StopOnNonFiniteLoss(TrainerCallback):
    """Ends a run at a line of the log, the last of which has the mean of all losses."""

    def __init__(self, task: str) -> None:
        self.advice = "lower learning_rate, or choose precision bf16 or fp32"
        if task == "segmentation":
            self.advice += ", or leave out images without a label: a batch needs one that is not 0"

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **objects: Any
    ) -> None:
        loss = logs.get("loss", logs.get("train_loss", 0))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {state.global_step}; {self.advice}."
            )


def build_model(config: VisionConfig, classes: Sequence[str] | None) -> PreTrainedModel:
    """The model of a run, with exact attention and float32 weights.

    Raises:
        OSError, ValueError: as `load_classifier` and `load_segmenter`, or the weights are damaged.
    """
    try:
        if config.task == "segmentation":
            return load_segmenter(config.model, config.data.num_labels)
        return load_classifier(config.model, classes)
    except SafetensorError as error:
        raise ValueError(f"the weights of {config.model} cannot be read: {error}.") from error


def make_trainer(
    config: VisionConfig,
    model: PreTrainedModel,
    layers: Sequence[StoredAttention],
    training: Prepared,
    validation: Prepared,
    output: Path,
    *,
    quiet: bool = False,
) -> VisionTrainer:
    """A trainer that is ready for its next step.

    Args:
        config: of the run.
        model: with its attention.
        layers: those with codebooks that learn.
        training, validation: images.
        output: folder for checkpoints.
        quiet: print nothing.

    Raises:
        ValueError: the batch does not split evenly over processes, or the device does not support
            the precision.
    """
    has_gpu = torch.cuda.is_available()
    if config.precision == "fp16" and not has_gpu:
        raise ValueError("precision fp16 needs a GPU; choose bf16 or fp32 on a CPU.")
    saves = "no" if config.evaluate_every is None else "steps"
    metric = METRICS[config.task]
    arguments = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=config.micro_batch_size,
        per_device_eval_batch_size=config.micro_batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant_with_warmup" if config.schedule == "constant" else "cosine",
        warmup_steps=config.warmup,
        max_grad_norm=config.max_grad_norm,
        fp16=config.precision == "fp16",
        bf16=config.precision == "bf16",
        use_cpu=not has_gpu,
        seed=config.seed,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # it would wait for the device in each step
        eval_strategy=saves,
        save_strategy=saves,
        eval_steps=config.evaluate_every,
        save_steps=config.evaluate_every or 1,
        save_total_limit=config.keep_checkpoints,
        load_best_model_at_end=config.best,
        metric_for_best_model=metric,
        greater_is_better=True,
        batch_eval_metrics=True,
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_num_workers=0 if config.data.preload else config.data.workers,
        ddp_broadcast_buffers=False,  # codebooks are updated alike in all processes
        report_to="none",
    )
    images = config.micro_batch_size * arguments.world_size
    if config.batch_size % images:
        raise ValueError(
            f"batch_size must be a multiple of micro_batch_size times processes, {images}, but got "
            f"{config.batch_size}."
        )
    arguments.gradient_accumulation_steps = config.batch_size // images
    callbacks: list[TrainerCallback] = [SetEpoch(training), StopOnNonFiniteLoss(config.task)]
    if layers:
        callbacks.append(UpdateCodebooks(layers, config.codebooks))
    trainer = VisionTrainer(
        layers=layers,
        config=config,
        model=model,
        args=arguments,
        data_collator=Collator(config.data),
        train_dataset=training,
        eval_dataset=validation,
        compute_metrics=BatchMetric(config.task, model.config.num_labels),
        preprocess_logits_for_metrics=partial(predictions, config.task),
        callbacks=callbacks,
    )
    if quiet:
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
    return trainer


class BatchMetric:
    """Top-1 accuracy or mean IoU over all validation images, in percent."""

    def __init__(self, task: str, num_labels: int) -> None:
        self.name = METRICS[task]
        self.metric: Metric = (
            MulticlassJaccardIndex(num_labels, ignore_index=IGNORED, validate_args=False)
            if task == "segmentation"
            else MulticlassAccuracy(num_labels, average="micro", validate_args=False)
        )

    def __call__(self, batch: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        """Add a batch; at the last one return the score."""
        self.metric.to(batch.predictions.device).update(batch.predictions, batch.label_ids)
        if not compute_result:
            return {}
        score = 100 * float(self.metric.compute())
        self.metric.reset()
        return {self.name: score}


def predictions(task: str, logits: Any, labels: Tensor) -> Tensor:
    """The predicted classes, of the shape of the labels."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    if task == "segmentation":
        logits = at_size_of(labels, logits)
    return logits.argmax(dim=1)


def fine_tune(config: VisionConfig, output: Path, *, resume: bool) -> dict[str, float]:
    """Fine-tune a model and return its scores.

    `output` gets `model` and, for stored codewords, `codebooks`, for `apply_avq`. A baseline's own
    weights are part of `model`.

    Args:
        config: of the run.
        output: folder of the run.
        resume: continue from the newest checkpoint, if there is one.

    Raises:
        OSError, ValueError: data or model cannot be read, or do not fit together; the folder holds
            a run, and `resume` is False or the run has other settings.
        FloatingPointError: the loss is not finite.
    """
    found = _claim(output, config, resume=resume)
    training, classes = open_images(config, "training")
    validation, _ = open_images(config, "validation")
    if len(training) < config.batch_size:
        raise ValueError(
            f"there must be at least batch_size = {config.batch_size} training images, but got "
            f"{len(training)}."
        )
    torch.manual_seed(config.seed)
    model = build_model(config, classes)
    images = first_images(training, config.codebooks.start_images, config)
    attention = parse_attention(config.attention, key_norm=config.codebooks.key_norm)
    layers = set_attention(model, attention, config.codebooks, images[0], seed=config.seed)
    trainer = make_trainer(config, model, layers, training, validation, output)
    if layers and found is None:
        start_codebooks(
            model,
            layers,
            config.codebooks,
            [batch.to(trainer.args.device) for batch in images],
            images_per_step=config.batch_size,
            seed=config.seed,
        )
    with told_briefly():
        trainer.train(resume_from_checkpoint=None if found is None else str(found))
        scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        if layers:
            learned_codebooks(model, attention, layers).save_pretrained(output / "codebooks")
        if attention.avq is not None:
            remove_attention(model)
        model.save_pretrained(output / "model")
    trainer.save_metrics("eval", scores)
    return scores


def newest_checkpoint(output: Path) -> Path | None:
    """The newest complete checkpoint: a kill can leave one without its last file."""
    states = output.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    steps = {}
    for path in states:
        with suppress(ValueError, KeyError):
            steps[json.loads(path.read_text())["global_step"]] = path.parent
    return steps[max(steps)] if steps else None


def _claim(output: Path, config: VisionConfig, *, resume: bool) -> Path | None:
    """Take the folder for a run of this configuration; return the checkpoint to go on from."""
    state = PartialState()
    if state.is_main_process:
        _check_folder(output / CONFIG_FILE, config, resume)
    state.wait_for_everyone()
    return newest_checkpoint(output)


def _check_folder(path: Path, config: VisionConfig, resume: bool) -> None:
    if not path.is_file():
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(plain_values(config), indent=2) + "\n")
        return
    if not resume:
        raise ValueError(f"{path.parent} holds a run: add --resume or choose another --output.")
    saved = json.loads(path.read_text())
    if differing := differing_keys(config, saved, ignored=FREE):
        raise ValueError(
            f"{path.parent} holds a run with other settings ({', '.join(differing)}); choose "
            "another --output."
        )


def environment() -> dict[str, str]:
    """Device and versions of the running process."""
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def first_images(training: Prepared, count: int, config: VisionConfig) -> list[Tensor]:
    """The first training images, not augmented, in micro-batches (B, 3, S, S)."""
    plain = Prepared(training.samples, config.data, training=False, seed=0)
    collate = Collator(config.data)
    chosen = range(min(count, len(plain)))
    size = config.micro_batch_size
    return [
        collate([plain[i] for i in chosen[start : start + size]])["pixel_values"]
        for start in range(0, len(chosen), size)
    ]

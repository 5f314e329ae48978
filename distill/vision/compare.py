"""Attentions side by side: a teacher is fine-tuned, then every attention from it, with equal steps.

Each result is a line of `rows.jsonl`, written at once. A repeated call goes on where it stopped.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from avq_diffusers import AVQConfig, avq_attention, select_layers, set_num_refined
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.files import read_log
from avq_diffusers.options import first_line
from distill.attention import with_sinks
from distill.config_file import plain_values
from distill.stored import StoredAttention
from distill.vision.attention import remove_attention, set_attention, start_codebooks
from distill.vision.calls import Call, evaluating, observe
from distill.vision.config import AttentionName, VisionConfig, parse_attention
from distill.vision.images import Prepared, open_images, told_briefly
from distill.vision.training import METRICS, build_model, environment, first_images, make_trainer

ROWS, TEACHER = "rows.jsonl", "teacher"
FLAT = "flat@"
MOST_FLAT, FLAT_STEP = 512, 32
TIMED_IMAGES = 4  # as the paper
HALF = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Row = dict[str, Any]


@dataclass
class Comparison:
    """The parts that all attentions share.

    Args:
        config: of the teacher.
        output: folder of the rows.
        model: with exact attention between two attentions.
        weights: of the teacher.
        training, validation: images.
        images: a few training images, for codebooks.
        timed: the attention call whose time is taken.
        deadline: on the clock of `time.monotonic`.
    """

    config: VisionConfig
    output: Path
    model: PreTrainedModel
    weights: dict[str, Tensor]
    training: Prepared
    validation: Prepared
    images: list[Tensor]
    timed: Call
    deadline: float
    longest: dict[int, float] = field(default_factory=dict)
    starts: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)


@told_briefly()
def compare(
    config: VisionConfig,
    names: Sequence[str],
    output: Path,
    *,
    steps: int,
    rate: float,
    seeds: Sequence[int],
    elastic: Sequence[int],
    seconds: float,
) -> None:
    """Compare attentions of one task.

    Args:
        config: of the teacher, which `max_steps` ends.
        names: of `parse_attention`; `flat@M64P16C8` is flat VQ of equal kernel time (on a CPU, of
            equal columns).
        output: folder for the teacher and `rows.jsonl`.
        steps: of each attention after the teacher.
        rate: learning rates of each attention over those of the teacher.
        seeds: a run for each; the order and the flips of the images differ.
        elastic: numbers of refined parents at which the runs of the first seed are scored too.
        seconds: no run starts that would end later.

    An attention that fails has a row that says why, and is left out from then on.

    Raises:
        ValueError: a name is no attention, or the data are not as `DataConfig` says.
        OSError: the model cannot be read.
    """
    deadline = time.monotonic() + seconds
    for name in names:
        parse_attention(name.removeprefix(FLAT))
    part = _prepare(config, output, deadline)
    sizes = {name: _resolved(name, part) for name in names}
    for seed in (None, *seeds):
        for name in names:
            steps_of_run = 0 if seed is None else steps
            rows = read_log(output / ROWS)
            if any((row["name"], row["seed"]) == (name, seed) for row in rows):
                continue
            if any(row["name"] == name and "failed" in row for row in rows):
                continue
            if time.monotonic() + part.longest.get(steps_of_run, 0) > part.deadline:
                print(f"{name}, seed {seed}: no time left")
                continue
            begin = time.monotonic()
            curve = elastic if seeds and seed == seeds[0] else ()
            try:
                row = _run(part, sizes[name], steps_of_run, rate, seed, curve)
            # A kernel that does not compile, memory, or a loss that is not finite.
            except (RuntimeError, FloatingPointError) as error:
                row = {"attention": sizes[name], "step": 0, "failed": first_line(error)}
            taken = time.monotonic() - begin
            part.longest[steps_of_run] = max(taken, part.longest.get(steps_of_run, 0))
            _write(output, {"name": name, "seed": seed, **row, "seconds": round(taken, 2)})


def _prepare(config: VisionConfig, output: Path, deadline: float) -> Comparison:
    """Open the data, and load or fine-tune the teacher."""
    begin = time.monotonic()
    training, classes = open_images(config, "training")
    validation, _ = open_images(config, "validation")
    folder = output / TEACHER
    is_new = not folder.is_dir()
    torch.manual_seed(config.seed)
    model = build_model(config if is_new else replace(config, model=str(folder)), classes)
    read = time.monotonic() - begin
    trainer = make_trainer(config, model, [], training, validation, output)
    if is_new:
        trainer.train()
        score = trainer.evaluate()[f"eval_{METRICS[config.task]}"]
        _write(
            output,
            {
                "name": TEACHER,
                "seed": config.seed,
                "attention": "exact",
                "step": trainer.state.global_step,
                "score": score,
                "seconds": round(time.monotonic() - begin, 2),
                "seconds_of_reading": round(read, 2),
                "config": plain_values(config),
                "environment": environment(),
            },
        )
        model.save_pretrained(folder)
    images = first_images(training, config.codebooks.start_images, config)
    images = [batch.to(trainer.args.device) for batch in images]
    model.to(trainer.args.device)
    _unwrap(trainer)
    calls, _ = observe(model, torch.cat(images)[:TIMED_IMAGES])
    call = [*calls.values()][len(calls) // 2]
    dtype = HALF[config.precision]
    is_token = [isinstance(x, Tensor) and x.is_floating_point() for x in call]
    call = Call(*(x.to(dtype) if tokens else x for x, tokens in zip(call, is_token, strict=True)))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Comparison(config, output, model, weights, training, validation, images, call, deadline)


def _run(
    part: Comparison,
    name: str,
    steps: int,
    rate: float,
    seed: int | None,
    elastic: Sequence[int],
) -> Row:
    """Fine-tune and score one attention; the model has exact attention before and after."""
    head_rate = part.config.head_learning_rate
    config = replace(
        part.config,
        attention=name,
        max_steps=max(steps, 1),
        learning_rate=rate * part.config.learning_rate,
        head_learning_rate=None if head_rate is None else rate * head_rate,
        seed=part.config.seed if seed is None else seed,
    )
    part.model.load_state_dict(part.weights)
    attention = parse_attention(name, key_norm=config.codebooks.key_norm)
    with _with_attention(part, config, attention) as layers:
        trainer = make_trainer(
            config, part.model, layers, part.training, part.validation, part.output, quiet=True
        )
        try:
            part.training.seed = config.seed
            if steps:
                trainer.train()
            metric = f"eval_{METRICS[config.task]}"
            row: Row = {
                "attention": name,
                "step": steps,
                "rate": rate if steps else None,
                "metric": METRICS[config.task],
                "score": trainer.evaluate()[metric],
                "tokens": with_sinks(part.timed.key, part.timed.sink_key).shape[2],
                "ms": None if steps else kernel_ms(part.model, part.images[0][:1], part.timed),
            }
            if steps and layers:
                row["layers"] = [
                    {name: [round(float(x), 4) for x in value] for name, value in found.items()}
                    for found in (layer.diagnostics() for layer in layers)
                ]
            if attention.avq is not None and attention.avq.num_children:
                row["elastic"] = {}
                for num_refined in elastic:
                    if num_refined <= attention.avq.num_parents:
                        set_num_refined(part.model, num_refined)
                        row["elastic"][num_refined] = trainer.evaluate()[metric]
        finally:
            _unwrap(trainer)
    return row


@contextmanager
def _with_attention(
    part: Comparison, config: VisionConfig, attention: AttentionName
) -> Iterator[list[StoredAttention]]:
    settings = config.codebooks
    example = part.images[0]
    layers = set_attention(part.model, attention, settings, example, seed=config.seed)
    try:
        if layers and config.attention not in part.starts:
            start_codebooks(
                part.model,
                layers,
                settings,
                part.images,
                images_per_step=config.batch_size,
                seed=part.config.seed,
            )
            states = [layer.state_dict() for layer in layers]
            copies = [{name: x.clone() for name, x in state.items()} for state in states]
            part.starts[config.attention] = copies
        for layer, state in zip(layers, part.starts.get(config.attention, ()), strict=True):
            layer.load_state_dict(state)
        yield layers
    finally:
        remove_attention(part.model)


def _unwrap(trainer: Any) -> None:
    """Take off what mixed precision put around the model's forward."""
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)


@torch.no_grad()
def kernel_ms(model: PreTrainedModel, pixel_values: Tensor, call: Call) -> float:
    """Time of the attention of a layer in the middle of the model, in a pass of the model.

    Args:
        model: with its attention.
        pixel_values: of the size of those that the call comes from.
        call: of the layer.
    """
    sinks = (call.sink_key, call.sink_key, call.sink_value)  # any queries take as long
    tokens = [with_sinks(x, sink) for x, sink in zip(call[:3], sinks, strict=True)]
    # In the memory layout of projections.
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens]
    times: list[float] = []

    def measure(attn: nn.Module, inputs: Any) -> None:
        attend = ALL_ATTENTION_FUNCTIONS[attn.config._attn_implementation]
        options = {"dropout": 0.0, "scaling": call.scale, "is_causal": False}
        times.append(_ms(lambda: attend(attn, *tensors, None, **options)))

    layers = select_layers(model)
    hook = layers[len(layers) // 2].attn.register_forward_pre_hook(measure)
    with hook, evaluating(model):
        model(pixel_values=pixel_values)
    return times[0]


def _resolved(name: str, part: Comparison) -> str:
    """The name of an attention; for `flat@...`, that of flat VQ of equal kernel time."""
    if not name.startswith(FLAT):
        return name
    sizes = name.removeprefix(FLAT)
    attention = parse_attention(sizes)
    suffix = sizes[len(sizes.partition("/")[0]) :]
    num_parents = min(attention.avq.effective_codewords, part.timed.key.shape[2])
    if part.timed.query.is_cuda:
        limit = _operation_ms(attention, attention.avq, part.timed)

        def is_slower(num_parents: int) -> bool:
            flat = AVQConfig.parse(f"M{num_parents}")
            return _operation_ms(attention, flat, part.timed) > limit

        # From equal columns on, because each size is compiled.
        if is_slower(num_parents):
            while num_parents > FLAT_STEP and is_slower(num_parents):
                num_parents -= FLAT_STEP
        else:
            most = MOST_FLAT - FLAT_STEP
            while num_parents <= most and not is_slower(num_parents + FLAT_STEP):
                num_parents += FLAT_STEP
    return f"M{num_parents}{suffix}"


@torch.no_grad()
def _operation_ms(attention: AttentionName, config: AVQConfig, call: Call) -> float:
    """Time of AVQ of these sizes. Stored codewords are keys of the call."""
    codebook = None
    if not attention.own:
        spread = torch.linspace(0, call.key.shape[2] - 1, config.num_parents).long()
        parents = call.key[0, :, spread.to(call.key.device)].float()
        codebook = Codebook(
            parents, parents[:, :, None].expand(-1, -1, config.num_children, -1).contiguous()
        )
    form = {name: getattr(attention.avq, name) for name in ("codewords", "num_updates")}
    options = replace(config, **form).attention_arguments | call.options
    return _ms(lambda: avq_attention(*call[:3], codebook, **options))


def _ms(function: Callable[[], Any]) -> float:
    """Median time, in a CUDA graph on a GPU."""
    if torch.cuda.is_available():
        from triton.testing import do_bench_cudagraph

        return do_bench_cudagraph(function, return_mode="median")
    from torch.utils.benchmark import Timer

    timer = Timer("function()", globals={"function": function})
    return 1e3 * timer.blocked_autorange(min_run_time=0.1).median


def _write(output: Path, row: Row) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with (output / ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
    print(shown, flush=True)

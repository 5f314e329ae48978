"""Compare attentions: fine-tune a teacher, then each attention from it for equally many steps.

Each result is a line of `rows.jsonl`, written at once. A repeated call continues where it stopped.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from avq_diffusers import select_layers
from avq_diffusers.files import read_log
from distill.attention import with_sinks
from distill.config_file import plain_values
from distill.environment import environment
from distill.vision.attention import evaluating, observe
from distill.vision.config import VisionConfig, parse_attention
from distill.vision.training import METRICS, Run, fine_tune, open_run

ROWS, TEACHER = "rows.jsonl", "teacher"
FLAT = "flat@"
FLAT_SIZES = range(32, 513, 32)
TIMED_IMAGES = 4  # as in the paper
NO_CHECKPOINTS = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
Row = dict[str, Any]


def compare(
    config: VisionConfig,
    names: Sequence[str],
    output: Path,
    *,
    steps: int,
    rate: float,
    seeds: Sequence[int],
) -> None:
    """Compare attentions on one task.

    Args:
        config: the teacher's configuration.
        names: names for `parse_attention`; `flat@M64P16C8` is flat VQ with equal kernel time (on a
            CPU, equal columns).
        output: folder for the teacher and `rows.jsonl`.
        steps: steps per attention after the teacher.
        rate: learning rate of each attention, relative to the teacher's.
        seeds: one run each; image order and flips differ. The first run also records the score
            before the first step, and the time of a layer's attention.

    Raises:
        OSError, ValueError, TypeError, FloatingPointError: as `fine_tune`.
        ValueError: an earlier call's row is damaged.
    """
    read_log(output / ROWS)  # refuses before the work
    for name in names:
        parse_attention(name.removeprefix(FLAT))
    folder = output / TEACHER
    if not (folder / "model").is_dir():
        figures = fine_tune(config, folder, resume=True)
        row = {
            "name": TEACHER,
            "step": config.trainer["max_steps"],
            "score": figures[f"eval_{METRICS[config.task]}"],
            "config": plain_values(config),
            "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        }
        _write(output, row)
    config = replace(config, model=str(folder / "model"))
    for seed in seeds:
        of_run = {"seed": seed, "max_steps": steps, **NO_CHECKPOINTS}
        of_run["learning_rate"] = rate * config.trainer["learning_rate"]
        for name in names:
            rows = [row for row in read_log(output / ROWS) if row["name"] == name]
            if any(row["seed"] == seed for row in rows):
                continue
            attention = rows[0]["attention"] if rows else _resolved(name, config, output)
            changed = replace(config, attention=attention, trainer={**config.trainer, **of_run})
            _write(output, {"name": name, "seed": seed, **_row(changed, output, seed == seeds[0])})


def _row(config: VisionConfig, output: Path, is_first: bool) -> Row:
    run = _started(config, output)
    row = {
        "attention": config.attention,
        "step": config.trainer["max_steps"],
        "metric": METRICS[config.task],
        "untrained": run.score() if is_first else None,
        "ms": kernel_ms(run) if is_first else None,
    }
    run.trainer.train()
    return {**row, "score": run.score()}


def _started(config: VisionConfig, output: Path) -> Run:
    run = open_run(config, output, quiet=True)
    if run.layers:
        run.start_codebooks()
    return run


def _resolved(name: str, config: VisionConfig, output: Path) -> str:
    """The name of an attention; `flat@...` becomes flat VQ with equal kernel time."""
    if not name.startswith(FLAT):
        return name
    sizes, slash, form = name.removeprefix(FLAT).partition("/")

    def ms(attention: str) -> float:
        return kernel_ms(_started(replace(config, attention=attention), output))

    if torch.cuda.is_available():
        num_parents = flat_of_time(ms(sizes + slash + form), lambda m: ms(f"M{m}{slash}{form}"))
    else:
        num_parents = parse_attention(sizes).avq.columns
        if num_parents is None:
            raise ValueError(f"{name} needs a GPU, since a threshold does not fix the columns.")
    return f"M{num_parents}{slash}{form}"


def flat_of_time(limit: float, time_of: Callable[[int], float]) -> int:
    """The most codewords with which flat VQ takes no longer than `limit`, else the fewest."""
    return FLAT_SIZES[max(bisect_right(FLAT_SIZES, limit, key=time_of) - 1, 0)]


@torch.no_grad()
def kernel_ms(run: Run) -> float:
    """Time of the attention of one layer, in the middle of the model, in the run's dtype."""
    model, pixel_values, args = run.model, run.images[:TIMED_IMAGES], run.trainer.args
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    layers = select_layers(model)
    layer = layers[len(layers) // 2]
    call = observe(model, pixel_values)[0][layer.name]
    sink_key, sink_value = call.sink_key, call.sink_value
    # Time does not depend on CLS queries' values. In the memory layout of projections.
    tensors = [
        with_sinks(tokens, sinks).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
        for tokens, sinks in zip(call[:3], (sink_key, sink_key, sink_value), strict=True)
    ]
    times: list[float] = []

    def measure(attn: nn.Module, inputs: Any) -> None:
        attend = ALL_ATTENTION_FUNCTIONS[attn.config._attn_implementation]
        options = {"dropout": 0.0, "scaling": call.scale, "is_causal": False}
        times.append(_ms(lambda: attend(attn, *tensors, None, **options)))

    # During a forward pass, where the layer knows the grid of its tokens.
    with layer.attn.register_forward_pre_hook(measure), evaluating(model):
        model(pixel_values=pixel_values)
    return times[0]


def _ms(function: Callable[[], Any]) -> float:
    """Median time, in a CUDA graph on a GPU."""
    if torch.cuda.is_available():
        from triton.testing import do_bench_cudagraph

        return do_bench_cudagraph(function, return_mode="median")
    from torch.utils.benchmark import Timer

    timer = Timer("function()", globals={"function": function})
    return 1e3 * timer.blocked_autorange(min_run_time=0.1).median


def _write(output: Path, row: Row) -> None:
    with (output / ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")
    print({name: value for name, value in row.items() if not isinstance(value, dict)}, flush=True)

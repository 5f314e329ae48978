"""The model card of an export, and its upload to the Hub."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from avq_diffusers.files import atomic_write
from distill.config import DistillConfig, ObjectiveConfig, public_name

CARD = "README.md"
MINI = "mini-sd"
# Those of the library below are no OSError where there is no network.
HTTP_ERRORS = (OSError, *HfHubHTTPError.__bases__)
LOADING = {
    "avq": (
        "from avq_diffusers import AVQCodebooks, apply_avq",
        'apply_avq(pipe, AVQCodebooks.from_pretrained("{source}"))',
    ),
    "linfusion": (
        "from huggingface_hub import snapshot_download\n"
        "from avq_diffusers.extras.linfusion import load_linfusion",
        'load_linfusion(pipe, snapshot_download("{source}"))',
    ),
}


def write_card(
    folder: Path, config: DistillConfig, training: Mapping[str, Any], *, source: str
) -> None:
    """Write `folder / CARD`: how to load the export, its settings, data and metrics.

    Args:
        folder: of the export.
        config: of the run.
        training: its summary, as in the export's config.json.
        source: folder or Hub id that the card loads the export from.

    Raises:
        OSError: the disk is full or not writable.
    """
    with atomic_write(folder / CARD) as temporary:
        temporary.write_text(model_card(config, training, source=source), encoding="utf-8")


def model_card(config: DistillConfig, training: Mapping[str, Any], *, source: str) -> str:
    """The model card of an export, as Markdown with the metadata of the Hub."""
    base, data = config.base_model_name, config.data
    source_name = None
    if data.path is not None:
        is_from_hub = data.source == "huggingface"
        source_name = public_name(data.path) if is_from_hub else Path(data.path).name
    metadata = ModelCardData(
        base_model=base if "/" in base else None,
        datasets=[source_name] if source_name and "/" in source_name else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["avq-attention", "distillation"],
    )
    imports, load = LOADING[config.attention]
    model = f'"{base}"'
    if base == MINI:
        imports, model = f"{imports}\nfrom avq_diffusers.mini import MINI_SD", "MINI_SD"
    numbers = {name: f"{value:.4g}" for name, value in training["losses"].items()}
    numbers |= _layer_means(training["layers"])
    settings = {
        "base model": base,
        "attention": _attention(config),
        "levels of the UNet": ", ".join(map(str, config.avq.levels)),
        "layers that stay exact": ", ".join(config.avq.exact) or "none",
        "trained weights": _trained(config),
        "image size": f"{config.image_size} pixels",
        "steps": f"{training['steps']} of {config.batch_size} images",
        "learning rate": f"{config.learning_rate:g}, {config.schedule}",
        "weights of the losses by timestep": config.objective.weighting_scheme,
        "loss between guided predictions": _guidance(config.objective),
        "precision": config.precision,
        "data": " ".join(filter(None, (data.source, source_name, data.split))),
        "preprocessing": data.preprocessing,
        "seed": str(config.seed),
    }
    return f"""---
{metadata.to_yaml()}
---

# {_attention(config)} for {base}

Self-attention layers of {base}, distilled from exact attention by
`python -m distill --config configs/{training["config"]}.yaml` of avq-diffusers.

```python
from diffusers import StableDiffusionPipeline
{imports}

pipe = StableDiffusionPipeline.from_pretrained({model})
{load.format(source=source)}
```

## Training

{_table(settings)}

## Metrics

Of the last steps of the training; they say nothing about images. `config.json` has those of each
layer, and the versions of all packages.

{_table(numbers)}
"""


def check_repository(repo: str, config: DistillConfig) -> None:
    """Make sure, before a long training, that its result can be pushed; makes the repository.

    Raises:
        ValueError: the run exports nothing, or the name is no Hub id.
        OSError: the Hub refuses or cannot be reached.
    """
    if config.attention not in LOADING:
        raise ValueError(f"attention: {config.attention} exports nothing to push to {repo}.")
    try:
        HfApi().create_repo(repo, exist_ok=True)
    except HTTP_ERRORS as error:
        raise OSError(f"--push-to-hub {repo}: {error}") from error


def push(folder: Path, repo: str) -> None:
    """Upload an export with its card.

    Raises:
        OSError: the Hub refuses or cannot be reached; the message names the folder.
    """
    try:
        HfApi().upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Upload distilled self-attention",
            ignore_patterns=[".*"],
        )
    except HTTP_ERRORS as error:
        raise OSError(
            f"{folder} is complete, but could not be pushed to {repo} ({error}); repeat the "
            f"command with --resume."
        ) from error


def _attention(config: DistillConfig) -> str:
    if config.attention == "linfusion":
        return "LinFusion's linear attention"
    kind = "own" if config.codebooks is None else "stored"
    number = config.avq.num_updates
    updates = f", {number} update{'s' * (number > 1)}" if number else ""
    return f"AVQ {config.avq} with {kind} codewords{updates}"


def _guidance(objective: ObjectiveConfig) -> str:
    if objective.guided_weight == 0:
        return "none"
    return f"weight {objective.guided_weight:g}, guidance scale {objective.guidance_scale:g}"


def _trained(config: DistillConfig) -> str:
    rank = config.objective.lora_rank
    parts = ["projections" if rank is None else f"LoRAs of rank {rank} of the projections"]
    parts += ["codebooks"] * (config.attention == "avq" and config.codebooks is not None)
    return " and ".join(parts)


def _layer_means(layers: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    names = dict.fromkeys(name for metrics in layers.values() for name in metrics)
    return {
        f"{name.replace('_', ' ')}, mean over layers": (
            f"{mean(metrics[name] for metrics in layers.values() if name in metrics):.4g}"
        )
        for name in names
    }


def _table(cells: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {x} |" for name, x in cells.items())])

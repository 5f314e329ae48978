"""The model card of an export, and its upload to the Hub."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from distill.config import DistillConfig
from distill.config_file import plain_values

CARD = "README.md"
MINI = "mini-sd"
PATHS = ("path", "captions", "cache")
# Without a network, the underlying library's errors are not OSErrors.
HTTP_ERRORS = (OSError, *HfHubHTTPError.__bases__)
IMPORTS = {
    "avq": "from avq_diffusers import AVQCodebooks, apply_avq",
    "linfusion": "from huggingface_hub import snapshot_download\n"
    "from avq_diffusers.extras.linfusion import load_linfusion",
}
LOADING = {
    "avq": 'apply_avq(pipe, AVQCodebooks.from_pretrained("{source}"))',
    "linfusion": 'load_linfusion(pipe, snapshot_download("{source}"))',
}


def model_card(config: DistillConfig, training: Mapping[str, Any], *, source: str) -> str:
    """The model card of an export: how to load it, its settings, data and metrics.

    It only gives the names of local folders and files, not their paths.

    Args:
        config: the run's configuration.
        training: the run's summary, as in the export's config.json.
        source: folder or Hub id from which the card's example loads the export.
    """
    data, base = config.data, config.base_model_name
    from_hub = data.source == "huggingface" and not Path(data.path).exists()
    files = {
        name: value and Path(value).name for name, value in vars(data).items() if name in PATHS
    }
    if from_hub:
        files["path"] = data.path
    published = replace(config, base_model=base, data=replace(data, **files))
    metadata = ModelCardData(
        base_model=base if "/" in base else None,
        datasets=[data.path] if from_hub else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["avq-attention", "distillation"],
    )
    imports, load = IMPORTS[config.attention], LOADING[config.attention]
    model = f'"{base}"'
    if base == MINI:
        imports, model = f"{imports}\nfrom avq_diffusers.mini import MINI_SD", "MINI_SD"
    layers = training["layers"].values()
    names = dict.fromkeys(name for metrics in layers for name in metrics)
    numbers = training["losses"] | {
        f"{name.replace('_', ' ')}, mean over layers": mean(x[name] for x in layers if name in x)
        for name in names
    }
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in numbers.items())
    title = (
        "LinFusion's linear attention" if config.attention == "linfusion" else f"AVQ {config.avq}"
    )
    settings = yaml.safe_dump(plain_values(published), sort_keys=False)
    return f"""---
{metadata.to_yaml()}
---

# {title} for {base}

Self-attention layers of {base}, distilled from exact attention by
`python -m distill --config configs/{training["config"]}.yaml` of avq-diffusers.

```python
from diffusers import StableDiffusionPipeline
{imports}

pipe = StableDiffusionPipeline.from_pretrained({model})
{load.format(source=source)}
```

## Metrics

From the last training steps; they say nothing about images. `config.json` has them per layer, and
the versions of all packages.

| | |
|---|---|
{rows}

## Training

```yaml
{settings}```
"""


def check_repository(repo: str, config: DistillConfig) -> str:
    """Make sure, before a long run, that its result can be pushed; creates the repository.

    Returns its Hub id, with the user's name where `repo` has none.

    Raises:
        ValueError: the run exports nothing, or the name is not a Hub id.
        OSError: the Hub refuses or is unreachable.
    """
    if config.attention not in LOADING:
        raise ValueError(f"attention: {config.attention} exports nothing to push to {repo}.")
    try:
        repo_id = HfApi().create_repo(repo, exist_ok=True).repo_id
        HfApi().auth_check(repo_id, write=True)  # `exist_ok` takes somebody else's too
    except HTTP_ERRORS as error:
        raise OSError(f"--push-to-hub {repo}: {error}") from error
    return repo_id


def push(folder: Path, repo: str) -> None:
    """Upload an export with its card.

    Raises:
        OSError: the Hub refuses or is unreachable; the message names the folder.
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

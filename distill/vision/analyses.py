"""The paper's analyses of a fine-tuned model with AVQ, on its validation images.

elastic     score and capture by number of refined parents (Tab. elastic_p)
order       score by query order and query tile (Tab. gilbert_ablation)
layers      capture, commitment loss and active ratio of each head (Tab. perlayer_imagenet)
importance  capture of parents chosen by tiled importance, by exact importance, and by their true
            attention (Tab. tiled_capture)
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from avq_diffusers import AVQCodebooks, AVQConfig, apply_avq, remove_avq
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    attention_mass,
    captured_share,
    commitment_loss,
    leaf_counts,
    refined_parents,
)
from avq_diffusers.attention.reference import select
from avq_diffusers.config import QUERY_ORDERS
from avq_diffusers.files import atomic_write
from distill.config_file import load_config
from distill.vision.attention import observe
from distill.vision.compare import environment
from distill.vision.config import VisionConfig, parse_attention
from distill.vision.training import CONFIG_FILE, METRICS, Run, open_run

FILE = "analyses.json"
Row = dict[str, Any]
Source = AVQConfig | AVQCodebooks


def analyse(
    output: Path, *, num_images: int, refined: Sequence[int], tiles: Sequence[int]
) -> list[Row]:
    """Analyse the run in `output` and write the rows to `output`/analyses.json.

    Args:
        output: folder of a finished `fine_tune` run with AVQ.
        num_images: validation images for everything except scores.
        refined: numbers of refined parents.
        tiles: lengths of query tiles.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run's attention is not AVQ with a number of refined parents.
    """
    if not (output / "model").is_dir():
        raise FileNotFoundError(f"{output} holds no finished run: there is no {output / 'model'}.")
    config = load_config(output / CONFIG_FILE, VisionConfig, [])
    attention = parse_attention(config.attention, key_norm=config.codebooks.key_norm)
    avq = attention.avq
    if avq is None or avq.num_refined is None or not avq.num_children:
        raise ValueError(
            f"analyses need AVQ with refined parents, such as M64P16C8, but {output} has attention "
            f"{config.attention}."
        )
    exact = replace(config, model=str(output / "model"), attention="exact")
    run = open_run(exact, output, quiet=True)
    source: Source = attention.avq
    if not attention.own:
        source = AVQCodebooks.from_pretrained(output / "codebooks").to(run.model.device)

    def score(**fields: Any) -> float:
        apply_avq(run.model, _with(source, fields), route="always")
        found = run.score()
        remove_avq(run.model)
        return found

    refined = [number for number in refined if number <= attention.avq.num_parents]
    rows = [
        {"analysis": "elastic", "num_refined": number, "score": score(num_refined=number)}
        for number in refined
    ]
    rows += [
        {
            "analysis": "order",
            "order": order,
            "query_tile": tile,
            "score": score(query_order=order, query_tile=tile),
        }
        for order in QUERY_ORDERS
        for tile in tiles
    ]
    for row in _by_head(run, attention.avq, source, num_images, refined):
        if row["analysis"] == "importance":
            rows[refined.index(row["num_refined"])]["capture"] = row["exact"]
        rows.append(row)
    document = {
        "attention": config.attention,
        "metric": METRICS[config.task],
        "environment": environment(),
        "rows": rows,
    }
    with atomic_write(output / FILE) as temporary:
        temporary.write_text(json.dumps(document, indent=1) + "\n")
    return rows


@torch.no_grad()
def _by_head(
    run: Run, config: AVQConfig, source: Source, num_images: int, refined: Sequence[int]
) -> list[Row]:
    """Everything except scores: (layers, heads), means over images; counts are sums."""
    figures: dict[Any, list[Tensor]] = {}
    images = run.trainer.eval_dataset.first(num_images).split(1)
    for image in images:
        calls, _ = observe(run.model, run.trainer.model.normalized(image))
        layers = [
            _of_call(call, config, None if source is config else source, name, refined)
            for name, call in calls.items()
        ]
        for figure in layers[0]:
            of_image = torch.stack([layer[figure] for layer in layers])
            figures.setdefault(figure, []).append(of_image)
    means = {figure: torch.stack(found).float().mean(dim=0) for figure, found in figures.items()}
    means["active_ratio"] = active_ratio(means.pop("counts"))
    rows: list[Row] = []
    for number in refined:
        captures = {name: float(means[name, number].mean()) for name in ("exact", "tiled", "best")}
        rows.append({"analysis": "importance", "num_refined": number, **captures})
    of_heads = {name: means[name] for name in ("capture", "commitment", "active_ratio")}
    for layer, head in torch.cartesian_prod(
        *(torch.arange(n) for n in of_heads["capture"].shape)
    ).tolist():
        found = {name: float(value[layer, head]) for name, value in of_heads.items()}
        rows.append({"analysis": "layers", "layer": layer, "head": head, **found})
    return rows


def _of_call(
    call: Any, config: AVQConfig, codebooks: AVQCodebooks | None, name: str, refined: Sequence[int]
) -> dict[Any, Tensor]:
    """A layer's metrics (H,) for one image, and the counts of its leaves."""
    query, key, codebook = call.query.float(), call.key.float(), None
    options = {"query_order": call.query_order, "scale": call.scale}
    options |= {"codewords": config.codewords, "query_tile": config.query_tile}
    if codebooks is None:
        sizes = ("num_parents", "num_children", "num_updates")
        options |= {name: getattr(config, name) for name in sizes}
    else:
        codebook, norm = codebooks.codebook(name), codebooks.key_norm(name)
        key = key if norm is None else norm(key)
    tensors = query, key, codebook
    mass = attention_mass(*tensors, **options)
    tile = max(config.num_parents // 2, 1)
    chosen = {
        "capture": refined_parents(*tensors, config.num_refined, **options),
        **{("exact", n): refined_parents(*tensors, n, **options) for n in refined},
        **{("tiled", n): refined_parents(*tensors, n, tile, **options) for n in refined},
        **{("best", n): select(mass, n) for n in refined},
    }
    return {
        **{figure: captured_share(mass, parents) for figure, parents in chosen.items()},
        "commitment": commitment_loss(key, codebook, **options),
        "counts": leaf_counts(key, codebook, **options),
    }


def _with(source: Source, fields: dict[str, Any]) -> Source:
    """The same codewords with other fields of `AVQConfig`."""
    if isinstance(source, AVQConfig):
        return replace(source, **fields)
    config = {**source.config, "avq": {**source.config["avq"], **fields}}
    changed = AVQCodebooks.from_config(config)
    changed.load_state_dict(source.state_dict(), assign=True)
    return changed

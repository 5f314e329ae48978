"""The paper's analyses of a fine-tuned model with AVQ, on its validation images.

elastic     score and capture by refined parents (Tab. elastic_p)
order       score by query order and query tile (Tab. gilbert_ablation)
layers      capture, commitment loss and active ratio of each head (Tab. perlayer_imagenet)
importance  capture of parents chosen by tiled importance, by exact importance, and by their true
            attention (Tab. tiled_capture)
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

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
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import QUERY_ORDERS
from avq_diffusers.files import atomic_write
from distill.config_file import load_config
from distill.vision.calls import observe
from distill.vision.config import VisionConfig, parse_attention
from distill.vision.images import open_images, told_briefly
from distill.vision.training import (
    CONFIG_FILE,
    METRICS,
    build_model,
    environment,
    first_images,
    make_trainer,
)

FILE = "analyses.json"
Row = dict[str, Any]


class _Layer(NamedTuple):
    """Patches of a layer in one batch: query and key (B, H, n, D), and what quantizes the keys."""

    query: Tensor
    key: Tensor
    codebook: Codebook | None
    options: dict[str, Any]


@told_briefly()
def analyse(
    output: Path, *, num_images: int, refined: Sequence[int], tiles: Sequence[int]
) -> list[Row]:
    """Analyse the run in `output`, and write the rows to `output`/analyses.json.

    Args:
        output: folder of a finished run of `fine_tune` with AVQ.
        num_images: validation images for everything but scores.
        refined: numbers of refined parents.
        tiles: lengths of query tiles.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run has another attention than AVQ, or no children to refine.
    """
    if not (output / "model").is_dir():
        raise FileNotFoundError(f"{output} holds no finished run: there is no {output / 'model'}.")
    config = load_config(output / CONFIG_FILE, VisionConfig, [])
    attention = parse_attention(config.attention, key_norm=config.codebooks.key_norm)
    if attention.avq is None or not attention.avq.num_children:
        raise ValueError(
            f"analyses are those of AVQ with children, but {output} has attention "
            f"{config.attention}."
        )
    validation, classes = open_images(config, "validation")
    model = build_model(replace(config, model=str(output / "model")), classes)
    trainer = make_trainer(config, model, [], validation, validation, output, quiet=True)
    device = trainer.args.device
    source = attention.avq
    if not attention.own:
        source = AVQCodebooks.from_pretrained(output / "codebooks").to(device)

    def score(**fields: Any) -> float:
        apply_avq(model, _with(source, fields), route="always")
        found = trainer.evaluate()[f"eval_{METRICS[config.task]}"]
        remove_avq(model)
        return found

    batches = [batch.to(device) for batch in first_images(validation, num_images, config)]
    refined = [number for number in refined if number <= attention.avq.num_parents]
    rows = _by_head(model, batches, attention.avq, source, refined)
    for row in rows:
        if row["analysis"] == "elastic":
            row["score"] = score(num_refined=row["num_refined"])
    for order in QUERY_ORDERS:
        for tile in tiles:
            found = score(query_order=order, query_tile=tile)
            rows.append({"analysis": "order", "order": order, "query_tile": tile, "score": found})
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
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    config: AVQConfig,
    source: AVQConfig | AVQCodebooks,
    refined: Sequence[int],
) -> list[Row]:
    """All that needs no score: means over batches, sums of counts."""
    choices = ("exact", "tiled", "best")
    shares: dict[tuple[str, int], list[Tensor]] = {}
    usual: list[Tensor] = []
    commitments, counts = [], []
    tiled = max(config.num_parents // 2, 1)
    for batch in batches:
        of_batch: dict[tuple[str, int], list[Tensor]] = {}
        layers = list(_observed(model, batch, config, source))
        for query, key, codebook, options in layers:
            mass = attention_mass(query, key, codebook, **options)
            for number in refined:
                arguments = query, key, codebook, number
                chosen = {
                    "exact": refined_parents(*arguments, **options),
                    "tiled": refined_parents(*arguments, **options, importance_tile=tiled),
                    "best": select(mass, number),
                }
                for name in choices:
                    share = captured_share(mass, chosen[name])
                    of_batch.setdefault((name, number), []).append(share)
            own = refined_parents(query, key, codebook, config.num_refined, **options)
            of_batch.setdefault(("usual", 0), []).append(captured_share(mass, own))
        for place, values in of_batch.items():
            shares.setdefault(place, []).append(torch.stack(values))
        commitments.append(
            torch.stack([commitment_loss(x.key, x.codebook, **x.options) for x in layers])
        )
        counts.append(torch.stack([leaf_counts(x.key, x.codebook, **x.options) for x in layers]))
    captures = {place: torch.stack(values).mean(dim=0) for place, values in shares.items()}
    usual = captures.pop(("usual", 0))
    commitment = torch.stack(commitments).mean(dim=0)
    active = active_ratio(torch.stack(counts).sum(dim=0))
    rows: list[Row] = []
    for number in refined:
        means = {name: float(captures[name, number].mean()) for name in choices}
        rows.append({"analysis": "elastic", "num_refined": number, "capture": means["exact"]})
        rows.append({"analysis": "importance", "num_refined": number, **means})
    for layer, head in torch.cartesian_prod(*(torch.arange(n) for n in usual.shape)).tolist():
        rows.append(
            {
                "analysis": "layers",
                "layer": layer,
                "head": head,
                "capture": float(usual[layer, head]),
                "commitment": float(commitment[layer, head]),
                "active_ratio": float(active[layer, head]),
            }
        )
    return rows


def _observed(
    model: PreTrainedModel, batch: Tensor, config: AVQConfig, source: AVQConfig | AVQCodebooks
) -> Iterator[_Layer]:
    """The layers of a pass with exact attention."""
    options = {"codewords": config.codewords, "query_tile": config.query_tile}
    if isinstance(source, AVQConfig):
        sizes = ("num_parents", "num_children", "num_updates")
        options |= {name: getattr(config, name) for name in sizes}
    for name, call in observe(model, batch)[0].items():
        query, key, codebook = call.query.float(), call.key.float(), None
        if not isinstance(source, AVQConfig):
            codebook, norm = source.codebook(name), source.key_norm(name)
            key = key if norm is None else norm(key)
        of_call = {"query_order": call.query_order, "scale": call.scale}
        yield _Layer(query, key, codebook, options | of_call)


def _with(source: AVQConfig | AVQCodebooks, fields: dict[str, Any]) -> AVQConfig | AVQCodebooks:
    """The same codewords with other fields of `AVQConfig`."""
    if isinstance(source, AVQConfig):
        return replace(source, **fields)
    config = {**source.config, "avq": {**source.config["avq"], **fields}}
    changed = AVQCodebooks.from_config(config)
    changed.load_state_dict(source.state_dict(), assign=True)
    return changed

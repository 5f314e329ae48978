"""Attentions ready for a pipeline: load one by name, and switch a pipeline to it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from diffusers import StableDiffusionPipeline

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    calibrate,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.extras.linfusion import LinFusionProcessor, load_linfusion, remove_linfusion
from avq_diffusers.hosts import has_unet
from eval.methods.avq import config_label, exact_labels
from eval.methods.base import TRANSFORMER_IMAGES, UNET_IMAGES
from eval.methods.folder import LINFUSION_CONFIG, Folder
from eval.methods.registry import check_place, parse_method, parse_word
from eval.methods.running import avq_in, layers_run_by, network_of
from eval.store.report import folder_digest

COMPUTATION = ("query_tile", "query_order", "key_norm")
CALIBRATION_SEED = 1_000_000_000  # its noise is shared with no image of a table


@dataclass(frozen=True)
class Method:
    """One attention variant of a table.

    Attributes:
        name: see `parse_method`.
        levels: UNet levels to change.
        codebooks: calibrated or loaded ones, including own codewords with trained projections; None
            for methods without.
        own: sizes of own codewords without training; None for other methods.
        num_refined: parents refined per query tile, instead of the codebooks' own number.
        linfusion: processors of LinFusion layers by layer name.
        sha256: digest of the folder that the method was loaded from.
        uncalibrated: configuration for `calibrated` to make codebooks from.
    """

    name: str
    levels: tuple[int, ...]
    codebooks: AVQCodebooks | None = None
    own: AVQConfig | None = None
    num_refined: int | None = None
    linfusion: Mapping[str, LinFusionProcessor] | None = None
    sha256: str | None = None
    uncalibrated: AVQConfig | None = None

    @property
    def unusual_fields(self) -> dict[str, Any]:
        """Non-default fields that change the computation and are missing from `facts`."""
        if self.codebooks is None:
            return {}
        config, usual = self.codebooks.avq_config, AVQConfig()
        values = {name: getattr(config, name) for name in COMPUTATION}
        return {name: value for name, value in values.items() if value != getattr(usual, name)}

    @property
    def origin(self) -> str | None:
        """`"distilled"`, `"calibrated"` or `"own"`; None without codewords or LinFusion."""
        if self.linfusion is not None:
            return "distilled"
        if self.own is not None:
            return "own"
        if self.codebooks is None:
            return None
        return "calibrated" if self.codebooks.config["training"] is None else "distilled"

    def facts(self) -> dict[str, Any]:
        """The method's fields in a row.

        `config` gives the sizes and form of the codewords and the layers kept exact, or
        `"LinFusion"`. Effective codewords, M0 + P C, are what a query attends to, the paper's cost,
        averaged over layers; None with a threshold, where they depend on the image.
        """
        configs = [] if self.own is None else [self.own]
        is_own = self.own is not None
        if self.codebooks is not None:
            configs = [self.codebooks.layer_config(name) for name in self.codebooks.layer_specs]
            is_own = self.codebooks.config["own_codewords"]
        if self.num_refined is not None:
            configs = [config.changed(num_refined=self.num_refined) for config in configs]
        labels = [LINFUSION_CONFIG] if self.linfusion is not None else []
        labels += dict.fromkeys(config_label(config, own=is_own) for config in configs)
        if configs:
            labels += exact_labels(self.own or self.codebooks.avq_config)
        effective = [config.columns for config in configs]
        return {
            "method": self.name,
            "config": ", ".join(labels) or None,
            "origin": self.origin,
            "sha256": self.sha256,
            "levels": list(self.levels),
            "effective_codewords": mean(effective) if effective and None not in effective else None,
        }


def prepare_methods(
    pipe: StableDiffusionPipeline,
    names: Sequence[str],
    *,
    levels: tuple[int, ...],
    calibration_prompts: Sequence[str],
) -> list[Method]:
    """`load_methods`, then `calibrated`: errors in any name come before the work.

    Raises:
        FileNotFoundError, ValueError: see `load_methods`.
    """
    loaded = load_methods(pipe, names, levels=levels)
    return [calibrated(pipe, method, calibration_prompts) for method in loaded]


def load_methods(
    pipe: StableDiffusionPipeline, names: Sequence[str], *, levels: tuple[int, ...]
) -> list[Method]:
    """Load methods for a pipeline without AVQ and LinFusion; `calibrated` adds missing codebooks.

    `levels` are the UNet levels to change; folders bring their own.

    Raises:
        FileNotFoundError: a folder lacks a file.
        ValueError: a name is unknown; a folder is missing, damaged, of another model or cannot
            refine that many parents; a level has no self-attention; or the pipeline already has AVQ
            or LinFusion.
    """
    _refuse_changed(pipe)
    is_unet = has_unet(pipe)
    for name in names:
        check_place(name, UNET_IMAGES if is_unet else TRANSFORMER_IMAGES)
    if is_unet:
        select_layers(pipe.unet, levels)
    return [_load(pipe, name, levels if is_unet else (0,)) for name in names]


def calibrated(
    pipe: StableDiffusionPipeline, method: Method, calibration_prompts: Sequence[str]
) -> Method:
    """The method with its codebooks, on the pipeline's device.

    Calibration uses its default steps, so codebooks do not depend on the images' steps.
    """
    codebooks = method.codebooks
    if method.uncalibrated is not None:
        codebooks = calibrate(pipe, calibration_prompts, method.uncalibrated, seed=CALIBRATION_SEED)
    return replace(method, codebooks=codebooks and codebooks.to(pipe.device), uncalibrated=None)


@contextmanager
def attention_method(pipe: StableDiffusionPipeline, method: Method) -> Iterator[None]:
    """Run the pipeline's self-attention with a method from `prepare_methods` inside the `with`
    block.

    Raises:
        ValueError: the codebooks belong to another model or cannot refine that many parents, or the
            pipeline already has AVQ or LinFusion.
    """
    _refuse_changed(pipe)
    if word := parse_word(method.name):
        with word.applied(pipe, method.levels):
            yield
    elif method.linfusion is not None:
        with layers_run_by(pipe.unet, method.linfusion):
            yield
    else:
        with avq_in(pipe, method.own or method.codebooks):
            if method.num_refined is not None:
                set_num_refined(pipe, method.num_refined)
            yield


def _load(pipe: StableDiffusionPipeline, name: str, levels: tuple[int, ...]) -> Method:
    parsed = parse_method(name, levels)
    if isinstance(parsed, Folder):
        return _load_folder(pipe, name, parsed.source, parsed.num_refined)
    if (config := parsed.config) is not None:
        if has_unet(pipe):
            select_layers(pipe.unet, config.levels, config.exact)
        return Method(name, config.levels, **{"own" if parsed.own else "uncalibrated": config})
    parsed.check(next(network_of(pipe).parameters()))
    return Method(name, parsed.levels_of(levels))


def _load_folder(
    pipe: StableDiffusionPipeline, name: str, folder: str, num_refined: int | None
) -> Method:
    digest = folder_digest(folder, "config.json")
    if _has_linfusion(folder):
        if num_refined is not None:
            raise ValueError(f"LinFusion layers refine no parents, but got {name!r}.")
        load_linfusion(pipe, folder)
        layers = _linfusion_layers(pipe)
        processors = {layer.name: layer.attn.processor for layer in layers}
        remove_linfusion(pipe)
        levels = tuple(sorted({layer.level for layer in layers}))
        return Method(name, levels, linfusion=processors, sha256=digest)
    codebooks = AVQCodebooks.from_pretrained(folder)
    layers = select_layers(pipe.unet, codebooks.avq_config.levels, codebooks.avq_config.exact)
    codebooks.check_layers(layers)
    for layer in layers:
        most = codebooks.layer_config(layer.name).most_refined
        if num_refined is not None and num_refined > most:
            raise ValueError(
                f"num_refined must be between 0 and {most} in {layer.name}, but got {num_refined}."
            )
    levels = codebooks.avq_config.levels
    return Method(name, levels, codebooks, num_refined=num_refined, sha256=digest)


def _has_linfusion(folder: str) -> bool:
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return config["_class_name"] == LinFusionProcessor.__name__
    except (OSError, ValueError, KeyError, TypeError):
        return False  # AVQCodebooks will report what is wrong


def _linfusion_layers(pipe: StableDiffusionPipeline) -> list[Any]:
    return [
        layer
        for layer in select_layers(pipe.unet)
        if isinstance(layer.attn.processor, LinFusionProcessor)
    ]


def _refuse_changed(pipe: StableDiffusionPipeline) -> None:
    if any(row.config for row in summary(pipe).rows):
        raise ValueError("this pipeline has AVQ already; call remove_avq(pipe) first.")
    if has_unet(pipe) and _linfusion_layers(pipe):
        raise ValueError("this pipeline has LinFusion already; call remove_linfusion(pipe) first.")

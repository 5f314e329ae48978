"""Attentions ready for a pipeline: load them by name, and switch a pipeline to one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diffusers import StableDiffusionPipeline

from avq_diffusers import select_layers, summary
from avq_diffusers.hosts import has_unet
from eval.methods.base import TRANSFORMER_IMAGES, UNET_IMAGES, AttentionMethod
from eval.methods.folder import linfusion_layers
from eval.methods.registry import check_place, parse_method


def load_methods(
    pipe: StableDiffusionPipeline, names: Sequence[str], *, levels: tuple[int, ...]
) -> list[AttentionMethod]:
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
    else:
        levels = (0,)
    return [parse_method(name, levels).loaded(pipe, levels) for name in names]


@contextmanager
def attention_method(pipe: StableDiffusionPipeline, method: AttentionMethod) -> Iterator[None]:
    """Run the pipeline's self-attention with a loaded, calibrated method inside the `with` block.

    Raises:
        ValueError: the codebooks belong to another model or cannot refine that many parents, or the
            pipeline already has AVQ or LinFusion.
    """
    _refuse_changed(pipe)
    with method.applied(pipe):
        yield


def _refuse_changed(pipe: StableDiffusionPipeline) -> None:
    if any(row.config for row in summary(pipe).rows):
        raise ValueError("this pipeline has AVQ already; call remove_avq(pipe) first.")
    if has_unet(pipe) and linfusion_layers(pipe):
        raise ValueError("this pipeline has LinFusion already; call remove_linfusion(pipe) first.")

"""The attention variants that a table compares, each switched on for the time of a `with` block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    avq_disabled,
    calibrate,
    remove_avq,
    select_layers,
)

EXACT = "exact"
NO_ATTENTION = "value-projection"


class ValueProjectionProcessor(AttnProcessor2_0):
    """Negative control: every token attends to itself only, its attention is its value."""

    def __call__(
        self,
        attn,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        hidden_states = attn.to_out[0](attn.to_v(hidden_states))
        return attn.to_out[1](hidden_states)


def check_methods(
    pipe: StableDiffusionPipeline, methods: Sequence[str], levels: tuple[int, ...]
) -> None:
    """Refuse unknown methods and levels before the work, not after it.

    Raises:
        ValueError: a method is none of those of `attention_method`, or a level has no
            self-attention.
    """
    select_layers(pipe.unet, levels)
    for method in methods:
        if method in (EXACT, NO_ATTENTION):
            continue
        try:
            AVQConfig.parse(method)
        except ValueError as error:
            raise ValueError(
                f"methods must be {EXACT}, {NO_ATTENTION} or configurations: {error}"
            ) from None


@contextmanager
def attention_method(
    pipe: StableDiffusionPipeline,
    method: str,
    *,
    levels: tuple[int, ...] = (0,),
    calibration_prompts: Sequence[str] = (),
) -> Iterator[None]:
    """Run the pipeline's self-attention at `levels` by `method`, and put the old one back.

    Args:
        pipe: any Stable Diffusion pipeline.
        method: `"exact"`, `"value-projection"` (the negative control), or a configuration such
            as `"M64P16C8"` or flat `"M192"`, calibrated here.
        levels: UNet levels that change.
        calibration_prompts: prompts the codebooks are calibrated on.

    Raises:
        ValueError: `method` is none of these.
    """
    if method == EXACT:
        with avq_disabled(pipe):
            yield
    elif method == NO_ATTENTION:
        layers = select_layers(pipe.unet, levels)
        previous = [layer.attn.processor for layer in layers]
        for layer in layers:
            layer.attn.set_processor(ValueProjectionProcessor())
        try:
            yield
        finally:
            for layer, processor in zip(layers, previous, strict=True):
                layer.attn.set_processor(processor)
    else:
        config = AVQConfig.parse(method, levels=levels)
        apply_avq(pipe, calibrate(pipe, calibration_prompts, config), route="always")
        try:
            yield
        finally:
            remove_avq(pipe)

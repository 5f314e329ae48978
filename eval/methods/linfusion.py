"""LinFusion: linear attention in place of self-attention."""

from eval.methods.base import UNET_STEP, Word

LINFUSION_CONFIG = "LinFusion"  # the `config` of its rows


class LinFusion(Word):
    """LinFusion with random weights; folders of trained layers have the folder's name."""

    kind = example = "linfusion"
    places = (UNET_STEP,)
    title = "LinFusion"

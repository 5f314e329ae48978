"""A Stable Diffusion pipeline that takes an `AVQProcessor` as it takes any other."""

import json
from typing import Any

from diffusers import StableDiffusionPipeline

from avq_diffusers.plugin.apply import apply_avq
from avq_diffusers.plugin.processor import AVQProcessor


class AVQStableDiffusionPipeline(StableDiffusionPipeline):
    """`StableDiffusionPipeline` with `set_attn_processor`; build it with `from_pipe` as well.

    It saves as a `StableDiffusionPipeline`, without the codebooks: save those beside it. For
    img2img take `StableDiffusionImg2ImgPipeline.from_pipe`: diffusers' AutoPipelines know its own
    classes only.
    """

    def set_attn_processor(self, processor: Any) -> None:
        """Apply the codebooks of an `AVQProcessor(codebooks)`, or set any other processor.

        Args:
            processor: an `AVQProcessor` with codebooks serves their layers and leaves the
                processors of all others; anything else goes to `unet.set_attn_processor`.

        Raises:
            ValueError: an `AVQProcessor` without codebooks, or with those of another model.
        """
        if not isinstance(processor, AVQProcessor):
            self.unet.set_attn_processor(processor)
        elif processor.codebooks is None:
            raise ValueError("expected an AVQProcessor(codebooks), but got one without codebooks.")
        else:
            apply_avq(self, processor.codebooks, backend=processor.backend, route=processor.route)

    def to_json_string(self) -> str:
        # diffusers looks the class of a saved pipeline up among its own.
        config = json.loads(super().to_json_string())
        config["_class_name"] = StableDiffusionPipeline.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

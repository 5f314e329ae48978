"""`AVQStableDiffusionPipeline`, a Stable Diffusion pipeline with `set_attn_processor`."""

import json

from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import AttentionProcessor

from avq_diffusers.hosts.models import AVQProcessor, select_layers
from avq_diffusers.hosts.verbs import apply_avq


class AVQStableDiffusionPipeline(StableDiffusionPipeline):
    """`StableDiffusionPipeline` with `set_attn_processor`; `from_pipe` builds one, too.

    Saves as a `StableDiffusionPipeline` without the codebooks; save those separately. For img2img
    use `StableDiffusionImg2ImgPipeline.from_pipe`: AutoPipelines do not know this class.
    """

    def set_attn_processor(self, processor: AttentionProcessor) -> None:
        """Apply an `AVQProcessor`, or set any other processor.

        Args:
            processor: an `AVQProcessor` is set on its own layers only; any other processor goes to
                `unet.set_attn_processor`.

        Raises:
            ValueError: an `AVQProcessor` has codebooks of another model.
        """
        if not isinstance(processor, AVQProcessor):
            self.unet.set_attn_processor(processor)
        else:
            source = processor.source_for(select_layers(self.unet))
            apply_avq(self, source, backend=processor.backend, route=processor.route)
            processor.stop_waiting()

    def to_json_string(self) -> str:
        # diffusers looks up the class of a saved pipeline in its own namespace.
        config = json.loads(super().to_json_string())
        config["_class_name"] = StableDiffusionPipeline.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

"""The COCO protocol's two networks, Inception and CLIP, downloaded at first use.

Their packages, torch-fidelity and open_clip, need torchvision. Only this module imports them.
"""

from pickle import UnpicklingError

import torch
from PIL import Image
from torch import Tensor, nn

from eval.quality.protocol import CLIP_MODEL, CLIP_PREFIX, CLIP_WEIGHTS

LAYERS = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1"),
    *("Conv2d_4a_3x3", "MaxPool_2", "Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b"),
    *("Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7a", "Mixed_7b", "Mixed_7c", "AvgPool"),
)


class Inception(nn.Module):
    """The 2015 Inception, as ported from TensorFlow for FID: 2048 pooled features.

    Raises:
        ImportError: torch-fidelity is not installed.
        OSError: the weights are missing and cannot be downloaded.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            from torch_fidelity import feature_extractor_inceptionv3 as port
        except ImportError as error:
            raise ImportError(
                f"FID needs the package torch-fidelity ({error}): pip install torch-fidelity, or "
                f"name a --scorer."
            ) from error
        url = port.URL_INCEPTION_V3
        try:
            # The package itself reads the file without these two checks.
            torch.hub.load_state_dict_from_url(
                url, map_location="cpu", check_hash=True, weights_only=True
            )
        except (OSError, RuntimeError, UnpicklingError) as error:
            raise OSError(
                f"Inception's weights could not be loaded ({error}); download {url} and put it "
                f"into {torch.hub.get_dir()}/checkpoints."
            ) from error
        network = port.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
        # Bypasses the port's own resizing, which only takes bytes.
        self.layers = nn.Sequential(*(getattr(network, name) for name in LAYERS))

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, 299, 299) of floats in 0..255 to features (n, 2048)."""
        device = next(self.layers.parameters()).device
        return self.layers((images.to(device) - 128) / 128).flatten(1)


class OpenCLIP(nn.Module):
    """ViT-g-14 of open_clip in float32, for the CLIP score.

    Raises:
        ImportError: open_clip is not installed.
        OSError: the weights are missing and cannot be downloaded.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            import open_clip
        except ImportError as error:
            raise ImportError(
                f"the CLIP score needs the package open_clip ({error}): pip install "
                f"open_clip_torch, or name a --scorer."
            ) from error
        try:
            self.model, self.preprocess = open_clip.create_model_from_pretrained(
                CLIP_MODEL, CLIP_WEIGHTS
            )
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"the weights of {CLIP_MODEL} {CLIP_WEIGHTS} could not be loaded ({error}); run "
                f"hf download laion/CLIP-ViT-g-14-laion2B-s12B-b42K where there is a network, and "
                f"copy its cache here."
            ) from error
        self.model.eval().requires_grad_(False)
        self.tokenizer = open_clip.get_tokenizer(CLIP_MODEL)

    @torch.no_grad()
    def cosines(self, images: Tensor, captions: list[str]) -> Tensor:
        """Cosine between uint8 images (n, 3, h, w) and "A photo depicts " + caption, (n,).

        LinFusion inserts the prefix as tokens. The result is the same: words are tokenized
        separately, and truncation is identical.
        """
        device = next(self.model.parameters()).device
        pixels = torch.stack(
            [self.preprocess(Image.fromarray(x.permute(1, 2, 0).numpy())) for x in images]
        )
        tokens = self.tokenizer([CLIP_PREFIX + caption for caption in captions])
        image = self.model.encode_image(pixels.to(device))
        text = self.model.encode_text(tokens.to(device))
        return nn.functional.cosine_similarity(image, text)

"""The CLIP-style scorer of captions and images.

During training, a second head classifies from the image features whether copies in the image
differ, so that the features represent structure that captions do not mention. It is not exported.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from distill.pretrain.config import ScorerConfig
from distill.pretrain.data import load_images, shard, to_float
from distill.pretrain.export import save_scorer
from distill.pretrain.loop import Batch
from distill.pretrain.tokenizer import encode, scene_tokenizer, text_sizes
from distill.scenes import SCORER_SEEDS


def build_scorer(config: ScorerConfig, tokenizer: CLIPTokenizer) -> CLIPModel:
    """Return an untrained CLIP model for `tokenizer`."""
    text = {**config.text, **text_sizes(tokenizer)}
    return CLIPModel(
        CLIPConfig(
            text_config=text, vision_config=config.vision, projection_dim=config.projection_dim
        )
    )


def contrastive_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the symmetric contrastive loss; equal captions share the target.

    Args:
        logits: (n, n), captions by images.
        ids: token ids (n, length) of the captions.
    """
    equal = (ids[:, None] == ids[None]).all(-1).float()
    targets = equal / equal.sum(-1, keepdim=True)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


class ScorerModel(nn.Module):
    """The scorer with its training head and losses."""

    def __init__(self, clip: CLIPModel, config: ScorerConfig) -> None:
        super().__init__()
        self.clip = clip
        self.config = config
        self.corrupted_head = nn.Linear(clip.vision_model.config.hidden_size, 1)

    def forward(self, images: Tensor, ids: Tensor, corrupted: Tensor) -> dict[str, Tensor]:
        """Return the losses. The first len(ids) images are intact.

        Args:
            images: (n, 3, h, w) in [-1, 1], intact ones first.
            ids: token ids (m, 77) of the intact images.
            corrupted: (n,), 1 where copies differ, else 0.
        """
        intact = len(ids)
        features = self.clip.vision_model(pixel_values=images).pooler_output
        captions = self.clip.text_model(input_ids=ids).pooler_output
        first = F.normalize(self.clip.text_projection(captions).float(), dim=-1)
        second = F.normalize(self.clip.visual_projection(features[:intact]).float(), dim=-1)
        scale = self.clip.logit_scale.clamp(max=4.6052).exp()  # at most 100, as in CLIP
        logits = scale * (first @ second.T)
        differs = self.corrupted_head(features.float())[:, 0].float()
        losses = {
            "contrastive": contrastive_loss(logits, ids),
            "corrupted": F.binary_cross_entropy_with_logits(differs, corrupted),
        }
        total = losses["contrastive"] + self.config.corrupted_weight * losses["corrupted"]
        return {"loss": total, **losses}


class ScorerTask:
    """Intact and corrupted images on the device.

    Raises:
        ValueError: there are fewer scenes than processes, or no intact scene is left for a batch.
    """

    result = "scorer"

    def __init__(self, config: ScorerConfig, accelerator: Accelerator) -> None:
        self.config = config
        self.device = accelerator.device
        self.tokenizer = scene_tokenizer()
        main = accelerator.is_main_process

        seeds = SCORER_SEEDS[: config.num_scenes]
        seeds = shard(seeds, accelerator.process_index, accelerator.num_processes)
        count = _num_corrupted("num_scenes", len(seeds), config.corrupted_share)
        self.num_corrupted = _num_corrupted("batch_size", config.batch_size, config.corrupted_share)
        # The same scenes also appear intact, so only the copies tell them apart.
        common = {"size": config.image_size, "workers": config.workers, "device": self.device}
        label = "render" if main else None
        self.intact = load_images(seeds[count:], progress=label, **common)
        self.ids = encode(self.tokenizer, self.intact.captions).to(self.device)
        label = "render corrupted" if main else None
        self.corrupted = load_images(
            seeds[count:][:count], corrupted=True, progress=label, **common
        )
        self.model = ScorerModel(build_scorer(config, self.tokenizer), config).to(self.device)

    def batch(self, generator: torch.Generator) -> Batch:
        sizes = (self.config.batch_size - self.num_corrupted, self.num_corrupted)
        intact, corrupted = (
            torch.randint(len(data.images), (n,), generator=generator, device=self.device)
            for data, n in zip((self.intact, self.corrupted), sizes, strict=True)
        )
        images = [self.intact.images[intact], self.corrupted.images[corrupted]]
        # A scene without copies cannot be corrupted.
        differs = self.corrupted.has_copies[corrupted].float()
        labels = [torch.zeros(sizes[0], device=self.device), differs]
        return {
            "images": to_float(torch.cat(images)),
            "ids": self.ids[intact],
            "corrupted": torch.cat(labels),
        }

    def save(self, model: ScorerModel, folder: Path) -> None:
        save_scorer(model.clip.half(), self.tokenizer, folder)


def _num_corrupted(setting: str, total: int, share: float) -> int:
    """The number of corrupted scenes among those of one process."""
    count = max(1, round(total * share))
    if count == total:
        raise ValueError(
            f"{setting} must leave each process an intact scene beside its {count} corrupted of "
            f"{total}; raise {setting} or lower corrupted_share."
        )
    return count

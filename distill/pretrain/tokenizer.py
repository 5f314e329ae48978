"""mini-sd's tokenizer, in which every word of scene captions is one token.

Other text can be tokenized, too, down to single bytes.
"""

import torch
from torch import Tensor
from transformers import CLIPTokenizer

from avq_diffusers.mini import MINI_SD


def scene_tokenizer(folder: str = MINI_SD) -> CLIPTokenizer:
    """Load the tokenizer of mini-sd, or of another pipeline's folder.

    Raises:
        OSError: the folder has none.
    """
    return CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer")


def encode(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Return the token ids (n, 77) of captions, padded as in the diffusers pipeline."""
    ids = tokenizer(captions, padding="max_length", truncation=True).input_ids
    return torch.tensor(ids)


def text_sizes(tokenizer: CLIPTokenizer) -> dict[str, int]:
    """Return the fields of a CLIP text configuration that depend on the tokenizer."""
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }

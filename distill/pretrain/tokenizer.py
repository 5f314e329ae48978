"""A CLIP tokenizer with a byte-pair vocabulary learned from scene captions.

Every word of the captions is one token. Other text can be tokenized, too, down to single bytes.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import CLIPTokenizer

from distill.scenes import VOCABULARY

CONTEXT_LENGTH = 77
END_OF_WORD = "</w>"
START_OF_TEXT = "<|startoftext|>"
END_OF_TEXT = "<|endoftext|>"


def scene_tokenizer() -> CLIPTokenizer:
    """Train a deterministic tokenizer in which every word of scene captions is one token."""
    merges = learn_merges(VOCABULARY)  # in lower case, which are their own byte-level letters
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = letters + [letter + END_OF_WORD for letter in letters]
    tokens += [first + second for first, second in merges]
    tokens = list(dict.fromkeys([*tokens, START_OF_TEXT, END_OF_TEXT]))
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        model_max_length=CONTEXT_LENGTH,
    )


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return the byte-pair merges, in order, that make each word one token.

    Ties go to the alphabetically first pair: `tokenizers.BpeTrainer` breaks ties differently in
    each run, but processes must agree on the ids.

    Args:
        words: words in byte-level letters.
    """
    split = [[*word[:-1], word[-1] + END_OF_WORD] for word in sorted(words)]
    merges = []
    while counts := Counter(pair for symbols in split for pair in pairwise(symbols)):
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        split = [_merge(symbols, best) for symbols in split]
    return merges


def encode(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Return the token ids (n, 77) of captions, padded as in the diffusers pipeline."""
    ids = tokenizer(
        captions, padding="max_length", max_length=CONTEXT_LENGTH, truncation=True
    ).input_ids
    return torch.tensor(ids)


def text_sizes(tokenizer: CLIPTokenizer) -> dict[str, int]:
    """Return the fields of a CLIP text configuration that depend on the tokenizer."""
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT_LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged

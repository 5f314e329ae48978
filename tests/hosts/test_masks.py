"""Masks: hidden keys beside the grid's are left out, and calls with any other mask run exact."""

import pytest
import torch
from checks import differ, kinds
from tiny_transformers import CONFIG, NUM_TEXT, inputs, predict, qwen_transformer

from avq_diffusers import apply_avq, remove_avq
from avq_diffusers.hosts.masks import seen_tokens

GRID = slice(3, 8)  # behind three tokens of a text
TEXT = torch.tensor([[True, True, False], [True, False, True]])
KEYS = torch.cat([TEXT, torch.ones(2, 5, dtype=torch.bool)], dim=1)
ROWS = KEYS[:, None, None]
SQUARE = ROWS & ROWS.mT
SEGMENTS = ROWS.mT == ROWS  # hidden tokens see each other
NUMBERS = torch.zeros(2, 1, 8, 8).masked_fill(~SQUARE, -torch.inf)


def changed(mask, place, value=False):
    mask = mask.clone()
    mask[place] = value
    return mask


def seen(mask, num_queries=8):
    query, key = torch.empty(2, num_queries, 1, 8), torch.empty(2, 8, 1, 8)
    return seen_tokens(mask, query, key, GRID)


@pytest.mark.parametrize(
    "mask",
    [ROWS, KEYS, SQUARE, SEGMENTS, NUMBERS, NUMBERS.clamp(min=-1e4), ROWS.expand(2, 4, 8, 8)],
)
def test_hidden_text(mask):
    assert torch.equal(seen(mask), KEYS)


@pytest.mark.parametrize(
    "mask",
    [
        changed(ROWS, (1, ..., 5)),  # hides a key of the grid
        changed(SQUARE, (0, 0, 6, 1)),  # hides a text's key from one query of the grid
        changed(SQUARE, (0, 0, 0, 1)),  # from one of the text
        changed(NUMBERS, (0, 0, 6, 1), -1.0),  # is a bias
        ROWS.repeat(1, 4, 1, 1),  # may differ by head
        ROWS[..., :1],
        KEYS[0],
        "of another kind",
    ],
)
def test_other_masks(mask):
    assert seen(mask) is None


def test_queries_of_the_grid_only():
    """Catches a query of the grid that is taken for the key of its index, which is hidden."""
    assert torch.equal(seen(SQUARE[:, :, 3:], 5), KEYS)
    assert seen(changed(SQUARE[:, :, 3:], (0, 0, 2, 1)), 5) is None


def test_hidden_keys_are_left_out():
    """Each prompt of a batch is as it is alone, without its padding, by the definition."""
    model, lengths = qwen_transformer().double(), (NUM_TEXT, NUM_TEXT // 2, NUM_TEXT // 2)
    mask = torch.arange(NUM_TEXT) < torch.tensor(lengths)[:, None]
    batch = {
        name: x.double() if isinstance(x, torch.Tensor) else x
        for name, x in inputs(model, batch=3).items()
    }
    found = predict(apply_avq(model, CONFIG), **batch, encoder_hidden_states_mask=mask)
    assert kinds(model) == {"AVQ"}
    apply_avq(model, CONFIG, backend="reference")
    for i, length in enumerate(lengths):
        alone = {name: x[i : i + 1] for name, x in batch.items()}
        text = batch["encoder_hidden_states"][i : i + 1]
        expected, shorter = (
            predict(model, **alone | {"encoder_hidden_states": text[:, :count]})
            for count in (length, length - 1)
        )
        assert (found[i] - expected).norm() < 1e-9 * expected.norm()
        assert differ(shorter, expected)
    exact = predict(remove_avq(model), **batch, encoder_hidden_states_mask=mask)
    assert differ(found, exact)

"""Masks: hidden keys beside the grid's are left out, and calls with any other mask run exact."""

import pytest
import torch
from checks import differ, kinds
from tiny_transformers import (
    CONFIG,
    NUM_TEXT,
    inputs,
    padding,
    predict,
    qwen_transformer,
    tiny_transformer,
)
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from avq_diffusers import apply_avq, remove_avq, summary
from avq_diffusers.attention.schema import arguments_of
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec
from avq_diffusers.hosts.models import masks
from avq_diffusers.hosts.models.masks import masked_attention, read_groups, seen_tokens

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
    ],
)
def test_other_masks(mask):
    assert seen(mask) is None


def test_queries_of_the_grid_only():
    """Catches a query of the grid that is taken for the key of its index, which is hidden."""
    assert torch.equal(seen(SQUARE[:, :, 3:], 5), KEYS)
    assert seen(changed(SQUARE[:, :, 3:], (0, 0, 2, 1)), 5) is None


def test_layers_read_a_mask_once(monkeypatch):
    """Catches a wait for the device in every layer."""
    name, readings = "HunyuanVideoTransformer3DModel", []
    monkeypatch.setattr(
        masks, "seen_tokens", lambda *call: readings.append(call) or seen_tokens(*call)
    )
    model = apply_avq(tiny_transformer(name), CONFIG)
    predict(model, encoder_attention_mask=padding())
    assert [row.calls for row in summary(model).rows] == [{"AVQ": 1}] * 2
    assert len(readings) == 1


def test_what_was_read_of_a_mask(monkeypatch):
    """Catches what was read of an earlier mask, another view or for another grid, in compiled code,
    which tells no version, and while a CUDA graph is captured, in which it would stay."""
    query, both = torch.empty(2, 8, 1, 8), torch.stack([ROWS, ROWS.flip(0)])

    def read(mask, grid=GRID, keep=True):
        return read_groups(mask, query, query, grid, keep=keep)

    found = read(both[0])
    assert read(both[0]) is found
    for other in (read(both[1]), read(both[0], slice(4, 8)), read(both[0], keep=False)):
        assert len(other) == 2
        assert other is not found
    both[0] = True
    assert read(both[0]) == []
    both[0, ..., 5] = False
    assert read(both[0]) is None
    with FakeTensorMode():
        mask = torch.ones(2, 1, 1, 8, dtype=torch.bool, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert read(mask) is read("of another kind") is None


@pytest.mark.parametrize("mask", [SQUARE, changed(ROWS, (1, ..., 5)), NUMBERS])
@torch.no_grad()
def test_the_operator_of_compiled_code(mask):
    """Catches strides of another layout, AVQ with a mask that it does not serve, a hidden key that
    is seen, and what was read of an earlier mask in the same memory."""
    spec = Spec(num_parents=2, num_children=1, threshold=0, query_tile=16)
    rows = torch.randn(3, 2, 2, 8, 16).unbind()
    call = arguments_of(Tensors.of(*rows, key_order=torch.arange(5)), spec)
    memory = mask.clone()
    arguments = *call, memory, GRID.start, GRID.stop, None, "torch"
    torch.library.opcheck(masked_attention, arguments)
    exact = scaled_dot_product_attention(*rows, mask).transpose(1, 2)
    seen_queries = KEYS if seen(mask) is not None else torch.ones_like(KEYS)
    torch.testing.assert_close(masked_attention(*arguments)[seen_queries], exact[seen_queries])
    memory.numpy()[:] = mask.dtype == torch.bool  # compiled code changes no version
    exact = scaled_dot_product_attention(*rows).transpose(1, 2)
    torch.testing.assert_close(masked_attention(*arguments), exact)


def test_compiled():
    """Catches graph breaks, a graph for each number of hidden tokens, exact attention, and
    gradients that are lost."""
    model, counter = qwen_transformer(num_layers=1), CompileCounter()
    lengths, arguments = [(24, 12), (20, 7), (5, 5), (24, 24)], inputs(model)
    of_prompts = [torch.arange(NUM_TEXT) < torch.tensor(pair)[:, None] for pair in lengths]

    @torch.no_grad()
    def run(model):
        return [model(**arguments, encoder_hidden_states_mask=mask).sample for mask in of_prompts]

    def gradient(model):
        output = model(**arguments, encoder_hidden_states_mask=of_prompts[0]).sample
        return torch.autograd.grad(output.square().sum(), model.img_in.weight)[0]

    exact, exact_gradient = run(model), gradient(model)
    eager = run(apply_avq(model, CONFIG))
    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for found, expected, without_avq in zip(run(compiled), eager, exact, strict=True):
        torch.testing.assert_close(found, expected)
        assert differ(found, without_avq)
    assert counter.frame_count == 1
    torch.testing.assert_close(gradient(compiled), exact_gradient)


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

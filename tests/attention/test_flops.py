"""The operations that `FlopCounterMode` counts for AVQ, against counts by hand."""

import pytest
import torch
import torch.nn.functional as F
from cases import make_case
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from avq_diffusers import avq_attention
from avq_diffusers.hosts.masks import masked_attention

QUERY, KEY, VALUE, CODEBOOK = make_case(dtype=torch.float32)  # (2, 2, 50, 8), 6 parents, 3 children
HEADS, TOKENS, DIM, PARENTS, CHILDREN = 4, 50, 8, 6, 3  # of both batch elements
ASSIGNMENT = 2 * TOKENS * (PARENTS + CHILDREN) * DIM
IMPORTANCE = 2 * TOKENS * PARENTS * DIM
VISIBLE = PARENTS + 2 * CHILDREN
MEANS = ASSIGNMENT + 2 * TOKENS * DIM + IMPORTANCE
OWN = {"num_parents": PARENTS, "num_children": CHILDREN, "num_refined": 2, "backend": "torch"}
STORED = {"codebook": CODEBOOK, "codewords": "stored", "num_refined": 2, "backend": "torch"}
SINKS = {"sink_key": torch.randn(2, 2, 4, DIM), "sink_value": torch.randn(2, 2, 4, DIM)}


def count(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def attention(columns):
    return 4 * TOKENS * columns * DIM


@pytest.mark.parametrize(
    ("options", "per_head"),
    [
        (OWN, MEANS + attention(VISIBLE)),
        ({**OWN, "num_refined": 0}, MEANS - IMPORTANCE + attention(PARENTS)),
        (
            {**OWN, "num_updates": 2},
            MEANS + 2 * (2 * TOKENS * PARENTS * DIM + TOKENS * DIM) + attention(VISIBLE),
        ),
        (
            {**OWN, "exact_keys": 10},
            MEANS + 2 * TOKENS * VISIBLE * DIM + attention(VISIBLE + 10),
        ),
        ({**OWN, **SINKS}, MEANS + attention(VISIBLE + 4)),
        (STORED, MEANS - TOKENS * DIM + attention(VISIBLE)),
    ],
    ids=["means", "flat", "updates", "exact keys", "sinks", "stored"],
)
def test_the_forward_pass(options, per_head):
    """Assignment of keys, aggregation, importance, gains, and attention over the columns."""
    assert count(lambda: avq_attention(QUERY, KEY, VALUE, **options)) == HEADS * per_head


@pytest.mark.parametrize(
    ("options", "per_head"),
    [
        (OWN, MEANS + 10 * TOKENS * VISIBLE * DIM),
        ({**OWN, **SINKS}, MEANS + 10 * TOKENS * VISIBLE * DIM + 6 * TOKENS * 4 * DIM),
        (
            STORED,
            MEANS
            - TOKENS * DIM
            + 2 * TOKENS * VISIBLE * (3 * DIM + (1 + DIM) ** 2)
            + 2 * TOKENS * DIM * (1 + DIM),
        ),
    ],
    ids=["means", "sinks without a gradient", "stored"],
)
def test_the_backward_pass(options, per_head):
    """Logits again, then gradients of weights, queries, values and keys."""
    tokens = [x.detach().requires_grad_() for x in (QUERY, KEY, VALUE)]
    output = avq_attention(*tokens, **options)
    assert count(output.sum().backward) == HEADS * per_head


def test_quantized_keys():
    codewords = CODEBOOK.parents, CODEBOOK.children
    found = count(lambda: torch.ops.avq_diffusers.quantize(KEY, *codewords))
    assert found == HEADS * ASSIGNMENT


def test_the_kernels_count_as_pytorch_does():
    """On tensors without data: kernels need a GPU."""
    numbers = [PARENTS, CHILDREN, 2, 0, 0, 128, 1]
    meta = [x.to("meta") for x in (QUERY, KEY, VALUE)]
    arguments = *meta, None, None, None, None, None, None, numbers, 1.0
    operator = torch.ops.avq_diffusers.kernel_attention
    assert count(lambda: operator(*arguments)) == HEADS * (MEANS + attention(VISIBLE))


def test_a_mask_counts_all_keys():
    """Catches a joint attention in compiled code that counts nothing, or texts as the grid's."""
    grid, text = (torch.randn(2, num, 2, DIM) for num in (TOKENS, 4))
    tokens = torch.cat([grid, text], dim=1)
    mask, order = torch.ones(2, 1, 1, TOKENS + 4, dtype=torch.bool), torch.arange(TOKENS)
    options = {**OWN, "exact_keys": 0, "codewords": "means", "num_updates": 0, "query_tile": 128}
    joint = count(
        lambda: masked_attention(
            tokens, tokens, tokens, mask, order, 0, TOKENS, None, None, **options
        )
    )
    of_texts = 2 * 4 * PARENTS * DIM + 4 * 4 * (VISIBLE + 4) * DIM
    assert joint == HEADS * (MEANS + attention(VISIBLE + 4) + of_texts)


@pytest.mark.parametrize("num_tokens", [1024, 4096])
@pytest.mark.parametrize("backward", [False, True])
def test_avq_counts_less_than_exact_attention(num_tokens, backward):
    tokens = [torch.randn(1, 1, num_tokens, 32, requires_grad=True) for _ in range(3)]

    def run(attend):
        output = attend(*tokens)
        if backward:
            output.sum().backward()

    with sdpa_kernel(SDPBackend.MATH):
        exact = count(lambda: run(F.scaled_dot_product_attention))
    assert 0 < count(lambda: run(avq_attention)) < exact

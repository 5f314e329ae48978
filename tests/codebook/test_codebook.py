import math
import re

import pytest
import torch

from avq_diffusers.codebook.codebook import Codebook

PARENTS, CHILDREN = torch.zeros(2, 3, 5), torch.zeros(2, 3, 4, 5)


def test_properties():
    codebook = Codebook(PARENTS, CHILDREN)
    assert (codebook.num_heads, codebook.num_parents, codebook.num_children) == (2, 3, 4)
    assert (codebook.head_dim, codebook.num_codewords) == (5, 15)


def test_to_converts_both_tensors_and_keeps_itself_where_nothing_changes():
    codebook = Codebook(PARENTS, CHILDREN)
    half = codebook.to(dtype=torch.float16)
    assert half.parents.dtype == half.children.dtype == torch.float16
    assert codebook.to("cpu", torch.float32) is codebook
    on_meta = codebook.to("meta")
    assert on_meta.parents.device.type == on_meta.children.device.type == "meta"
    with pytest.raises(ValueError, match=r"parents must be finite, but got NaN or infinity\."):
        Codebook(PARENTS + 1e6, CHILDREN).to(dtype=torch.float16)


@pytest.mark.parametrize(
    ("parents", "children", "error", "message"),
    [
        ([1.0], CHILDREN, TypeError, "parents must be a tensor, but got list."),
        (PARENTS, None, TypeError, "children must be a tensor, but got NoneType."),
        (PARENTS.int(), CHILDREN, TypeError, "parents must be floating point, but got torch.int32"),
        (
            PARENTS[0],
            CHILDREN,
            ValueError,
            "parents must have shape (heads, parents, head_dim) and not be empty, but got (3, 5).",
        ),
        (PARENTS[:, :0], CHILDREN[:, :0], ValueError, "not be empty, but got (2, 0, 5)."),
        (
            PARENTS,
            CHILDREN[..., :3],
            ValueError,
            "children must have shape (2, 3, children, 5) to match parents, but got (2, 3, 4, 3).",
        ),
        (PARENTS, CHILDREN[:1], ValueError, "but got (1, 3, 4, 5)."),
        (PARENTS, PARENTS, ValueError, "but got (2, 3, 5)."),
        (
            PARENTS,
            CHILDREN.half(),
            TypeError,
            "children must have the dtype of parents, torch.float32, but got torch.float16.",
        ),
        (
            PARENTS,
            CHILDREN.to("meta"),
            ValueError,
            "children must be on the device of parents, cpu, but got meta.",
        ),
        (PARENTS / 0, CHILDREN, ValueError, "parents must be finite, but got NaN or infinity."),
        (PARENTS, CHILDREN + math.inf, ValueError, "children must be finite"),
    ],
)
def test_codebook_rejects(parents, children, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Codebook(parents, children)

"""`Tensors`: the inputs of one attention call, checked once and passed down whole.

Shapes: B batch, H heads, N queries, S keys, T sinks, D head dim, M0 parents, C children.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import MOST_CODEWORDS_PER_KEY, Spec

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_SCALE = sys.float_info.max
# Of a threshold: queries of a tile that decide its resolution, the number of queries from which not
# all do, and the variance of logits from which their growth is continued by its tangent.
SAMPLE, SAMPLED_FROM, TANGENT_FROM = 16, 4096, 20.0
# Shares of the variance of keys around the means of their cells and around that of all keys. Up to
# the sum of the two, what is inside leaves is too little to say how values follow keys, or made of
# roundings; the first-order term is 0.
LEAST_OF_CELLS, LEAST_OF_ALL = 1e-3, 1e-5
# Fields of `Tensors` with a gradient and a batch; the others are shared and constant.
NUM_TOKENS = 5


class Attended(NamedTuple):
    """What a call gives.

    Attributes:
        output: (B, H, N, D).
        backend: the one that ran: never "auto".
        shown: (B, H, T, 2) int32, the codewords and the keys that each query tile attends to, in
            the order of tiles; None if something else than AVQ ran.
    """

    output: Tensor
    backend: str
    shown: Tensor | None = None


class Tensors(NamedTuple):
    """All tensors of a call, and the factor on its logits.

    Attributes:
        key, value: (B, H, S, D).
        sink_key, sink_value: (B, H, T, D) that every query attends to exactly, or None.
    """

    query: Tensor  # (B, H, N, D)
    key: Tensor
    value: Tensor
    sink_key: Tensor | None
    sink_value: Tensor | None
    parents: Tensor | None  # (H, M0, D) of a codebook; None takes the codewords from the keys
    children: Tensor | None  # (H, M0, C, D) of a codebook
    # (N,) permutation that tiles are cut from; None is the order of the queries.
    query_order: Tensor | None
    # (S,) permutation in which parents are evenly spaced; None is the order of the keys.
    key_order: Tensor | None
    scale: float  # factor on the logits

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        codebook: Codebook | None = None,
        *,
        sink_key: Tensor | None = None,
        sink_value: Tensor | None = None,
        query_order: Tensor | None = None,
        key_order: Tensor | None = None,
        scale: float | None = None,
    ) -> "Tensors":
        """The inputs of `avq_attention`, whose arguments these are.

        Raises:
            TypeError: `codebook` is neither a `Codebook` nor None, or `query` is no tensor.
            NotImplementedError: `torch.jit.trace` records the call.
        """
        if torch._C._get_tracing_state() is not None:
            raise NotImplementedError("torch.jit.trace cannot record AVQ; use torch.export.")
        parents = children = None
        if codebook is not None:
            if not isinstance(codebook, Codebook):
                raise TypeError(f"codebook must be a Codebook, but got {type(codebook).__name__}.")
            parents, children = codebook.parents, codebook.children
        # With as many queries as keys, they are the same tokens.
        if key_order is None and isinstance(query_order, Tensor) and isinstance(key, Tensor):
            key_order = query_order if query_order.shape == key.shape[2:3] else None
        if scale is None:
            _check_tokens("query", query)
            scale = query.shape[3] ** -0.5
        sinks = sink_key, sink_value
        return cls(query, key, value, *sinks, parents, children, query_order, key_order, scale)

    def tokens(self) -> tuple[Tensor | None, ...]:
        """Query, key, value and sinks."""
        return self.query, self.key, self.value, self.sink_key, self.sink_value

    def part(self, elements: slice) -> "Tensors":
        """The call for some of the batch elements."""
        tokens = (None if x is None else x[elements] for x in self.tokens())
        return Tensors._make((*tokens, *self[NUM_TOKENS:]))

    def with_codebook(self, codebook: Codebook) -> "Tensors":
        """The call with these stored codewords."""
        return self._replace(parents=codebook.parents, children=codebook.children)

    def with_wide_codewords(self) -> "Tensors":
        """`with_codewords_in` the dtype of the query, or float32 if that is narrower."""
        return self.with_codewords_in(torch.promote_types(self.query.dtype, torch.float32))

    def with_codewords_in(self, dtype: torch.dtype) -> "Tensors":
        """The call with its codebook, if any, detached and in a dtype."""
        if self.parents is None or self.children is None:
            return self
        parents, children = (x.detach().to(dtype) for x in (self.parents, self.children))
        return self._replace(parents=parents, children=children)

    def check(self, spec: Spec, *, one_dtype: bool = True) -> None:
        """Refuse inputs that do not fit each other, or the options of the call.

        Args:
            spec: the options.
            one_dtype: whether all tokens must have the dtype of `query`.

        Raises:
            TypeError: a tensor has the wrong type or dtype.
            ValueError: shapes or devices do not agree.
        """
        if not isinstance(self.scale, int | float):
            raise TypeError(f"scale must be a number or None, but got {type(self.scale).__name__}.")
        if not abs(self.scale) <= LARGEST_SCALE:
            raise ValueError(f"scale must be finite, but got {self.scale}.")
        if (self.sink_key is None) != (self.sink_value is None):
            raise ValueError("sink_key and sink_value must be given together.")
        num_tokens = 3 if self.sink_key is None else NUM_TOKENS
        tokens = {name: getattr(self, name) for name in Tensors._fields[:num_tokens]}
        for name, tensor in tokens.items():
            _check_tokens(name, tensor)
        query, key, batch = self.query, self.key, self.query.shape[0]
        devices = {name: tensor.device for name, tensor in tokens.items()}
        shapes: dict[str, Sequence[int]] = {name: x.shape for name, x in tokens.items()}
        if self.parents is not None:
            devices["codebook"] = self.parents.device
            shapes["codebook"] = (batch, *self.parents.shape)
        for token, length, order in (
            ("query", query.shape[2], self.query_order),
            ("key", key.shape[2], self.key_order),
        ):
            if order is not None:
                _check_order(token, length, order)
                devices[f"{token}_order"] = order.device
        for name, device in devices.items():
            if device != query.device:
                raise ValueError(
                    f"{name} must be on the device of query, {query.device}, but got {device}."
                )
        for dim, word in ((0, "batch size"), (1, "number of heads"), (3, "head dim")):
            for name, shape in shapes.items():
                if shape[dim] != query.shape[dim]:
                    raise ValueError(
                        f"{name} must have the {word} of query, {query.shape[dim]}, but got "
                        f"{shape[dim]}."
                    )
        for keys, values in (("key", "value"), ("sink_key", "sink_value"))[: num_tokens // 2]:
            expected, found = shapes[keys][2], shapes[values][2]
            if found != expected:
                raise ValueError(
                    f"{values} must have as many tokens as {keys}, {expected}, but got {found}."
                )
        for name, tensor in tokens.items():
            if one_dtype and tensor.dtype != query.dtype:
                raise TypeError(
                    f"{name} must have the dtype of query, {query.dtype}, but got {tensor.dtype}."
                )
        self._check_codewords(spec)

    def _check_codewords(self, spec: Spec) -> None:
        parents, children = spec.num_parents, spec.num_children
        if self.children is not None:
            sizes = tuple(self.children.shape[1:3])
            if sizes != (parents, children):
                raise ValueError(
                    f"codebook must have {parents} parents with {children} children each, but got "
                    f"{sizes[0]} and {sizes[1]}."
                )
        elif not spec.means:
            raise ValueError('codewords="stored" needs a codebook.')
        elif self.key.shape[2] < spec.least_keys:
            raise ValueError(
                f"{parents} parents with {children} children each need at least {spec.least_keys} "
                f"keys, one for {MOST_CODEWORDS_PER_KEY} codewords, but got {self.key.shape[2]}."
            )


def empty_tokens(tokens: Tensor) -> Tensor:
    """Uninitialized memory like `tokens` (B, H, N, D), with the strides of (B, N, H, D).

    Not a view: autograd refuses in-place changes to a view returned by an operator.
    """
    device, dtype = tokens.device, tokens.dtype
    return torch.empty_permuted(tokens.shape, (0, 2, 1, 3), dtype=dtype, device=device)


def empty_shown(query: Tensor, query_tile: int) -> Tensor:
    """Uninitialized `Attended.shown` of a call with this `query` (B, H, N, D) and `query_tile`."""
    batch, heads, num_queries, _ = query.shape
    num_tiles = (num_queries + query_tile - 1) // query_tile
    return query.new_empty(batch, heads, num_tiles, 2, dtype=torch.int32)


def mean_columns(shown: Tensor | None) -> float:
    """Codewords and keys that a query tile of an AVQ call attends to, on average; waits for a GPU.

    Args:
        shown: `Attended.shown`.
    """
    assert shown is not None
    return shown.sum(dim=-1, dtype=torch.float32).mean().item()


def _check_tokens(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, but got {type(tensor).__name__}.")
    if tensor.ndim != 4:
        raise ValueError(
            f"{name} must have shape (batch, heads, tokens, head_dim), but got "
            f"{tuple(tensor.shape)}."
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64, but got {tensor.dtype}."
        )
    if 0 in tensor.shape:
        raise ValueError(f"{name} must not be empty, but got shape {tuple(tensor.shape)}.")


def _check_order(token: str, length: int, order: object) -> None:
    name = f"{token}_order"
    if not isinstance(order, Tensor):
        raise TypeError(f"{name} must be a tensor, but got {type(order).__name__}.")
    if order.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, but got {order.dtype}.")
    if order.shape != (length,):
        raise ValueError(
            f"{name} must have shape ({length},), one entry per {token}, but got "
            f"{tuple(order.shape)}."
        )

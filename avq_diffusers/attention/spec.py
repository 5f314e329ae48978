"""`Tensors` and `Spec`: the inputs of one attention call, checked once and passed down whole.

Shapes: B batch, H heads, N queries, S keys, T sinks, D head dim, M0 parents, C children.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import (
    CODEWORDS,
    LARGEST_COUNT,
    MOST_CODEWORDS_PER_KEY,
    MOST_UPDATES,
    check_int,
    least_keys,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_SCALE = sys.float_info.max
# Fields of `Tensors` with a gradient and a batch; the others are shared and constant.
NUM_TOKENS = 5


class Tensors(NamedTuple):
    """All tensors of a call.

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

    @classmethod
    def of_call(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        codebook: Codebook | None,
        options: Mapping[str, Any],
    ) -> "Tensors":
        """The tensors among the arguments of `avq_attention`, unchecked.

        Args:
            query, key, value, codebook: as in `avq_attention`.
            options: its other arguments.

        Raises:
            TypeError: `codebook` is neither a `Codebook` nor None.
        """
        parents = children = None
        if codebook is not None:
            if not isinstance(codebook, Codebook):
                raise TypeError(f"codebook must be a Codebook, but got {type(codebook).__name__}.")
            parents, children = codebook.parents, codebook.children
        query_order, key_order = options["query_order"], options["key_order"]
        # With as many queries as keys, they are the same tokens.
        is_shared = key_order is None and isinstance(query_order, Tensor)
        if is_shared and isinstance(key, Tensor) and query_order.shape == key.shape[2:3]:
            key_order = query_order
        sinks = options["sink_key"], options["sink_value"]
        return cls(query, key, value, *sinks, parents, children, query_order, key_order)

    def tokens(self) -> tuple[Tensor | None, ...]:
        """Query, key, value and sinks."""
        return self.query, self.key, self.value, self.sink_key, self.sink_value

    def part(self, elements: slice) -> "Tensors":
        """The call for some of the batch elements."""
        tokens = (None if x is None else x[elements] for x in self.tokens())
        return Tensors._make((*tokens, *self[NUM_TOKENS:]))

    def with_codewords_in(self, dtype: torch.dtype) -> "Tensors":
        """The call with its codebook, if any, detached and in a dtype."""
        if self.parents is None or self.children is None:
            return self
        parents, children = (x.detach().to(dtype) for x in (self.parents, self.children))
        return self._replace(parents=parents, children=children)

    def check(self, *, one_dtype: bool = True) -> None:
        """Refuse tensors that do not fit each other.

        Args:
            one_dtype: whether all tokens must have the dtype of `query`.

        Raises:
            TypeError: a tensor has the wrong type or dtype.
            ValueError: shapes or devices do not agree.
        """
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


class Spec(NamedTuple):
    """Every option of a call; hashable, so it can be a cache key."""

    num_parents: int  # M0
    num_children: int  # C; 0 is flat VQ-attention
    num_refined: int  # parents refined per query tile
    exact_keys: int  # most keys per query tile that take part as themselves
    num_updates: int  # Lloyd updates of the parents on the keys of the call
    query_tile: int  # consecutive queries in the query order that share one choice of parents
    means: bool  # whether the mean of its keys represents a leaf or cell, else the stored codeword
    scale: float  # factor on the logits

    def refines_some(self) -> bool:
        """Whether tiles may refine different parents."""
        return 0 < self.num_refined < self.num_parents

    def num_visible(self) -> int:
        """M0 + P C, the codewords that a query tile sees."""
        return self.num_parents + self.num_refined * self.num_children

    def numbers(self) -> list[int]:
        """All integers, for an operator's schema."""
        return [int(x) for x in self[:-1]]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], scale: float) -> "Spec":
        """The inverse of `numbers`.

        Args:
            numbers: a spec's `numbers`.
            scale: its scale.
        """
        *integers, means = numbers
        return cls._make((*integers, bool(means), scale))

    @classmethod
    def of_call(cls, tensors: Tensors, options: Mapping[str, Any]) -> "Spec":
        """The options among the arguments of `avq_attention`, checked.

        Args:
            tensors: the checked tensors; a codebook sets the sizes.
            options: the other arguments.

        Raises:
            TypeError: an option has the wrong type, is missing or unknown.
            ValueError: an option is out of range or conflicts with another.
        """
        # In torch.jit.trace sizes are tensors; `int` makes them numbers.
        given = {name: x for name, x in options.items() if name not in Tensors._fields}
        codewords, scale = given.pop("codewords"), given.pop("scale")
        if tensors.children is not None:
            given["num_parents"], given["num_children"] = map(int, tensors.children.shape[1:3])
        if scale is not None and not isinstance(scale, int | float):
            raise TypeError(f"scale must be a number or None, but got {type(scale).__name__}.")
        if scale is not None and not abs(scale) <= LARGEST_SCALE:
            raise ValueError(f"scale must be finite, but got {scale}.")
        if codewords not in CODEWORDS:
            raise ValueError(
                f"codewords must be one of {', '.join(CODEWORDS)}, but got {codewords!r}."
            )
        if codewords == "stored" and tensors.parents is None:
            raise ValueError('codewords="stored" needs a codebook.')
        scale = int(tensors.query.shape[3]) ** -0.5 if scale is None else float(scale)
        spec = cls(**given, means=codewords == "means", scale=scale)
        spec._check()
        parents, children, keys = spec.num_parents, spec.num_children, tensors.key.shape[2]
        least = least_keys(parents, children)
        if tensors.parents is None and keys < least:
            raise ValueError(
                f"{parents} parents with {children} children each need at least {least} keys, "
                f"one for {MOST_CODEWORDS_PER_KEY} codewords, but got {keys}."
            )
        return spec

    def _check(self) -> None:
        check_int("num_parents", self.num_parents, 1, LARGEST_COUNT)
        check_int("num_children", self.num_children, 0, LARGEST_COUNT)
        check_int("num_refined", self.num_refined, 0, LARGEST_COUNT)
        check_int("num_updates", self.num_updates, 0, MOST_UPDATES)
        check_int("query_tile", self.query_tile, 1, LARGEST_COUNT)
        check_int("exact_keys", self.exact_keys, 0, LARGEST_COUNT)
        if self.num_refined > self.num_parents:
            raise ValueError(
                f"num_refined must be at most num_parents, {self.num_parents}, but got "
                f"{self.num_refined}."
            )
        if self.num_refined > 0 and self.num_children == 0:
            raise ValueError(
                f"num_refined must be 0 without children (flat VQ), but got {self.num_refined}."
            )

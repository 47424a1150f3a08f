"""Attention of heads that several ranks hold, each for some of the tokens: no rank computes what another one does.

What computes q returns it as :class:`DividedHeads`, which stays one through views, rotations and norms, until torch's
``scaled_dot_product_attention`` is called with it. That is computed of this rank's tokens only, and is zero elsewhere.
Attention that is computed otherwise is right, too: a row-parallel layer reads this rank's tokens alone.

``B`` sequences of ``S`` tokens, ``H`` heads of ``C`` features on this rank.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroresize.layers.shared_rows import SharedRows, Span


@dataclasses.dataclass
class Division:
    """Tells which tokens a rank computes of its heads.

    Attributes:
        spans: [H]: of each head the slices of all tokens.
        slices: into how many the tokens are cut.
        num_tokens: B S.
        was_attended: whether attention has been computed by it.
    """

    spans: tuple[tuple[Span, ...], ...]
    slices: int
    num_tokens: int
    was_attended: bool = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Compute torch's ``scaled_dot_product_attention`` [B, H, S, C] of the tokens that are this rank's."""
        shape, num_heads, num_keys = query.shape, len(self.spans), key.shape[1]
        fits = query.ndim == 4 and shape[1] == num_heads and shape[0] * shape[2] == self.num_tokens
        if not fits or not num_keys or num_heads % num_keys:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        self.was_attended = True
        if num_keys < num_heads:
            key, value = (each.repeat_interleave(num_heads // num_keys, 1) for each in (key, value))
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        attended = []
        for spans, heads in groupby(range(num_heads), key=self.spans.__getitem__):
            numbers = list(heads)
            of_heads = slice(numbers[0], numbers[-1] + 1)
            q, k, v = (each[:, of_heads] for each in (query, key, value))
            mask = _at(attn_mask, 1, of_heads)
            if spans == ((0, self.slices),):
                attended.append(F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **options))
                continue
            y = None
            for sequences, tokens in self._rectangles(spans, shape[2]):
                k_here, v_here, here = k[sequences], v[sequences], _at(_at(mask, 0, sequences), 2, tokens)
                if is_causal:  # no token sees later ones
                    k_here, v_here = k_here[..., : tokens.stop, :], v_here[..., : tokens.stop, :]
                if is_causal and tokens.start:
                    here = q.new_ones(tokens.stop - tokens.start, k_here.shape[2], dtype=torch.bool).tril(tokens.start)
                operands = q[sequences, :, tokens], k_here, v_here, here, dropout_p, is_causal and not tokens.start
                of_tokens = F.scaled_dot_product_attention(*operands, **options)
                y = of_tokens.new_zeros(*q.shape[:3], v.shape[-1]) if y is None else y
                y[sequences, :, tokens] = of_tokens
            if y is None:  # of few tokens none is this rank's, and its backward must meet the others' all the same
                y = q.new_zeros(*q.shape[:3], v.shape[-1]) + sum(each[:0].sum() for each in (q, k, v))
            attended.append(y)
        return torch.cat(attended, dim=1)

    def _rectangles(self, spans: tuple[Span, ...], length: int) -> Iterator[tuple[slice, slice]]:
        """The sequences and tokens of them in these slices, as few rectangles."""
        for span in spans:
            begin, end = (self.num_tokens * slice_ // self.slices for slice_ in span)
            first, last = -(-begin // length) * length, end // length * length
            for start, stop in pairwise(sorted({begin, end, *((first, last) if first <= last else ())})):
                yield slice(start // length, -(-stop // length)), slice(start % length, (stop - 1) % length + 1)


def _at(mask: Tensor | None, dim: int, where: slice) -> Tensor | None:
    """A part of a mask, which may be the same along a dimension."""
    return mask if mask is None or mask.shape[dim] == 1 else mask[(slice(None),) * dim + (where,)]


class DividedHeads(Tensor):
    """Queries of which this rank computes some tokens of some heads."""

    division: Division | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = copy.deepcopy(whole_heads(self), memo)
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_tensors = (getattr(each, "division", None) for each in _flat((*args, *kwargs.values())))
        division: Division | None = next((each for each in of_tensors if isinstance(each, Division)), None)
        if func is F.scaled_dot_product_attention and division is not None:
            operands = {name: whole_heads(each) for name, each in kwargs.items()}
            return division.attend(*map(whole_heads, args), **operands)
        result = super().__torch_function__(func, types, args, kwargs)
        for each in _flat((result,)):
            if isinstance(each, cls):
                each.division = division
        return result


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list | tuple) else (value,)


def with_divided_heads(y: Tensor, rows: SharedRows, x: Tensor) -> Tensor:
    """Return y [B, S, H C] of queries, of x [B, S, K], such that attention is computed of this rank's tokens."""
    if not rows.spans or rows.are_sequences_whole or x.ndim != 3:
        return y
    return marked(y, Division(rows.spans, rows.slices, x.shape[0] * x.shape[1]))


def marked(y: Tensor, division: Division) -> Tensor:
    """Return queries of which attention is computed as they are divided."""
    queries: Any = y.as_subclass(DividedHeads)
    queries.division = division
    divided: Tensor = queries
    return divided


def whole_heads(x: Any) -> Any:
    """Return ``x`` as a plain tensor."""
    return x.as_subclass(Tensor) if isinstance(x, DividedHeads) else x

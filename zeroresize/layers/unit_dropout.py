"""Dropout between column- and row-parallel layers whose mask does not depend on which rank owns a unit.

An element is kept or dropped by a hash of (seed, number of the call, global unit, position), so a step is the same
wherever its units are computed. ``F`` features of this rank's units; ``L`` positions before their dimension, ``I``
after it. :class:`KeyedDropout` puts such modules in place of a model's, for as long as a balancer works.

A mask's number is counted by the module itself, alike on all ranks, whatever their random states are. A forward that
activation checkpointing computes again is known by one number that every call draws from torch's CPU generator: with
``preserve_rng_state=True``, torch's default, it draws the same one and gets the same mask.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zeroresize.comm.collectives import group_rank
from zeroresize.layers.segment import OwnedSegment
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.utils.hashing import mixed
from zeroresize.utils.torch_private import children_of, current_backward
from zeroresize.utils.value_checks import number

#: Calls of which a module knows the numbers, for those that are computed again.
_REMEMBERED = 4096
#: Elements that are hashed at a time on a CPU, so that they stay in its caches.
_BLOCK = 1 << 17


class UnitDropout(nn.Module):
    """Drops elements with probability ``p`` in training and divides the others by 1 - p, as ``torch.nn.Dropout``.

    Args:
        p: 0 to 1.
        segment: the segment between whose layers it stands; its map says which units this rank owns.
        rank: of this process in the tensor-parallel group.
        dim: the dimension of its input that holds the units, -1 for neurons, 1 for attention probabilities
            [B, heads, T, T]. Along it lie all of the rank's units, of each the same number of neighbours.
        seed: alike on all ranks of the group; another one for each module and each replica of the model.
        replaces: the module in whose place it stands, which is given back when nothing needs keys any more.

    Shapes: x [..., F, ...] → the same.

    Attributes:
        num_calls: forwards in training so far, but for those that were computed again. The balancer's state holds it.
    """

    def __init__(
        self,
        p: float,
        segment: OwnedSegment,
        rank: int,
        *,
        dim: int,
        seed: int,
        replaces: nn.Module | None = None,
    ) -> None:
        super().__init__()
        number("p", p, least=0.0, most=1.0)
        self.p, self.segment, self.rank, self.dim, self.seed = p, segment, rank, dim, seed
        self.num_calls = 0
        self._replaces = (replaces,)  # in a tuple: it is no part of the model meanwhile
        self._numbers: OrderedDict[int, int] = OrderedDict()
        self._features: tuple[OwnershipMap, int, torch.device, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        key = mixed(self.seed, self._number_of_call())
        dim = self.dim % x.dim()
        shape = (math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]))
        keep_LFI = _mask(key, self._features_of(x.shape[dim], x.device), shape, self.p)
        return _Dropped.apply(x, keep_LFI, 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0)

    @property
    def replaced(self) -> nn.Module | None:
        """The module in whose place it stands; None for one that was made without."""
        return self._replaces[0]

    def resume(self, num_calls: int) -> None:
        """Go on after so many forwards in training, whatever was drawn in this process since."""
        self.num_calls = num_calls
        self._numbers.clear()

    def extra_repr(self) -> str:
        return f"p={self.p}, dim={self.dim}"

    def _number_of_call(self) -> int:
        drawn = int(torch.randint(1 << 62, (), device="cpu"))
        number = self._numbers.get(drawn)
        if number is None:
            if current_backward() != -1:
                raise RuntimeError(
                    "a forward that holds a UnitDropout was computed again from another random state: "
                    "activation checkpointing needs preserve_rng_state=True, which is torch's default"
                )
            number = self._numbers[drawn] = self.num_calls
            self.num_calls += 1
            if len(self._numbers) > _REMEMBERED:
                self._numbers.popitem(last=False)
        return number

    def _features_of(self, num_features: int, device: torch.device) -> Tensor:
        """[F], int64: the features of this rank's units, numbered over all ranks."""
        owned = self.segment.owned
        known = self._features
        if known is not None and known[0] is owned and known[1:3] == (num_features, device):
            return known[3]
        units = owned.units_of(self.rank)
        each = num_features // max(len(units), 1)
        if each * len(units) != num_features:
            raise ValueError(
                f"an input of UnitDropout has {num_features} features in dimension {self.dim}, and this rank owns "
                f"{len(units)} units of the segment of {self.segment.name}: it must be a multiple"
            )
        features = torch.from_numpy((units[:, None] * each + np.arange(each)).reshape(-1)).to(device)
        self._features = owned, num_features, device, features
        return features


def drops(segment: OwnedSegment) -> bool:
    """Tell whether something between the layers drops elements, in training, by random numbers that are not keyed."""
    return segment.has_other_dropout or any(
        getattr(dropout, "p", 0.0) for dropout, _ in segment.dropouts if not isinstance(dropout, UnitDropout)
    )


def why_not_keyable(model: nn.Module, segments: Sequence[OwnedSegment]) -> dict[str, str]:
    """Tell, by name, why :class:`KeyedDropout` cannot replace a segment's dropout: its units must stay even."""
    places = _places(model)
    uses = Counter(id(dropout) for segment in segments for dropout, _ in segment.dropouts)
    reasons: dict[str, str] = {}
    for segment in segments:
        if segment.has_other_dropout:
            reasons[segment.name] = (
                "it drops elements in a function, a fused attention or a module that is used elsewhere"
            )
        for dropout, _ in segment.dropouts:
            stands_twice = uses[id(dropout)] > 1 or len(places.get(id(dropout), ())) > 1
            if isinstance(dropout, nn.Dropout) and dropout.p and stands_twice:
                reasons[segment.name] = "its dropout module stands at several places of the model"
    return reasons


class KeyedDropout:
    """Replaces dropout modules with p > 0 between the layers of ``segments`` by :class:`UnitDropout`, in place."""

    def __init__(self, model: nn.Module, segments: Sequence[OwnedSegment], *, seed: int) -> None:
        self._segments, self._seed = segments, seed
        places = _places(model)
        self._keyed: list[tuple[UnitDropout, OwnedSegment, int, nn.Module, str]] = []
        for segment in segments:
            for place, (dropout, _) in enumerate(segment.dropouts):
                if isinstance(dropout, UnitDropout) or (isinstance(dropout, nn.Dropout) and dropout.p):
                    self._key(segment, place, *places[id(dropout)][0])

    def _key(self, segment: OwnedSegment, place: int, parent: nn.Module, attribute: str) -> None:
        dropout, dim = segment.dropouts[place]
        if isinstance(dropout, UnitDropout):  # whoever put it there was not closed, or left units away
            keyed = dropout
            keyed.segment = segment
        else:
            assert isinstance(dropout, nn.Dropout)
            rank = group_rank(segment.modules[-1].process_group)
            seed = mixed(self._seed, zlib.crc32(f"{segment.name}/{place}".encode()))
            keyed = UnitDropout(dropout.p, segment, rank, dim=dim, seed=seed, replaces=dropout)
            keyed.resume(segment.dropout_calls.get(place, 0))
            setattr(parent, attribute, keyed.train(dropout.training))
            _set_dropout(segment, place, keyed)
        self._keyed.append((keyed, segment, place, parent, attribute))

    def close(self) -> None:
        """Put the modules back that were replaced, but for those of segments whose units are away.

        There a mask by each rank's own random numbers would be another one on every owner.
        """
        for keyed, segment, place, parent, attribute in self._keyed:
            replaced = keyed.replaced
            if replaced is None or not segment.owned.is_home or segment.dropouts[place][0] is not keyed:
                continue
            segment.dropout_calls[place] = keyed.num_calls
            _set_dropout(segment, place, replaced)
            if children_of(parent).get(attribute) is keyed:
                setattr(parent, attribute, replaced.train(keyed.training))
        self._keyed = []


def _set_dropout(segment: OwnedSegment, place: int, module: nn.Module) -> None:
    dropouts = list(segment.dropouts)
    dropouts[place] = module, dropouts[place][1]
    segment.dropouts = tuple(dropouts)


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return where each module stands: the modules that hold it, and under which names."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, child in children_of(module).items():
            if child is not None:
                places.setdefault(id(child), []).append((module, attribute))
    return places


class _Dropped(torch.autograd.Function):
    """y = keep · x / (1 - p); dx = keep · dy / (1 - p)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep_LFI: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep_LFI)
        ctx.scale = scale
        return _scaled(x, keep_LFI, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (keep_LFI,) = ctx.saved_tensors
        return _scaled(dy, keep_LFI, ctx.scale), None, None


def _scaled(x: Tensor, keep_LFI: Tensor, scale: float) -> Tensor:
    return (x * keep_LFI.view(x.shape)).mul_(scale)


def _mask(key: int, features_F: Tensor, shape: tuple[int, int, int], p: float) -> Tensor:
    """[L, F, I], bool: what is kept."""
    num_leading, num_features, num_inner = shape
    keep_LFI = torch.empty(shape, dtype=torch.bool, device=features_F.device)
    if keep_LFI.numel() == 0:
        return keep_LFI
    positions = torch.arange(num_leading * num_inner, dtype=torch.int64, device=features_F.device)
    of_position = _hashed(positions, mixed(key, 1)).view(num_leading, 1, num_inner)
    of_feature = _hashed(features_F, mixed(key, 2)).view(1, num_features, 1)
    if num_inner == 1:  # two dimensions are faster
        keep, of_position, of_feature = keep_LFI[:, :, 0], of_position[:, :, 0], of_feature[:, :, 0]
    else:
        keep = keep_LFI
    threshold = min(round(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    step = num_leading if keep.is_cuda else max(_BLOCK // (num_features * num_inner), 1)
    for start in range(0, num_leading, step):
        bits = of_position[start : start + step] ^ of_feature
        bits.mul_(-1640531535)
        bits ^= bits >> 15
        bits.mul_(-2048144777)
        torch.ge(bits, threshold, out=keep[start : start + step])
    return keep_LFI


def _hashed(numbers: Tensor, key: int) -> Tensor:
    """32 bits of a hash of each number (int64), which may be compared and mixed further."""
    bits = (numbers + _signed(key)) * _signed(0x9E3779B97F4A7C15)
    bits ^= (bits >> 30) & ((1 << 34) - 1)
    bits *= _signed(0xBF58476D1CE4E5B9)
    bits ^= (bits >> 27) & ((1 << 37) - 1)
    bits *= _signed(0x94D049BB133111EB)
    return (bits >> 32).to(torch.int32)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits

"""What splitting whole linear layers over ranks needs: which may be split, parts of packed ones, and ties.

A packed layer, such as q, k and v in one weight, has parts, each of which is divided over the ranks by itself: a rank
holds its r-th of every part, one part after the other. Where layers share a weight, they are split one at a time: what
a whole parameter was split into is remembered while either lives, so that the next layer that has it gets the same
part, and a model in which whole and part, or two parts, stand side by side is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.comm.collectives import all_gather
from zeroresize.layers.local_parts import local_of, why_not_plain
from zeroresize.utils.torch_private import is_dividing, is_dtensor, parameters_of

#: An int is that many equal parts; a sequence holds the features of each part in the undivided layer.
Parts = int | Sequence[int]

#: What a subclass of ``nn.Linear`` may have and still compute the same as an ``nn.Linear``, once it is made.
_LOSES_NOTHING = {
    *("__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate_func__", "__parameters__"),
    *("__constants__", "__firstlineno__", "__static_attributes__"),
}
_REMEDY = (
    "Split both alike (the same style and ranks), or leave both whole; where they are to be independent, give one a "
    "copy of its own before the split: nn.Parameter(weight.detach().clone())"
)


def checked_parts(parts: Parts, size: int, num_shares: int, whose: str, shares: str = "ranks") -> tuple[int, ...]:
    """Return the features of each part of an undivided layer that has ``size`` of them; see :func:`part_of_rank`."""
    sizes: tuple[int, ...] = ()
    if type(parts) is int:
        sizes = (size // parts,) * parts if parts > 0 else ()
    elif isinstance(parts, Sequence) and all(type(part) is int and part > 0 for part in parts):
        sizes = tuple(parts)
    if not sizes or sum(sizes) != size:
        raise ValueError(
            f"{whose}: parts={parts!r} is not allowed: wanted is how many equal parts the {size} features are, or the "
            f"features of each part, which sum up to {size}"
        )
    if indivisible := [part for part in sizes if part % num_shares]:
        raise ValueError(
            f"{whose}: parts={parts!r}: a part of {indivisible[0]} features is not divisible by {num_shares} {shares}"
        )
    return sizes


def part_of_rank(
    tensor: Tensor, dim: int, parts: Sequence[int], home: Sequence[int], rank: int, begins: Sequence[int] = ()
) -> Tensor:
    """Return what ``rank`` holds of the undivided ``tensor``, a copy: its share of each part along ``dim``.

    Args:
        home: how many units of every part each rank has.
        begins: the first of them, where several ranks have some; empty for neighbours.
    """
    begin, whole = place_of_rank(home, rank, begins)
    pieces = [
        part.narrow(dim, size * begin // whole, size * home[rank] // whole)
        for part, size in zip(tensor.detach().split(list(parts), dim), parts, strict=True)
    ]
    return torch.cat(pieces, dim)


def whole_of_ranks(local: Tensor, dim: int, layer: Any) -> Tensor:
    """Return the whole tensor of which each rank holds its part at home, along ``dim``, by ``layer``; collective."""
    home, begins, by_row = layer.home, layer.begins, local.detach().movedim(dim, 0)
    sizes = [layer.home_shape_on(rank)[layer.divided_dim] for rank in range(len(home))]
    parts = parts_of(layer)
    padded = by_row.new_zeros(max(sizes), *by_row.shape[1:])
    padded[: len(by_row)] = by_row
    whole = by_row.new_empty(sum(parts), *by_row.shape[1:])
    for rank, rows in enumerate(all_gather(padded, layer.process_group)):
        begin, num_units = place_of_rank(home, rank, begins)
        counts = [size * home[rank] // num_units for size in parts]
        for of_part, piece in zip(whole.split(list(parts)), rows[: sizes[rank]].split(counts), strict=True):
            of_part[len(of_part) * begin // num_units :][: len(piece)] = piece
    return whole.movedim(0, dim).contiguous()  # as files want it


def parts_of(layer: Any) -> tuple[int, ...]:
    """Return the sizes of the parts that a layer's whole weight is packed of, along what is divided."""
    num_parts = getattr(layer.weight, "partition_stride", 1)  # as Megatron-Core marks it
    return layer.parts or (layer.whole_size // num_parts,) * num_parts


def place_of_rank(home: Sequence[int], rank: int, begins: Sequence[int] = ()) -> tuple[int, int]:
    """Return which of the units ``rank`` has at first, and how many there are; see :func:`part_of_rank`."""
    return (begins[rank], begins[-1] + home[-1]) if begins else (sum(home[:rank]), sum(home))


def why_no_plain_linear(module: Any, *, but_for_forward: bool = False) -> str | None:
    """Tell why a linear layer may compute something else than its weight and bias say; None if it does not."""
    kind = type(module)
    if kind.forward is not nn.Linear.forward or ("forward" in vars(module) and not but_for_forward):
        return f"a {kind.__name__} with a forward of its own"
    classes = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    lost = sorted({added for each in classes for added in vars(each)} - _LOSES_NOTHING)
    if lost:
        return f"a {kind.__name__}: its {', '.join(lost)} would be lost"
    if (made_of_others := why_not_plain(module.weight)) is not None:
        return f"one whose weight is {made_of_others}"
    named = (*module.named_parameters(), *module.named_buffers(), *module.named_children())
    others = {part for part, _ in named} - {"weight", "bias"}
    return f"one that holds {', '.join(sorted(others))} beside its weight and bias" if others else None


@dataclass(eq=False)
class _Origin:
    """Of a whole parameter."""

    parts: list[tuple[Any, Any, str, Hashable]] = field(default_factory=list)

    def __reduce__(self) -> Any:
        return _Origin, ()  # a file of a whole model holds none of the layers it was made of


#: Under which a parameter knows it: no weak reference to a DTensor, as torch could not swap it in ``Module.to`` then.
_ORIGIN = "_zeroresize_origin"


def require_split_alike(linear: nn.Module, wholes: Mapping[str, Tensor], division: Hashable) -> None:
    """Check, before ``linear`` is split, that what it shares with layers split before is divided as there."""
    for name, whole in wholes.items():
        part = _part_of_another(linear, whole)
        if part is not None and part[1:] != (name, division):
            raise ValueError(
                f"the {name} of a layer and the {part[1]} of another one are one parameter (tied weights), which would "
                f"be split in two ways and trained apart. {_REMEDY}"
            )


def keep_ties(linear: nn.Module, wholes: Mapping[str, Tensor], layer: nn.Module, division: Hashable) -> None:
    """Let ``layer``, just made of the whole ``linear``, share what that shared with layers made before."""
    require_split_alike(linear, wholes, division)
    for name, whole in wholes.items():
        part, origin = _part_of_another(linear, whole), getattr(whole, _ORIGIN, None) or _Origin()
        setattr(whole, _ORIGIN, origin)
        if part is not None:
            setattr(layer, name, getattr(part[0], part[1]))
        elif origin.parts:
            origin.parts.clear()  # the same whole layer again: another model's
        origin.parts.append((weakref.ref(linear), weakref.ref(layer), name, division))
        setattr(getattr(layer, name), _ORIGIN, origin)


def require_ties_kept(model: nn.Module) -> None:
    """Check that no two parameters of ``model`` that train were one before layers were split."""
    seen: dict[_Origin, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        origin = getattr(parameter, _ORIGIN, None)
        if origin is None:
            continue
        other_name, other = seen.setdefault(origin, (name, parameter))
        if other is not parameter and (other.requires_grad and parameter.requires_grad):
            raise ValueError(
                f"{other_name} and {name} were one parameter (tied weights), and splitting has made two of it, which "
                f"would be trained apart. {_REMEDY}"
            )


def _part_of_another(linear: nn.Module, whole: Tensor) -> tuple[nn.Module, str, Hashable] | None:
    """A layer made of another whole layer with this parameter, the parameter's name there, and the division.

    None where one was made of ``linear`` already: that is the next model made of the same whole layers.
    """
    parts = getattr(whole, _ORIGIN, _Origin()).parts
    alive = [(source(), layer(), name, division) for source, layer, name, division in parts]
    if any(source is linear for source, *_ in alive):
        return None
    return next(((layer, name, division) for _, layer, name, division in alive if layer is not None), None)


def probably_untied(model: nn.Module, *, are_divided: bool = True) -> Iterator[tuple[str, str]]:
    """Yield names of two parameters each that hold the same numbers, which are not constant.

    Each rank compares what it has of both; nothing is sent.

    Args:
        are_divided: only those of which one is a DTensor; else only those of which one is an embedding's.
    """
    by_shape: dict[tuple[int, ...], list[tuple[str, Tensor, bool]]] = {}
    for module_name, module in model.named_modules():
        for key, parameter in parameters_of(module).items():
            if parameter is None or parameter.is_meta or not parameter.requires_grad or parameter.dim() < 2:
                continue
            name = f"{module_name}.{key}".lstrip(".")
            is_meant = is_dtensor(parameter) if are_divided else hasattr(module, "num_embeddings")
            for other_name, other, is_other_meant in by_shape.setdefault(tuple(parameter.shape), []):
                if other is not parameter and (is_meant or is_other_meant) and _equal(other, parameter):
                    yield other_name, name
            by_shape[tuple(parameter.shape)].append((name, parameter, is_meant))


def _equal(first: Any, other: Any) -> bool:
    """Whether two parameters of one shape are equal, and not constant, where this rank has both."""
    a, b = _common(first, other), _common(other, first)
    if a is None or b is None or not a.numel():
        return False
    if a.dtype != b.dtype or a.device != b.device or bool(a.flatten()[0] != b.flatten()[0]):
        return False
    return torch.equal(a, b) and bool((a != a.flatten()[0]).any())


def _common(tensor: Any, other: Any) -> Tensor | None:
    """This rank's part of ``tensor``, of which ``other``'s division leaves a part on one-dimensional meshes."""
    local = local_of(tensor)
    for divided in filter(is_dtensor, (tensor, other)):
        if divided.device_mesh.ndim != 1:
            return None
    if is_dtensor(other) and not (is_dtensor(tensor) and tensor.placements == other.placements):
        placement, mesh = other.placements[0], other.device_mesh
        if is_dividing(placement) and not placement.is_shard():
            return None
        if placement.is_shard():
            parts = local.detach().chunk(mesh.size(), dim=placement.dim)
            local = parts[mesh.get_local_rank()] if mesh.get_local_rank() < len(parts) else local[:0]
    return local.detach()

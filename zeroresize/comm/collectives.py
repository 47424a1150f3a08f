"""Every collective of training, in the field's terms; ranks are counted within the group.

The products' forward and backward call the all-reduces of the row-parallel y and the column-parallel dx themselves: one
works in place on the product's output, the other overlaps dw. An error names the transfer, its peers, and the layer if
the caller gave one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.utils.torch_private import backend_of, backends_of, timeout_of
from zeroresize.utils.torch_state import is_out_of_memory

_T = TypeVar("_T")


class Channel(Protocol):
    """A channel starts transfers between the ranks of a group, by their numbers within it: the group, or another."""

    def broadcast(self, tensor: Tensor, root: int, /) -> dist.Work: ...

    def send(self, tensors: list[Tensor], receiver: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> dist.Work: ...


def as_process_group(group: Any) -> Any:
    """Return the process group of a one-dimensional ``DeviceMesh``; a group as it is, and None.

    Raises:
        ValueError: for anything else, and on ranks that are not in it.
    """
    if not hasattr(group, "get_group") or not hasattr(group, "ndim"):
        if not isinstance(group, ProcessGroup | None) and group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"process_group={group!r} is not allowed: a process group, or a DeviceMesh, is needed")
        is_member = group is None or dist.get_rank(cast(ProcessGroup, group)) >= 0
    elif group.ndim != 1:
        raise ValueError(
            f"{group} has {group.ndim} dimensions: pass the one of the tensor-parallel group, such as mesh['tp']"
        )
    else:
        is_member = group.get_coordinate() is not None
        group = group.get_group(0) if is_member else group
    if not is_member:
        num_ranks = dist.get_world_size()
        raise ValueError(
            f"process_group does not hold this rank, {dist.get_rank()} of {num_ranks}: pass the group that it is in, "
            "or make the call on the group's ranks only"
        )
    return group


def require_group(process_group: Any) -> ProcessGroup:
    """Return ``process_group``, or the group of a one-dimensional ``DeviceMesh``, of which this rank is a member."""
    process_group = as_process_group(process_group)
    if process_group is None:
        raise ValueError(
            "process_group=None is not allowed: pass the tensor-parallel group, such as torch.distributed.group.WORLD "
            "(which is None before init_process_group) or torch.distributed.new_group(ranks)"
        )
    group: ProcessGroup = process_group
    return group


def group_size(process_group: ProcessGroup) -> int:
    """Return how many ranks the group has."""
    return dist.get_world_size(process_group)


def world_size() -> int:
    """Return how many ranks the job has, in whatever groups."""
    return dist.get_world_size()


def group_rank(process_group: ProcessGroup) -> int:
    """Return the number of this rank within the group; -1 if it is not a member."""
    return dist.get_rank(process_group)


def group_ranks(process_group: ProcessGroup) -> list[int]:
    """Return the group's ranks, in its order, counted over the whole world."""
    return dist.get_process_group_ranks(process_group)


def same_ranks(first: ProcessGroup, second: ProcessGroup) -> bool:
    """Return whether two groups hold the same ranks in the same order."""
    return first is second or group_ranks(first) == group_ranks(second)


def time_limit(process_group: ProcessGroup) -> timedelta:
    """Return how long a wait for other ranks of the group may last: the timeout that the group was made with.

    Only gloo and NCCL expose it; a group of other backends counts as made with torch's default.
    """
    limits = map(timeout_of, backends_of(process_group))
    return max((limit for limit in limits if limit is not None), default=dist.default_pg_timeout)


class Explainer(Protocol):
    """An explainer knows what the ranks of a group do: their :class:`~zeroresize.comm.words.Words`."""

    def wait(self, work: dist.Work, /) -> None: ...

    def fail(self, failed: str, /, *, waits: bool) -> str: ...


_explainers: weakref.WeakKeyDictionary[ProcessGroup, list[weakref.ref[Explainer]]] = weakref.WeakKeyDictionary()


def explain(process_group: ProcessGroup, explainer: Explainer) -> None:
    """Let ``explainer`` wait for collectives over ``process_group``, and end errors, for as long as it lives."""
    _explainers.setdefault(process_group, []).append(weakref.ref(explainer))


def _explainer_of(process_group: ProcessGroup) -> Explainer | None:
    """The newest that lives."""
    weak = _explainers.get(process_group, [])
    return next((explainer for ref in reversed(weak) if (explainer := ref()) is not None), None)


def _waits_for(tensor: Tensor, process_group: ProcessGroup) -> Explainer | None:
    """Return who waits for a collective of ``tensor``; None where waits cannot be interrupted, as on a GPU."""
    if torch.compiler.is_compiling() or not tensor.is_cpu or not _explainers:
        return None
    return _explainer_of(process_group) if backend_of(process_group, tensor.device).name() == "gloo" else None


def explanation(process_group: ProcessGroup, failed: str, *, waits: bool = True) -> str:
    """Return the end of an error: what each rank of the group was doing, as far as known; other ranks can read it, too.

    ``waits``: some seconds for others that fail, too.
    """
    explainer = _explainer_of(process_group)
    return "" if explainer is None else explainer.fail(failed, waits=waits)


class NamedWork:
    """A transfer that is under way, between two ranks (``peer``) or among all, and whose errors name it and its layer.

    Waits for a collective of all ranks that fills ``tensor`` can be explained.
    """

    __slots__ = ("_description", "_wait")

    def __init__(
        self,
        start: Callable[[], Any],
        what: str,
        process_group: ProcessGroup,
        peer: int | None = None,
        layer: str | None = None,
        tensor: Tensor | None = None,
    ) -> None:
        self._description = what, process_group, peer, layer
        work = _named_if_it_fails(start, *self._description)
        explainer = None if tensor is None else _waits_for(tensor, process_group)
        self._wait = work.wait if explainer is None else partial(explainer.wait, work)

    def wait(self) -> None:
        """Wait until the transfer is done."""
        _named_if_it_fails(self._wait, *self._description)


def _named_if_it_fails(
    call: Callable[[], _T], what: str, process_group: ProcessGroup, peer: int | None = None, layer: str | None = None
) -> _T:
    """``call()``, with an error that names what failed, which communication libraries do not."""
    try:
        return call()
    except RuntimeError as error:
        if is_out_of_memory(error):  # no other rank is to blame
            raise
        ranks = group_ranks(process_group)
        peers = [rank for rank in range(len(ranks)) if rank != group_rank(process_group)] if peer is None else [peer]
        in_layer = f", in layer {layer}" if layer is not None else ""
        raise RuntimeError(
            f"{what} ranks {peers} of the group (ranks {[ranks[peer] for peer in peers]} of the job) failed{in_layer}: "
            "one of them may have died, failed before or made other calls, or did not come within the time limit of "
            f"their process group, {time_limit(process_group).total_seconds():g} s"
            f"{explanation(process_group, f'{what} ranks {peers} failed{in_layer}')}"
        ) from error


def all_reduce(tensor: Tensor, process_group: ProcessGroup, layer: str | None = None) -> None:
    """Sum ``tensor`` over the group in place; collective."""
    what, call = "an all-reduce with", partial(dist.all_reduce, tensor, group=process_group)
    if group_size(process_group) == 1:
        return
    if _waits_for(tensor, process_group) is None:
        _named_if_it_fails(call, what, process_group, None, layer)
    else:
        NamedWork(partial(call, async_op=True), what, process_group, None, layer, tensor).wait()


def start_all_reduce(tensor: Tensor, process_group: ProcessGroup, layer: str | None = None) -> NamedWork | None:
    """Start summing ``tensor`` over the group in place; collective. Nothing is to be waited for by one rank alone."""
    if group_size(process_group) == 1:
        return None
    start = partial(dist.all_reduce, tensor, group=process_group, async_op=True)
    return NamedWork(start, "an all-reduce with", process_group, None, layer, tensor)


def all_gather(tensor: Tensor, process_group: ProcessGroup) -> list[Tensor]:
    """Return every rank's ``tensor``, in the order of the group; collective, with one shape and dtype on all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(group_size(process_group))]
    call = partial(dist.all_gather, parts, tensor, group=process_group)
    _named_if_it_fails(call, "an all-gather with", process_group)
    return parts


def all_gather_into(whole: Tensor, tensor: Tensor, process_group: ProcessGroup) -> None:
    """Fill ``whole`` with every rank's ``tensor``, one behind the other in the order of the group; collective."""
    call = partial(dist.all_gather_into_tensor, whole, tensor, group=process_group)
    _named_if_it_fails(call, "an all-gather with", process_group)


def whole_of_parts(part: Tensor, place: slice, weight: Tensor, process_group: ProcessGroup, scratch: Tensor) -> Tensor:
    """Return the whole, of a weight's shape and on the CPU, of which this rank has ``part``, elsewhere; collective.

    Args:
        part, place: some elements, perhaps none, and which of the flattened weight's they are.
        scratch: bytes on the weight's device to do so in: no memory is taken before all ranks have met.
    """
    whole = scratch[: weight.numel() * part.itemsize].view(part.dtype).zero_()
    whole[place] = part
    if len(whole):
        all_reduce(whole.view(torch.uint8), process_group)  # by bytes, so that zeros keep their signs
    return whole.view_as(weight).to("cpu", copy=True)


def gather_bytes(packed: bytes, process_group: ProcessGroup) -> list[bytes]:
    """Return what all ranks pass, in the order of the group, on its first rank, and nothing on others; collective."""
    is_first = group_rank(process_group) == 0
    parts: list[Any] | None = [None] * group_size(process_group) if is_first else None
    call = partial(dist.gather_object, packed, parts, dst=group_ranks(process_group)[0], group=process_group)
    _named_if_it_fails(call, "a gathering of bytes with", process_group)
    return parts or []


def broadcast(tensor: Tensor, root: int, process_group: ProcessGroup) -> None:
    """Fill ``tensor`` on every rank with that of rank ``root`` within the group; collective."""
    start_broadcast(tensor, root, process_group).wait()


def start_broadcast(
    tensor: Tensor, root: int, process_group: ProcessGroup, layer: str | None = None, over: Channel | None = None
) -> NamedWork:
    """Start a :func:`broadcast`, by the group itself or ``over`` another channel between its ranks; collective."""
    start = partial((over or process_group).broadcast, tensor, root)
    return NamedWork(start, "a broadcast with", process_group, None, layer, tensor)


def start_reduce(tensor: Tensor, root: int, process_group: ProcessGroup, layer: str | None = None) -> NamedWork:
    """Start summing ``tensor`` over the group, in place on rank ``root`` within it; collective."""
    root = dist.get_global_rank(process_group, root)
    start = partial(dist.reduce, tensor, root, group=process_group, async_op=True)
    return NamedWork(start, "a reduce with", process_group, None, layer, tensor)


def _start_message(
    kind: Literal["send", "recv"],
    tensor: Tensor,
    peer: int,
    process_group: ProcessGroup,
    layer: str | None = None,
    over: Channel | None = None,
    tag: int = 0,
) -> list[NamedWork]:
    """Start a message to or from rank ``peer`` within the group, unless it is empty, and return what to wait for."""
    if tensor.numel() == 0:
        return []
    start = partial(getattr(over or process_group, kind), [tensor], peer, tag)
    return [NamedWork(start, "sending to" if kind == "send" else "receiving from", process_group, peer, layer)]


#: ``(tensor, peer, process_group, layer, over, tag)`` start to send ``tensor``, or to fill it.
start_send, start_receive = partial(_start_message, "send"), partial(_start_message, "recv")


def start_messages(
    sends: Mapping[int, Tensor],
    receives: Mapping[int, Tensor],
    process_group: ProcessGroup,
    over: Channel | None = None,
    tag: int = 0,
) -> dict[int, list[Waitable]]:
    """Start sending a tensor to each of some ranks within the group and receiving one from each, all at once.

    They travel by the group itself, or ``over`` another channel between its ranks where the tensors are on the CPU.
    Messages of one tag keep their order and never meet those of another; NCCL knows no tags.

    Returned is what to wait for, by the other rank. A transfer that could not be started fails when it is waited for,
    so that the others get theirs. Empty tensors do not travel.
    """
    transfers: dict[int, list[Waitable]] = {peer: [] for peer in (*receives, *sends)}
    if any(tensor.is_cuda for tensor in (*sends.values(), *receives.values())):  # NCCL must be given them as one
        calls = [
            dist.P2POp(call, tensor, dist.get_global_rank(process_group, peer), process_group)
            for call, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in sorted(tensors.items())
            if tensor.numel()
        ]
        for call, work in zip(calls, dist.batch_isend_irecv(calls) if calls else (), strict=False):
            transfer = NamedWork(partial(lambda work: work, work), "messages with", process_group)
            transfers[dist.get_group_rank(process_group, call.peer)].append(transfer)
        return transfers
    for start, tensors in ((start_receive, receives), (start_send, sends)):
        for peer, tensor in tensors.items():
            try:
                transfers[peer] += start(tensor, peer, process_group, None, over, tag)
            except RuntimeError as error:
                transfers[peer].append(_NotStarted(error))
    return transfers


class Waitable(Protocol):
    """A waitable is a transfer that can be waited for, with an error if it fails."""

    def wait(self) -> None: ...


class _NotStarted:
    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def message_device(process_group: ProcessGroup, device: torch.device) -> torch.device:
    """Return where messages of tensors on ``device`` must lie: there if NCCL sends them, else (gloo) on the CPU."""
    sends_from_there = device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(process_group)
    return device if sends_from_there else torch.device("cpu")


def gather_along(x: Tensor, process_group: ProcessGroup, dim: int, *, sums: bool = False) -> Tensor:
    """Put all ranks' slices ``x`` together along ``dim``, as of features or of a sequence; collective.

    The gradient of ``x`` is this rank's slice of the gradient: of the sum of all ranks' gradients, if ``sums``.
    """
    return x if group_size(process_group) == 1 else _GatherAlong.apply(x, process_group, dim, sums)


def scatter_along(y: Tensor, process_group: ProcessGroup, dim: int, *, sums: bool = False) -> Tensor:
    """Take this rank's slice of ``y`` along ``dim``: of the sum of all ranks' y, if ``sums``; collective.

    The gradient of ``y`` is all ranks' gradients, put together.
    """
    return y if group_size(process_group) == 1 else _ScatterAlong.apply(y, process_group, dim, sums)


def _slice_along(x, process_group, dim, sums):
    num_ranks, size = group_size(process_group), x.shape[dim]
    if size % num_ranks:
        raise ValueError(f"a sequence of {size} (dimension {dim} of {tuple(x.shape)}) is not divisible by {num_ranks}")
    if not sums:
        return x.chunk(num_ranks, dim)[group_rank(process_group)].contiguous()
    x = x.movedim(dim, 0).contiguous()
    here = x.new_empty((size // num_ranks, *x.shape[1:]))
    call = partial(dist.reduce_scatter_tensor, here, x, group=process_group)
    _named_if_it_fails(call, "a reduce-scatter with", process_group)
    return here.movedim(0, dim).contiguous()


def _whole_along(part, process_group, dim):
    part = part.contiguous()
    if dim != 0:
        return torch.cat(all_gather(part, process_group), dim)
    whole = part.new_empty((group_size(process_group) * part.shape[0], *part.shape[1:]))
    all_gather_into(whole, part, process_group)
    return whole


class _GatherAlong(torch.autograd.Function):
    """y = [x_0 … x_(R−1)] along a dimension; dx = this rank's slice of dy, or of Σ_r dy_r."""

    @staticmethod
    def forward(ctx, x, *how):
        ctx.how = how
        return _whole_along(x, *how[:2])

    @staticmethod
    def backward(ctx, dy):
        return _slice_along(dy, *ctx.how), None, None, None


class _ScatterAlong(torch.autograd.Function):
    """y = this rank's slice of x, or of Σ_r x_r, along a dimension; dx = [dy_0 … dy_(R−1)]."""

    @staticmethod
    def forward(ctx, x, *how):
        ctx.how = how
        return _slice_along(x, *how)

    @staticmethod
    def backward(ctx, dy):
        return _whole_along(dy, *ctx.how[:2]), None, None, None

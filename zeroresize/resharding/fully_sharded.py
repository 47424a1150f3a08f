"""Parameters of which ``fully_shard`` holds shards between two steps: gathered before units move, and sharded anew.

What else gives each data-parallel rank a shard of a parameter, or of its optimizer state, can move by the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_gather_into, group_rank, group_size
from zeroresize.layers.local_parts import local_of
from zeroresize.resharding.parameter_state import PARAMETER
from zeroresize.utils.torch_private import (
    fsdp_parameters_of,
    gathered_of,
    has_unreduced_gradient,
    is_fsdp_module,
    is_replicated,
    reshard_fsdp,
    shard_anew,
    sharded_anew,
    size_before_sharding,
    why_not_sharded_anew,
)


class FullySharded:
    """Gathers the shards of a parameter and of what belongs to it, and shards others of it; sharded are rows, evenly.

    Attributes:
        group: the data-parallel ranks that hold its shards; None where they are not ranks of one group.
        why_fixed: why it cannot be sharded anew, as the end of a sentence on ``fully_shard``; None if it can.
        is_whole: whether each of them holds all of it, as with ``replicate``.
    """

    def __init__(self, known: Any) -> None:
        self._known, self.why_fixed, self.is_whole = known, why_not_sharded_anew(known), is_replicated(known)
        mesh = known.mesh_info.mesh
        self.group: ProcessGroup | None = mesh.get_group() if mesh.ndim == 1 else None

    @property
    def parameter(self) -> nn.Parameter:
        """The Parameter that holds this rank's shard, which an optimizer steps, also while the model is gathered."""
        parameter: nn.Parameter = self._known.sharded_param
        return parameter

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter as this rank gathers it in a forward."""
        return size_before_sharding(self._known)

    @property
    def is_unreduced(self) -> bool:
        """Whether the ranks have gradients of it that are not averaged yet."""
        return has_unreduced_gradient(self._known)

    def rows(self) -> tuple[int, int]:
        """Return the first row of this rank's shard, and the one behind its last."""
        return (0, self.shape[0]) if self.is_whole else self._rows_of(self.shape[0])

    def room_for(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return what :meth:`gather` sends of a shard, and what it fills: all rows, and padding behind them."""
        assert self.group is not None
        most = self._most(self.shape[0])
        padded = shard.new_zeros(most, *self.shape[1:])
        padded[: len(shard)] = shard
        return padded, shard.new_empty(most * group_size(self.group), *self.shape[1:])

    def gather(self, padded: Tensor, whole: Tensor) -> None:
        """Fill ``whole`` by the padded shards of all ranks; collective over :attr:`group`, and takes no memory."""
        assert self.group is not None
        if whole.numel():
            all_gather_into(whole, padded, self.group)

    def sharded(self, new: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return this rank's shards of a whole parameter and of what comes with it, and what puts the former in place.

        Nothing changes until that is called, which takes no memory.
        """
        begin, end = self._rows_of(len(new[PARAMETER]))
        made = sharded_anew(self._known, new[PARAMETER])
        shards = {what: whole[begin:end].clone() for what, whole in new.items() if what != PARAMETER}
        return {PARAMETER: local_of(made.sharded_param), **shards}, partial(shard_anew, self._known, made)

    def _most(self, num_rows: int) -> int:
        assert self.group is not None
        return -(-num_rows // group_size(self.group))

    def _rows_of(self, num_rows: int) -> tuple[int, int]:
        assert self.group is not None
        most = self._most(num_rows)
        begin = min(group_rank(self.group) * most, num_rows)
        return begin, min(begin + most, num_rows)


def fully_sharded_in(model: nn.Module, *, reshard: bool = False) -> dict[int, FullySharded]:
    """Return the parameters of which ``fully_shard`` holds shards in a model, by the ``id`` of the sharded Parameter.

    While the model is gathered also by that of the Parameter that is in its place.

    Args:
        reshard: whether the model is to hold shards again where a forward without a backward, or ``unshard()``, has
            left what it gathered.
    """
    sharded = {}
    for module in filter(is_fsdp_module, model.modules()):
        if reshard:
            reshard_fsdp(module)
        for known in fsdp_parameters_of(module):
            both = known.sharded_param, gathered_of(known)
            sharded.update(dict.fromkeys((id(each) for each in both if each is not None), FullySharded(known)))
    return sharded


def why_not_reduced(sharded: Mapping[int, FullySharded]) -> str | None:
    """Tell why no unit may move now: ``fully_shard`` has still to reduce gradients; None if it has not."""
    if not any(each.is_unreduced for each in sharded.values()):
        return None
    return (
        "fully_shard has gradients that it has not reduced, as with set_requires_gradient_sync(False): move between an "
        "optimizer's step and the next forward"
    )

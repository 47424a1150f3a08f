"""The process groups of strategies: tensor-parallel ones, data-parallel ones and pipelines, made once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.comm.groups import destroy_side_group, make_side_group
from zeroresize.plan.strategy import Strategy

_Ranks = tuple[int, ...]


class RankGroups(NamedTuple):
    """Holds the groups that a rank is in; of a rank that is left out, each has only itself.

    Attributes:
        tp: the ranks that divide the same layers, in the order of their shards.
        dp: the ranks that hold the same part of the model, in the order of the replicas.
        pipeline: the ranks that hand on activations to each other, first stage first.
    """

    tp: ProcessGroup
    dp: ProcessGroup
    pipeline: ProcessGroup


class StrategyGroups:
    """Makes the groups of a job's ranks, each once, however many strategies have it.

    Every rank makes and destroys equally many: a rank that is left out of a strategy makes groups of itself.

    Args:
        process_group: of the job's ranks.

    Attributes:
        num_made: how many groups this rank has made so far, those that are destroyed since included.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self._job = process_group
        self._rank, self._num_ranks = group_rank(process_group), group_size(process_group)
        self._made: dict[frozenset[_Ranks], ProcessGroup] = {}
        self.num_made = 0

    def of(self, strategy: Strategy, numbers: Iterator[int]) -> RankGroups:
        """Return this rank's groups; collective over the job where the strategy has groups that are not made yet.

        Args:
            numbers: for groups that are made, the same on all ranks; see
                :func:`~zeroresize.comm.groups.free_group_number`.

        Raises:
            RuntimeError: if a rank does not come, or a group cannot be made. Other ranks may have it: give up on all of
                them what this strategy needs alone, by :meth:`keep`.
        """
        return RankGroups(*(self._group_of(division, numbers) for division in self._divisions(strategy)))

    def keep(self, strategies: Iterable[Strategy]) -> None:
        """Destroy the groups that none of these strategies has, on all ranks when none uses them any more."""
        kept = {division for one in strategies for division in self._divisions(one)}
        for division in [one for one in self._made if one not in kept]:
            destroy_side_group(self._made.pop(division))

    def _divisions(self, strategy: Strategy) -> list[frozenset[_Ranks]]:
        """Of all ranks into tensor-parallel groups, data-parallel groups and pipelines."""
        left_out = [(rank,) for rank in range(self._num_ranks) if strategy.position_of(rank) is None]
        kinds = strategy.tp_groups(), strategy.dp_groups(), strategy.pipelines()
        return [frozenset([*groups, *left_out]) for groups in kinds]

    def _group_of(self, division: frozenset[_Ranks], numbers: Iterator[int]) -> ProcessGroup:
        ranks = next(ranks for ranks in division if self._rank in ranks)
        if ranks == tuple(range(self._num_ranks)):
            return self._job
        if division not in self._made:
            self._made[division] = make_side_group(self._job, ranks, next(numbers))
            self.num_made += 1
        return self._made[division]

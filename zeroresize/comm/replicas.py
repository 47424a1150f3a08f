"""Which ranks hold the same shards beside each other: a tensor-parallel group and its data-parallel replicas.

``R`` ranks of the tensor-parallel group, ``D`` replicas of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.rendezvous import Rendezvous


def ranks_with_replicas(
    process_group: ProcessGroup, data_parallel_group: ProcessGroup | None, exchange: Exchange
) -> tuple[int, ...]:
    """Gather the ranks of all replicas of a group, counted over the whole world; collective over all replicas.

    Args:
        process_group: the tensor-parallel group.
        data_parallel_group: the ranks that hold the same shards as this one; None if that is not known.
        exchange: the exchange with the ranks of ``process_group``.

    Returns:
        [D · R], replica by replica, each in the order of its group; none if not all ranks of the group know theirs.

    Raises:
        ValueError: on every rank, if the data-parallel groups of the ranks do not make whole replicas.
        RuntimeError: if the replicas do not come within the time limit of ``process_group``.
    """
    known = group_ranks(data_parallel_group) if data_parallel_group is not None else []
    peers_of_ranks = [list(map(int, ranks)) for ranks in exchange.gather([float(rank) for rank in known])]
    if not all(peers_of_ranks):
        return ()
    members = group_ranks(process_group)
    replicas: Sequence[tuple[int, ...]] = list(zip(*peers_of_ranks, strict=False))
    ranks = tuple(rank for replica in replicas for rank in replica)
    are_whole = (
        len({len(peers) for peers in peers_of_ranks}) == 1
        and tuple(members) in replicas
        and len(set(ranks)) == len(ranks)
    )
    if are_whole:  # for this replica: others may see it differently
        rendezvous = Rendezvous(process_group, "agree on who the replicas are", sorted(ranks))
        are_whole = len(set(rendezvous.exchange("replicas", str(ranks)))) == 1
    if not are_whole:
        raise ValueError(
            f"the data-parallel groups of the ranks {members} of the job make no whole replicas of their "
            f"tensor-parallel group: they hold the ranks {peers_of_ranks}. Wanted are groups of one size, each of "
            "ranks that hold the same shards, in the same order of replicas"
        )
    return ranks

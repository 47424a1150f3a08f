"""A rank's whereabouts: in which call it is, after how many steps; and whether all ranks are at the same place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass


class Call(enum.Enum):
    """What a rank is doing, as errors tell it."""

    MAKING = "making the Balancer"
    TRAINING = "training"
    FORWARD = "comparing a batch of new size"
    STEP = "balancer.step()"
    EPOCH_END = "balancer.epoch_end()"
    LOADING = "balancer.load_state_dict()"
    MOVING = "balancer.move() or at_home()"


_CALLS = tuple(Call)
#: Calls before which ranks may have counted differently.
_UNCOUNTED = (Call.MAKING, Call.LOADING)


@dataclass
class Whereabouts:
    """Where one rank is; the balancer keeps it up to date.

    Attributes:
        call: what this rank is doing.
        num_steps: how many calls of ``balancer.step()`` it has made, the one that it is in included.
        epoch: how many epochs have ended.
        num_forwards: how many training forwards its balanced layers have made.
        num_optimizer_steps: how many steps its optimizer has made, without those that a loss scaler skipped.
        num_work_changes: how often the program has announced that layers have other work from now on.
        batch: what is compared while ``call`` is ``Call.FORWARD``.
    """

    call: Call = Call.MAKING
    num_steps: int = 0
    epoch: int = 0
    num_forwards: int = 0
    num_optimizer_steps: int = 0
    num_work_changes: int = 0
    batch: str = ""

    #: Of :meth:`as_numbers`.
    NUM_NUMBERS = 6

    def as_numbers(self) -> list[float]:
        """Return the whereabouts as ``NUM_NUMBERS`` numbers, without ``batch``, to be sent to other ranks."""
        call, *counts, _ = astuple(self)
        return [float(_CALLS.index(call)), *map(float, counts)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Whereabouts:
        """Return the whereabouts that :meth:`as_numbers` has told."""
        call, num_steps, epoch, num_forwards, num_optimizer_steps, num_work_changes = map(int, numbers)
        return cls(_CALLS[call], num_steps, epoch, num_forwards, num_optimizer_steps, num_work_changes)

    def __str__(self) -> str:
        if self.call is Call.STEP:
            return f"balancer.step(), call {self.num_steps}"
        of_batch = f" ({self.batch})" if self.call is Call.FORWARD and self.batch else ""
        return f"{self.call.value}{of_batch}, after {self.num_steps} calls of balancer.step()"


def require_same_whereabouts(ranks: Sequence[Whereabouts], *, counts_forwards: bool = True) -> None:
    """Check that the ranks of a group came to each other from the same place.

    Args:
        ranks: the whereabouts of every rank, in the order of the group.
        counts_forwards: whether the ranks must also have made equally many training forwards.

    Raises:
        RuntimeError: if they come from different places; it names what each of them has called, and how often.
    """

    def differ(*what: str) -> bool:
        return len({tuple(getattr(rank, name) for name in what) for rank in ranks}) > 1

    def by_rank(text_of: Callable[[Whereabouts], str]) -> str:
        return "; ".join(f"rank {rank}: {text_of(where)}" for rank, where in enumerate(ranks))

    if differ("call"):
        raise RuntimeError(f"the ranks of the group made different calls: {by_rank(str)}")
    if ranks[0].call in _UNCOUNTED:
        return
    if differ("num_work_changes"):
        raise RuntimeError(
            "balancer.profile_next() or load_state_dict() was called on some ranks only, or unequally often: "
            f"{by_rank(lambda where: f'{where.num_work_changes} times')}; call it on every rank alike, between the "
            "same two steps"
        )
    # Ranks that meet at an update have equal counts of steps, so their counts of forwards tell.
    if differ("num_steps", *(["num_forwards"] if counts_forwards else [])):
        counts = by_rank(
            lambda where: f"{where.num_steps} calls in {where.num_forwards} training forwards of its layers"
        )
        raise RuntimeError(
            f"the ranks of the group did not call balancer.step() equally often: {counts}; call it once after every "
            "optimizer step, and load_state_dict with what was saved together, on every rank"
        )
    if differ("num_optimizer_steps"):
        raise RuntimeError(
            "the ranks of the group did not make equally many optimizer steps: "
            f"{by_rank(lambda where: f'{where.num_optimizer_steps} steps')}. A loss scaler skips a step where "
            "gradients overflow, and each rank sees those of its own shards only, so scale and weights have come "
            "apart: use zeroresize.GradScaler in its place, and begin again from a checkpoint"
        )
    if differ("epoch"):
        raise RuntimeError(
            "the ranks of the group did not call balancer.epoch_end() equally often: "
            f"{by_rank(lambda where: f'{where.epoch} epochs had ended at {where}')}; call it at the end of an epoch, "
            "on every rank"
        )

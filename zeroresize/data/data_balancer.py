"""DataBalancer: data-parallel ranks divide global batches by their speed, and gradients stay those of the whole."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from weakref import finalize

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.data import IterableDataset

from zeroresize.comm.collectives import group_rank, group_size, require_group
from zeroresize.comm.exchange import Exchange, Meet
from zeroresize.comm.groups import CpuGroup, let_others_fail
from zeroresize.comm.pausing import Pausable, Restraint
from zeroresize.comm.words import Call
from zeroresize.data.loss_scale import LossScale
from zeroresize.data.measuring import RankSteps
from zeroresize.data.sampler import BalancedBatchSampler, BalancedStream, Epochs
from zeroresize.data.start_checks import require_averaged, require_numbers, require_samples
from zeroresize.data.timetable import Timetable
from zeroresize.optim.optimizers import hook_steps
from zeroresize.policy.data.decision import DataDecision, DataState, RankWindow
from zeroresize.policy.data.division import Division
from zeroresize.policy.slowness.windows import StepWindow
from zeroresize.resharding.agreement import agreed, require_same
from zeroresize.status import Status, ranks_by_speed
from zeroresize.telemetry import ChangeRecord
from zeroresize.utils.checked import checked, integer
from zeroresize.utils.codec import loaded, saved
from zeroresize.utils.hashing import fingerprint

logger = logging.getLogger(__name__)

_MicroBatch = TypeVar("_MicroBatch")
_Source = TypeVar("_Source", bound=Epochs)

#: A change holds from so many steps behind those that are fetched on: a loader may have begun an epoch meanwhile.
_MARGIN = 2
#: In so many steps in a row a loader fetches several global batches each only where somebody divides them again.
_FAST_STEPS = 3
#: What squares of lengths take, of lengths, is the same in a new division where it differs by less.
_ALIKE_SQUARES = 0.2


@dataclass(frozen=True)
class DataOption:
    """Describe what a division of global batches would bring.

    Attributes:
        name: "evenly" or "by speed"; "as it is" for the present one.
        counts: [R] samples of each rank, of equal ones.
        step_s: seconds of a step.
        share_saved: share of the present step that it saves; negative where steps would be longer.
    """

    name: str
    counts: tuple[int, ...]
    step_s: float
    share_saved: float


@dataclass
class _Position:
    """Hold what was trained on, and what was decided; the same on every rank."""

    num_steps: int
    epoch: int
    step_of_epoch: int
    data: dict[str, str]  # by what samples follow each other, and are cut into global batches
    decision: DataState


@checked(
    tell=lambda given, error: let_others_fail(require_group(given["process_group"] or dist.group.WORLD), error),
    global_batch=integer(1),
    counts=integer(0),
    max_samples=integer(1),
    num_micro_batches=integer(1),
    micro_batch_size=integer(1),
    update_every=integer(2),
)
class DataBalancer(Pausable):
    """Divides global batches over data-parallel ranks by their measured speed, when that pays; gradients are exact::

        balancer = zr.DataBalancer(model, optimizer, global_batch=256)  # model: DistributedDataParallel or fully_shard
        loader = DataLoader(dataset, batch_sampler=balancer.sampler(dataset), num_workers=4)
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            (loss * balancer.loss_scale()).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()

    The gradient that the wrapper averages is that of the mean over all counted samples, or tokens, of the global batch,
    however it is divided. Batches are divided evenly until measured times say that another division saves more than it
    takes, and again once that is over. A rank may have no sample: then it computes one whose gradient is dropped. Where
    each rank computes several micro-batches a step, see :meth:`steps`.

    Its constructor is collective over the group.

    Args:
        model: the module that the training loop calls, DistributedDataParallel or sharded by ``fully_shard``; None, and
            so the optimizer, where :meth:`attach` is called before the first step.
        optimizer: whose steps end the steps of training.
        global_batch: samples of a step, on all ranks together.
        counts: [R] samples of each rank, for a division that stays; None to measure.
        max_samples: that this rank is given at most; None for as many as its memory holds.
        num_micro_batches: that each rank computes in a step, of equal sizes but for one sample. A rank is given as many
            samples at least, or none.
        micro_batch_size: samples of a micro-batch at most, of which ranks then have unequally many; only with
            DistributedDataParallel and its ``no_sync``.
        process_group: over which gradients are averaged, or a one-dimensional ``DeviceMesh``; None for all ranks.
        update_every: steps between two exchanges of times.
        on_change: called on every rank with each change of the division.
        on_status: called with :meth:`status` on rank 0 of the group each ``update_every`` steps.

    Raises:
        ValueError: for values that are not allowed, or differ between ranks, and for a model whose gradients nothing
            averages over the group, or whose samples further ranks share, as under tensor parallelism, unless
            ``counts`` say how they are divided.
        RuntimeError: if a rank does not come.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Any,
        *,
        global_batch: int,
        counts: Sequence[int] | None = None,
        max_samples: int | None = None,
        num_micro_batches: int = 1,
        micro_batch_size: int | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        update_every: int = 10,
        on_change: Callable[[ChangeRecord], object] | None = None,
        on_status: Callable[[Status], object] | None = None,
    ) -> None:
        is_job = dist.is_available() and dist.is_initialized()
        self._group = require_group(process_group or dist.group.WORLD) if is_job else None
        rank, num_ranks = (0, 1) if self._group is None else (group_rank(self._group), group_size(self._group))
        self._counts, self._update_every, self._on_change = counts, update_every, on_change
        self._on_status, self._step_s = on_status, math.nan
        self._exchange: Exchange | None = None
        self._undone_by_close = ExitStack()
        self.close: Callable[[], object] = finalize(self, self._undone_by_close.close)
        self._meet: Meet = lambda *numbers: [numbers]
        if self._group is not None and num_ranks > 1:
            alike = {"global_batch": global_batch, "counts": counts, "update_every": update_every}
            alike |= {"num_micro_batches": num_micro_batches, "micro_batch_size": micro_batch_size}
            self._exchange = Exchange(CpuGroup(self._group, {name: str(each) for name, each in alike.items()}))
            self._undone_by_close.callback(self._exchange.close)
            self._meet = self._exchange.meet
        limits = [limit for (limit,) in self._meet(math.inf if max_samples is None else float(max_samples))]
        require_numbers(limits, global_batch, counts, num_micro_batches, micro_batch_size)
        even = Division.of_counts(counts or (1.0,) * num_ranks, limits, num_micro_batches)
        self._decision = DataDecision(even, global_batch)
        self._timetable = Timetable(even, rank, global_batch, num_micro_batches, micro_batch_size)
        self._source: Epochs | None = None
        self._resumed: _Position | None = None
        self._scale: LossScale | None = None
        self._steps: RankSteps | None = None
        self._may_lack_samples, self._is_same_source = 0 in (counts or ()), False
        self.restraint, self._advised, self._ahead = Restraint(), "", list[int]()
        if model is not None:
            self.attach(model, optimizer)

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Balance the training of a model, where the constructor was given None, as no wrapper was there; collective.

        Raises:
            ValueError: as the constructor, on the rank that was given what is not allowed; others raise a RuntimeError.
        """
        if self._scale is not None:
            raise RuntimeError("this balancer has a model already")

        def parts() -> tuple[LossScale, RankSteps | None]:
            if self._exchange is not None and self._group is not None:
                require_averaged(model, self._group, self._timetable.micro_batch_size, self._counts)
            scale, steps = LossScale(model, self._timetable, self._group, self._meet), None
            made.callback(scale.close)
            if self._may_lack_samples:
                require_samples(scale.norms)
            if self._exchange is not None and self._counts is None:
                steps = RankSteps(model, optimizer, scale.require)
                made.callback(steps.close)
            else:
                made.callback(hook_steps(optimizer, before=scale.require))
            return scale, steps

        with ExitStack() as made:
            (self._scale, self._steps), _ = agreed(self._meet, parts, what="a DataBalancer")
            self._undone_by_close.push(made.pop_all())

    def sampler(
        self,
        dataset: Any,
        lengths: Sequence[float] | Tensor | None = None,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> BalancedBatchSampler:
        """Return the ``batch_sampler`` of a loader: which samples of a data set are this rank's, batch for batch.

        Args:
            dataset: one with a length, the same on all ranks.
            lengths: of each sample, such as tokens. Then ranks are given samples that take equally long, by their
                lengths and the squares of these.
            seed: of the order of samples, which the epoch's number decides besides.
            shuffle: whether samples are shuffled each epoch.
            drop_last: whether what does not fill a global batch is left out; else it is divided, too.

        Raises:
            ValueError: for a second data set, lengths that do not fit, and fewer samples than ranks in the last batch
                where batch norm over all ranks would count what does not count.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(f"dataset={type(dataset).__name__} has no length: stream() takes such a one")
        num_samples, known = len(dataset), None if lengths is None else np.asarray(lengths, dtype=np.float64)
        if known is not None and (known.shape != (num_samples,) or not (known > 0.0).all() or np.isinf(known).any()):
            raise ValueError(
                f"lengths {known.shape}, at least {known.min(initial=math.inf)}, are not allowed: {num_samples} finite "
                "numbers above 0 are needed, one a sample"
            )
        source = BalancedBatchSampler(self._timetable, num_samples, known, seed, shuffle, drop_last)
        return self._divided(source, not drop_last and num_samples % self._timetable.global_batch > 0)

    def stream(self, samples: Iterable[Any], *, drop_last: bool = False, prefetch_factor: int = 2) -> BalancedStream:
        """Return a stream of this rank's batches, each a list of samples, of one that is the same on all ranks::

            loader = DataLoader(balancer.stream(samples), batch_size=None, collate_fn=default_collate)

        Each worker of a loader reads the whole stream and hands on its share of batches; so does each rank.

        Args:
            samples: an ``IterableDataset``, or what else can be iterated, which nobody divides over ranks or workers.
            drop_last: as of :meth:`sampler`.
            prefetch_factor: that of the loader: batches that each of its workers makes ahead.

        Raises:
            ValueError: for a second stream, or one beside a data set.
        """
        return self._divided(BalancedStream(self._timetable, samples, drop_last, prefetch_factor), not drop_last)

    def steps(self, loader: Iterable[_MicroBatch]) -> Iterator[list[_MicroBatch]]:
        """Yield for each step of training the list of this rank's micro-batches, as a loader yields them.

        The loop computes all of them before it calls :meth:`step`.

        Raises:
            ValueError: for a loader with ``in_order=False``, whose batches would count as others of this rank do.
        """
        if not getattr(loader, "in_order", True):
            raise ValueError("in_order=False of the loader is not allowed: batches are trained on as they were divided")
        batches = iter(loader)
        for first in batches:
            others = [next(batches) for _ in range(self._timetable.fetched_part.num_micro_batches - 1)]
            yield [first, *others]

    def loss_scale(self, counted: float | Tensor | None = None) -> Tensor:
        """Return what the mean loss over this rank's counted samples, or tokens, is multiplied by; alike on all ranks.

        Call it once a step, before the first backward. It sums over the ranks, who wait for each other, unless it is
        called for samples of a model without batch norm in ``eval()``.

        Args:
            counted: over how many samples, or tokens that no mask leaves out, the rank's whole step takes its mean: of
                all its micro-batches. Where it is 0 gradients are dropped here, even NaN. A tensor of one number on a
                GPU is not read. None for samples, of which each rank knows how many the others have.

        Returns:
            A tensor of one number in float64; 0 where nothing is counted here, or on all ranks.

        Raises:
            ValueError: for another number, and where batch norm normalises by a rank's samples.
            RuntimeError: where no batch of the step came from the sampler, where it was called in this step, where
                ranks have other samples, lengths or states, and where it failed on another rank, but for GPUs.
        """
        scale = self._attached
        self._require_one_source()
        return scale.give(counted)

    def step(self) -> None:
        """Record that a step of the optimizer is done; in one step of some, decide with the other ranks.

        Raises:
            RuntimeError: without :meth:`loss_scale` in this step, and if a rank does not come.
        """
        self._attached.end_step()
        part, division = self._timetable.end_step()
        if self._source is not None:
            self._source.step_ended(part)
        self._require_undivided()
        if self._steps is None or self._exchange is None:
            return
        self._steps.end_step(part, division)
        num_steps = self._timetable.num_steps
        self._exchange.where.call, self._exchange.where.num_steps = Call.STEP, num_steps
        table = self._exchange.collect()
        if table is not None:
            self._take(table)
            if self._on_status is not None and self._timetable.rank == 0:
                self._on_status(self.status())
        if num_steps % self._update_every == 0:
            row = self._steps.window(num_steps, self._timetable.now.squares)
            further = row.fixed_s, row.excess_s, row.squares, row.most
            mark = fingerprint(f"{self._timetable.newest} {self._source.position[0] if self._source else 0}")
            lag = float(self._timetable.fetched), float(self._timetable.ahead)
            self._exchange.post([*row.window.as_numbers(), *further, mark, *lag, self.restraint.wish()])

    @property
    def counts(self) -> tuple[int, ...]:
        """[R] samples that each rank has in this step, of a whole global batch of equal ones."""
        return self._timetable.now.counts(self._timetable.global_batch)

    def what_if(self) -> tuple[DataOption, ...]:
        """Return what divisions would bring, the present one first; empty before speeds are known."""
        options, in_force = self._decision.what_if(), self._decision.state.in_force
        now_s = self._decision.step_s(in_force)
        if math.isnan(now_s):
            return ()
        size = self._timetable.global_batch
        known = [
            DataOption(name, each.counts(size), step_s, saved_s / now_s)
            for name, (each, step_s, saved_s) in options.items()
        ]
        return DataOption("as it is", in_force.counts(size), now_s, 0.0), *known

    def status(self) -> Status:
        """Return who is slow, how batches are divided, what that has saved and why; the same on every rank.

        Printed it is a table, also in a notebook. Shares are those of equal samples. Of what was saved three fifths
        count, as some seconds may be fixed of which nobody knows.
        """
        state, size = self._decision.state, self._timetable.global_batch
        counts, speeds = self.counts, [1.0 / pace_s for pace_s in self._decision.pace_s]
        even_s = self._decision.even_s
        return Status(
            kind="samples",
            state=self.restraint.state,
            step=self._timetable.num_steps,
            time=time.time(),
            step_s=self._step_s,
            expected_step_s=self._decision.step_s(state.in_force),
            even_step_s=max(even_s, default=math.nan),
            saved_s=state.gained_s,
            cost_s=0.0,
            ranks=ranks_by_speed(
                speeds,
                [count * len(counts) / size for count in counts] if speeds else (),
                min(even_s, default=math.nan),
            ),
            decided=str(self._decision.verdict),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was trained on, and what was learned of ranks; plain values, the same on every rank.

        What loaders have fetched and was not trained on does not count.
        """
        (epoch, step), data = ((0, 0), {}) if self._source is None else (self._source.position, self._source.data)
        return saved(_Position(self._timetable.num_steps, epoch, step, data, self._decision.state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, on every rank alike, before a loader begins, and on any number of ranks.

        On as many ranks batches are divided as they were; else ranks are measured anew.

        Raises:
            ValueError: naming what does not fit, such as another data set, seed or ``global_batch``; nothing is taken
                over then.
        """
        position = loaded(_Position, state, "state")
        if self._source is not None:
            self._go_on(position, self._source)
        self._resumed = position

    @property
    def _attached(self) -> LossScale:
        if self._scale is None:
            raise RuntimeError("this balancer was given no model: attach(model, optimizer) is called before")
        return self._scale

    def _divided(self, source: _Source, may_lack_samples: bool) -> _Source:
        """Divide a data set or a stream; the last global batch may have fewer samples than ranks."""
        if self._source is not None:
            raise ValueError(
                "this balancer divides a data set, or stream, already: call this once for all epochs, join what is "
                "trained on (ConcatDataset), and validate with any other sampler"
            )
        self._may_lack_samples |= may_lack_samples
        if self._may_lack_samples and self._scale is not None:
            require_samples(self._scale.norms)
        if self._resumed is not None:
            self._go_on(self._resumed, source)
        self._source = source
        return source

    def _go_on(self, position: _Position, source: Epochs) -> None:
        """Go on from a state that was loaded, where it is of these data."""
        differing = [
            f"{name}: {position.data.get(name)} was saved, {source.data.get(name)} is here"
            for name in sorted({*position.data, *source.data})
            if position.data.get(name) != source.data.get(name)
        ]
        if differing:
            raise ValueError(f"the state is of other batches ({'; '.join(differing)}), so samples would be lost")
        self._timetable.go_on_from(position.num_steps)
        source.go_on_from(position.epoch, position.step_of_epoch)
        if self._exchange is not None:
            self._exchange.collect()  # of steps before
        if self._counts is None and len(position.decision.meters) == self._timetable.num_ranks:
            self._timetable.add(position.num_steps, self._decision.go_on_from(position.decision))
        else:
            self._timetable.add(position.num_steps, self._decision.state.in_force)

    def _require_one_source(self) -> None:
        """Check once, before the first backward, that ranks divide the same samples; collective."""
        source = self._source
        if source is not None and not self._is_same_source:
            marks = self._meet(fingerprint(f"{source.mark!r} {sorted(source.data.items())} {source.position}"))
            here = f"here {source.data}, and (epoch, step) {source.position}"
            what = f"samples, lengths, seed, shuffle, drop_last, epoch or the state that training goes on from ({here})"
            require_same([mark for (mark,) in marks], what, self._meet)
            self._is_same_source = True

    def _require_undivided(self) -> None:
        """Notice, once and early, where somebody divides the sampler's batches again, and some are never trained on.

        Then a loader fetches further ahead in each of several steps; collective in the last of them.
        """
        ahead = self._ahead
        if len(ahead) > _FAST_STEPS or isinstance(self._source, BalancedStream):  # whose workers begin one by one
            return
        ahead.append(self._timetable.fetched - self._timetable.num_steps)
        if len(ahead) <= _FAST_STEPS:
            return
        rises = all(map(operator.lt, ahead, ahead[1:]))
        if any(other for (other,) in self._meet(float(rises))):
            raise RuntimeError(
                f"a loader has fetched several global batches a step, {_FAST_STEPS} steps in a row: something divides "
                "the sampler's batches over ranks again, as accelerator.prepare(loader) does, or step() is not called "
                "after each of them"
            )

    def _take(self, table: Sequence[Sequence[float]]) -> None:
        """Decide by what every rank has sent a step ago, alike on all of them."""
        num_steps, size, now = self._timetable.num_steps, len(fields(StepWindow)), self._timetable.newest
        rows = [RankWindow(StepWindow.of_numbers(row[:size]), *row[size:-4]) for row in table]
        self._step_s = max(row.window.step_s for row in rows)
        marks, fetched, ahead, wishes = zip(*(row[-4:] for row in table), strict=True)
        require_same(marks, "how batches are divided, or in the epoch (set_epoch)", self._meet)
        self.restraint.agree(wishes, num_steps, tells=self._timetable.rank == 0)
        from_step = int(max(fetched) + max(ahead)) + _MARGIN
        may_change = self.restraint.state != "off" and now is self._timetable.now  # the last change holds
        proposal = self._decision.update(rows, from_step - num_steps, may_change=may_change)
        in_force = self._decision.state.in_force
        if proposal is None:
            if now is self._timetable.now and not math.isclose(in_force.squares, now.squares, rel_tol=_ALIKE_SQUARES):
                self._put_in_force(in_force, from_step)
            return
        before, after = (each.counts(self._timetable.global_batch) for each in (now, proposal.division))
        is_made = self.restraint.state == "on"
        if is_made:
            self._put_in_force(proposal.division, from_step)
            self._decision.made(proposal, from_step)
        elif str(after) == self._advised:
            return
        self._advised = "" if is_made else str(after)
        pace_s = self._decision.pace_s
        record = ChangeRecord(
            kind="samples",
            step=num_steps,
            what=f"{proposal.name}, from step {from_step} on",
            left_out=tuple(rank for rank, count in enumerate(after) if count == 0),
            speeds=tuple(min(pace_s) / pace for pace in pace_s),
            before=before,
            after=after,
            step_s=proposal.step_s + proposal.saving_s,
            expected_step_s=proposal.step_s,
            change_s=self._decision.disturbed_s,
            moved_bytes=0,
            is_made=is_made,
            reason=str(proposal.verdict),
        )
        if self._timetable.rank == 0:
            text = "step %d: samples of ranks %s, %s for %s: %s%s"
            only = "" if is_made else "; only advice"
            logger.info(text, num_steps, list(after), record.what, list(before), record.reason, only)
        if self._on_change is not None:
            self._on_change(record)

    def _put_in_force(self, division: Division, from_step: int) -> None:
        if self._timetable.fetched > from_step:
            raise RuntimeError(
                f"a loader has fetched {self._timetable.fetched} steps, more than its workers fetched ahead before, "
                f"while ranks agreed to divide otherwise from step {from_step} on: give a new loader no more of them"
            )
        self._timetable.add(from_step, division)

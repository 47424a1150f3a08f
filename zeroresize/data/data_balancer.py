"""DataBalancer: data-parallel ranks divide global batches by their speed, and gradients stay those of the whole."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.data import IterableDataset

from zeroresize.comm.collectives import all_reduce, group_rank, group_size, message_device, require_group
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup, let_others_fail
from zeroresize.comm.pausing import Pausable, Restraint
from zeroresize.comm.words import Call
from zeroresize.data.averaging import BatchNorms, gathers_in_forwards, has_tensor_parallel_ranks
from zeroresize.data.measuring import RankSteps
from zeroresize.data.sampler import BalancedBatchSampler, BalancedStream, Cutting
from zeroresize.data.schedule import Schedule
from zeroresize.data.uncounted import UncountedForwards
from zeroresize.policy.data.decision import DataDecision, DataState, RankWindow
from zeroresize.policy.data.division import Division
from zeroresize.policy.slowness.windows import StepWindow
from zeroresize.resharding.agreement import agreed, require_same
from zeroresize.telemetry import ChangeRecord
from zeroresize.utils.checked import checked, integer
from zeroresize.utils.codec import loaded, saved
from zeroresize.utils.hashing import digest, fingerprint

logger = logging.getLogger(__name__)

_NOT_FETCHED = (
    "no batch of this step came from the sampler: make the loader with batch_sampler=balancer.sampler(dataset), or of "
    "balancer.stream(samples), let nobody divide it again, and call step() once for each of its global batches"
)

_MicroBatch = TypeVar("_MicroBatch")

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


class _Scaling:
    """Whether the loss of a step was scaled, before its optimizer steps, and whether its gradient is dropped here."""

    is_done, drops = False, False

    def require(self) -> None:
        if not self.is_done:
            raise RuntimeError(
                "the optimizer steps, or step() is called, without loss_scale(): the gradient is not that of the "
                "global batch, as ranks with fewer samples weigh as much as others"
            )


def _tell(given: Mapping[str, Any], error: ValueError) -> None:
    let_others_fail(require_group(given["process_group"] or dist.group.WORLD), error)


@checked(
    tell=_tell,
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
    ) -> None:
        is_job = dist.is_available() and dist.is_initialized()
        self._group = require_group(process_group or dist.group.WORLD) if is_job else None
        rank, num_ranks = (0, 1) if self._group is None else (group_rank(self._group), group_size(self._group))
        self._counts, self._update_every, self._on_change = counts, update_every, on_change
        self._global_batch, self._micro_batch_size, self._num_ranks = global_batch, micro_batch_size, num_ranks
        self._exchange: Exchange | None = None
        limits: tuple[float, ...] = (math.inf if max_samples is None else float(max_samples),)
        try:
            _require_counts(num_ranks, global_batch, counts, num_micro_batches, micro_batch_size)
        except ValueError as error:
            if self._group is not None:
                let_others_fail(self._group, error)
            raise
        if self._group is not None and num_ranks > 1:
            alike = {"global_batch": global_batch, "counts": counts, "update_every": update_every}
            alike |= {"num_micro_batches": num_micro_batches, "micro_batch_size": micro_batch_size}
            self._exchange = Exchange(CpuGroup(self._group, {name: str(each) for name, each in alike.items()}))
            limits = tuple(limit for (limit,) in self._exchange.meet(*limits))
        if sum(limits) < global_batch:
            raise ValueError(f"max_samples of all ranks, {list(limits)}, are fewer than global_batch={global_batch}")
        if min(limits) < num_micro_batches or any(map(operator.gt, counts or (), limits)):
            raise ValueError(
                f"max_samples of all ranks, {list(limits)}, are not enough for num_micro_batches={num_micro_batches} "
                f"and counts={counts}"
            )
        even = Division.of_counts(counts or (1.0,) * num_ranks, limits, num_micro_batches)
        self._decision, self._schedule = DataDecision(even, global_batch), Schedule(even, rank)
        several = None if micro_batch_size is not None else num_micro_batches
        self._cutting = Cutting(self._schedule, global_batch, several, micro_batch_size)
        self._source: BalancedBatchSampler | BalancedStream | None = None
        self._data = {"global_batch": str(global_batch)}
        self._resumed: _Position | None = None
        self._scaling, self.restraint, self._advised, self._num_fast = _Scaling(), Restraint(), "", 0
        self._num_fetched, self._num_made, self._may_lack_samples = 0, 0, 0 in (counts or ())
        self._norms, self._source_mark = BatchNorms(nn.Module()), b""
        self._steps: RankSteps | None = None
        self.close: Callable[[], object] = finalize(self, _close, self._exchange, [])
        if model is not None:
            self.attach(model, optimizer)

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Balance the training of a model, where the constructor was given None, as no wrapper was there; collective.

        Raises:
            ValueError: as the constructor, on the rank that was given what is not allowed; others raise a RuntimeError.
        """
        if self._steps is not None:
            raise RuntimeError("this balancer has a model already")

        def steps() -> RankSteps:
            self._norms = BatchNorms(model)
            self._require_model(model)
            return RankSteps(model, optimizer, self._scaling.require)

        schedule, scaling = self._schedule, self._scaling
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        meet = None if self._exchange is None else self._exchange.meet
        of_rank = steps() if meet is None else agreed(meet, steps, what="a DataBalancer")[0]
        self._steps = of_rank
        uncounted = UncountedForwards(
            model, lambda: (part := schedule.part) is not None and not part.num_samples, lambda: scaling.drops
        )
        self.close.detach()  # type: ignore[attr-defined]
        self.close = finalize(self, _close, self._exchange, [of_rank, uncounted])

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
                f"lengths {known.shape} are not allowed: {num_samples} numbers above 0 are needed, one a sample"
            )
        self._require_first(not drop_last and num_samples % self._global_batch > 0)
        self._data = {"samples": str(num_samples), "seed": str(seed), "shuffle": str(shuffle), **self._data}
        self._source_mark = digest(str(drop_last), b"" if known is None else known.tobytes())
        self._source = sampler = BalancedBatchSampler(self._cutting, num_samples, known, seed, shuffle, drop_last)
        self._go_on()
        return sampler

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
        self._require_first(not drop_last)
        self._data = {"samples": "a stream", **self._data}
        self._source_mark = digest(str(drop_last))
        self._source = stream = BalancedStream(self._cutting, samples, drop_last, prefetch_factor)
        self._go_on()
        return stream

    def steps(self, loader: Iterable[_MicroBatch]) -> Iterator[list[_MicroBatch]]:
        """Yield for each step of training the list of this rank's micro-batches, as a loader yields them.

        The loop computes all of them before it calls :meth:`step`.
        """
        batches = iter(loader)
        for first in batches:
            part = self._schedule.part
            if part is None:
                raise RuntimeError(_NOT_FETCHED)
            others = [next(batches) for _ in range(part.num_micro_batches - 1)]
            yield [first, *others]

    def loss_scale(self, counted: float | Tensor | None = None) -> Tensor:
        """Return what the mean loss over this rank's counted samples, or tokens, is multiplied by; alike on all ranks.

        Call it once a step, before the first backward. It sums over the ranks, who wait for each other, unless it is
        called for samples.

        Args:
            counted: over how many samples, or tokens that no mask leaves out, the rank's whole step takes its mean: of
                all its micro-batches. Where it is 0 gradients are dropped here, even NaN. A tensor of one number on
                a GPU is not read, so the mean must not be NaN then. None for samples, of which each rank knows how many
                the others have.

        Returns:
            A tensor of one number in float64; 0 where nothing is counted here, or on all ranks.

        Raises:
            ValueError: for another number, where batch norm normalises by a rank's samples, and where ranks have
                other samples, lengths or states.
            RuntimeError: where no batch of the step came from the sampler, where it was called in this step, and where
                it failed on another rank, but for GPUs.
        """
        if self._scaling.is_done:
            raise RuntimeError(
                f"loss_scale() was called twice in step {self._schedule.num_steps}: counted is what the rank's whole "
                "step counts, all of its micro-batches, and step() is called after the optimizer's"
            )
        if self._steps is None:
            raise RuntimeError("this balancer was given no model: attach(model, optimizer) is called before")
        device = self._device if self._group is None else message_device(self._group, self._device)
        error: Exception | None = None
        try:
            known = self._counted_here(counted)
        except (ValueError, RuntimeError) as wrong:
            if device.type != "cpu":  # where nobody reads what the others sum up
                raise
            known, error = math.nan, wrong
        self._require_one_source()
        mine = torch.as_tensor(known, dtype=torch.float64, device=device).reshape(()).clone()
        total, part = mine.clone(), self._schedule.part
        if counted is None and part is not None:
            total.fill_(part.total)
        elif self._exchange is not None and self._group is not None:
            all_reduce(total, self._group)
        if error is not None:
            raise error
        if device.type == "cpu" and math.isnan(total):
            raise RuntimeError("loss_scale() failed on another rank, whose error says why")
        self._scaling.drops = not isinstance(known, Tensor) and known == 0.0
        self._scaling.is_done = True
        return (self._num_ranks * mine / total.clamp(min=torch.finfo(total.dtype).tiny)).to(self._device)

    def step(self) -> None:
        """Record that a step of the optimizer is done; in one step of some, decide with the other ranks.

        Raises:
            RuntimeError: without :meth:`loss_scale` in this step, and if a rank does not come.
        """
        self._scaling.require()
        part, division = self._schedule.part, self._schedule.now
        self._scaling.is_done = self._scaling.drops = False
        assert part is not None and self._steps is not None  # or there was no scale
        self._schedule.num_steps += 1
        self._require_undivided()
        if isinstance(self._source, BalancedStream):
            self._source.step_ended()
        self._steps.end_step(part, division)
        if self._exchange is None or self._counts is not None:
            self._steps.forget()
            return
        num_steps = self._schedule.num_steps
        self._exchange.where.call, self._exchange.where.num_steps = Call.STEP, num_steps
        table = self._exchange.collect()
        if table is not None:
            self._take(table)
        if num_steps % self._update_every == 0:
            row = self._steps.window(num_steps, self._schedule.now.squares)
            further = row.fixed_s, row.excess_s, row.squares, row.most
            mark = fingerprint(f"{self._schedule.newest} {self._source.position[0] if self._source else 0}")
            lag = float(self._schedule.fetched), float(self._schedule.ahead)
            self._exchange.post([*row.window.as_numbers(), *further, mark, *lag, self.restraint.wish()])

    @property
    def counts(self) -> tuple[int, ...]:
        """[R] samples that each rank has in this step, of a whole global batch of equal ones."""
        return self._schedule.now.counts(self._global_batch)

    def what_if(self) -> tuple[DataOption, ...]:
        """Return what divisions would bring, the present one first; empty before speeds are known."""
        options, in_force = self._decision.what_if(), self._decision.state.in_force
        now_s = self._decision.step_s(in_force)
        if math.isnan(now_s):
            return ()
        size = self._global_batch
        known = [
            DataOption(name, each.counts(size), step_s, saved_s / now_s)
            for name, (each, step_s, saved_s) in options.items()
        ]
        return DataOption("as it is", in_force.counts(size), now_s, 0.0), *known

    def state_dict(self) -> dict[str, Any]:
        """Return what was trained on, and what was learned of ranks; plain values, the same on every rank.

        What loaders have fetched and was not trained on does not count.
        """
        epoch, step = (0, 0) if self._source is None else self._source.position
        return saved(_Position(self._schedule.num_steps, epoch, step, self._data, self._decision.state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, on every rank alike, before a loader begins, and on any number of ranks.

        On as many ranks batches are divided as they were; else ranks are measured anew.

        Raises:
            ValueError: naming what does not fit, such as another data set, seed or ``global_batch``; nothing is taken
                over then.
        """
        position = loaded(_Position, state, "state")
        if self._source is not None:
            self._require_same_data(position)
        self._resumed = position
        self._go_on()

    def _counted_here(self, counted: float | Tensor | None) -> float | Tensor:
        """Over how much this rank's mean is taken; a tensor where only a device knows it."""
        self._norms.require_none_in_training()
        part = self._schedule.part
        if part is None:
            raise RuntimeError(_NOT_FETCHED)
        known = float(part.num_samples) if counted is None or not part.num_samples else counted
        if isinstance(known, Tensor):
            if known.device.type != "cpu":
                return known
            known = float(known)
        if not 0.0 <= known < math.inf:
            raise ValueError(f"loss_scale: counted={counted!r} is not allowed: a finite number of at least 0 is needed")
        return float(known)

    def _require_model(self, model: nn.Module) -> None:
        gathers = gathers_in_forwards(model, self._group)
        if self._micro_batch_size is not None and gathers:
            raise ValueError(
                f"micro_batch_size={self._micro_batch_size} is not allowed with FSDP, which gathers parameters in "
                "every forward, so that all ranks need equally many: num_micro_batches says how many"
            )
        self._require_samples_for_norms()
        if self._counts is None and self._group is not None and has_tensor_parallel_ranks(model, self._group):
            raise ValueError(
                "the ranks that share a rank's samples, as each computes a part of the layers, would not divide "
                "batches alike: counts say how they are divided"
            )

    def _require_first(self, may_lack_samples: bool) -> None:
        if self._source is not None:
            raise ValueError(
                "this balancer divides a data set, or stream, already: another one needs a balancer of its own"
            )
        self._may_lack_samples |= may_lack_samples
        self._require_samples_for_norms()

    def _require_samples_for_norms(self) -> None:
        if self._may_lack_samples and self._norms.of_all_ranks:
            raise ValueError(
                f"batch norm over all ranks ({self._norms.of_all_ranks[0]}) would count what a rank without samples "
                "computes: no count may be 0, and where the last global batch is smaller drop_last=True is needed"
            )

    def _require_undivided(self) -> None:
        """Notice, once and early, where somebody divides the sampler's batches again, and some are never trained on.

        Then a loader fetches several global batches a step, in several steps in a row; collective in that one step.
        """
        before, self._num_fetched = self._num_fetched, self._schedule.fetched
        self._num_fast = self._num_fast + 1 if self._num_fetched - before > 1 else 0
        self._num_made += 1
        if self._num_made != _FAST_STEPS + 1 or self._exchange is None:
            return
        if any(number >= _FAST_STEPS for (number,) in self._exchange.meet(float(self._num_fast))):
            raise RuntimeError(
                f"a loader has fetched several global batches a step, {_FAST_STEPS} steps in a row: something divides "
                "the sampler's batches over ranks again, as accelerator.prepare(loader) does, or step() is not called "
                "after each of them"
            )

    def _require_one_source(self) -> None:
        """Check once, before the first backward, that ranks divide the same samples; collective."""
        if self._source_mark and self._exchange is not None and self._source is not None:
            mark = fingerprint(f"{self._source_mark!r} {sorted(self._data.items())} {self._source.position}")
            if len({mark for (mark,) in self._exchange.meet(mark)}) > 1:
                raise ValueError(
                    f"the ranks would train on other samples than those of one epoch: here {self._data}, epoch and "
                    f"step {self._source.position}; samples, lengths, seed, shuffle, drop_last and the state that "
                    "training goes on from must be the same on all ranks, as the balancer divides over them"
                )
        self._source_mark = b""

    def _require_same_data(self, position: _Position) -> None:
        differing = [
            f"{name}: {position.data.get(name)} was saved, {self._data.get(name)} is here"
            for name in sorted({*position.data, *self._data})
            if position.data.get(name) != self._data.get(name)
        ]
        if differing:
            raise ValueError(f"the state is of other batches ({'; '.join(differing)}), so samples would be lost")

    def _go_on(self) -> None:
        """Go on from a state that was loaded, once it is known of which data."""
        position, source = self._resumed, self._source
        if position is None or source is None:
            return
        self._require_same_data(position)
        self._resumed = None
        self._schedule.go_on_from(position.num_steps)
        source.go_on_from(position.epoch, position.step_of_epoch)
        if self._exchange is not None:
            self._exchange.collect()  # of steps before
        if self._counts is None and len(position.decision.meters) == self._num_ranks:
            self._schedule.add(position.num_steps, self._decision.go_on_from(position.decision))
        else:
            self._schedule.add(position.num_steps, self._decision.state.in_force)

    def _take(self, table: Sequence[Sequence[float]]) -> None:
        """Decide by what every rank has sent a step ago, alike on all of them."""
        num_steps, size, now = self._schedule.num_steps, len(fields(StepWindow)), self._schedule.newest
        rows = [RankWindow(StepWindow.of_numbers(row[:size]), *row[size:-4]) for row in table]
        marks, fetched, ahead, wishes = zip(*(row[-4:] for row in table), strict=True)
        assert self._exchange is not None
        require_same(marks, "how batches are divided, or in the epoch (set_epoch)", self._exchange.meet)
        self.restraint.agree(wishes, num_steps, tells=self._schedule.rank == 0)
        from_step = int(max(fetched) + max(ahead)) + _MARGIN
        may_change = self.restraint.state != "off" and now is self._schedule.now  # the last change holds
        proposal = self._decision.update(rows, from_step - num_steps, may_change=may_change)
        in_force = self._decision.state.in_force
        if proposal is None:
            if now is self._schedule.now and not math.isclose(in_force.squares, now.squares, rel_tol=_ALIKE_SQUARES):
                self._put_in_force(in_force, from_step)
            return
        before, after = (each.counts(self._global_batch) for each in (now, proposal.division))
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
        if self._schedule.rank == 0:
            text = "step %d: samples of ranks %s, %s for %s: %s%s"
            only = "" if is_made else "; only advice"
            logger.info(text, num_steps, list(after), record.what, list(before), record.reason, only)
        if self._on_change is not None:
            self._on_change(record)

    def _put_in_force(self, division: Division, from_step: int) -> None:
        if self._schedule.fetched > from_step:
            raise RuntimeError(
                f"a loader has fetched {self._schedule.fetched} steps, more than its workers fetched ahead before, "
                f"while ranks agreed to divide otherwise from step {from_step} on: give a new loader no more of them"
            )
        self._schedule.add(from_step, division)


def _require_counts(
    num_ranks: int,
    global_batch: int,
    counts: Sequence[int] | None,
    num_micro_batches: int,
    micro_batch_size: int | None,
) -> None:
    """Check what no single value tells."""
    if counts is not None and (len(counts) != num_ranks or sum(counts) != global_batch):
        raise ValueError(
            f"counts={list(counts)} are not allowed: {num_ranks} numbers are needed, one a rank, that are "
            f"global_batch={global_batch} together"
        )
    if any(0 < count < num_micro_batches for count in counts or ()):
        raise ValueError(f"counts={list(counts or ())} are not allowed: {num_micro_batches} samples or none are needed")
    if micro_batch_size is not None and num_micro_batches > 1:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} is not allowed beside num_micro_batches={num_micro_batches}"
        )
    if num_micro_batches * num_ranks > global_batch:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} is not allowed: {num_ranks} ranks with a sample in each need a "
            f"global_batch of {num_micro_batches * num_ranks}, which is {global_batch}"
        )


def _close(exchange: Exchange | None, others: Sequence[RankSteps | UncountedForwards]) -> None:
    for other in others:
        other.close()
    if exchange is not None:
        exchange.close()

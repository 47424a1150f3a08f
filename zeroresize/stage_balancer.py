"""StageBalancer: a Balancer for the tensor-parallel group of a pipeline's stage, whose layers come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.balancer import Balancer
from zeroresize.comm.collectives import as_process_group, group_rank, group_size
from zeroresize.comm.groups import destroy_side_group, free_group_number, make_side_group
from zeroresize.comm.pausing import Pausable, Restraint
from zeroresize.config import BalanceConfig
from zeroresize.control.setup import tell_other_ranks
from zeroresize.conversion import balanced_layers, group_of
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.telemetry import UpdateRecord
from zeroresize.utils.checked import checked

#: A group has settled when so many updates in a row have decided alike: an update decides by what was sent at the one
#: before, of which the first may still have been of the time before the change.
QUIET_UPDATES = 3
#: Of shares; what differs by less is alike.
_ALIKE = 0.05
#: Whoever has not settled after so many updates is judged as it is.
MOST_UPDATES = 20


@checked(tell=lambda given, error: tell_other_ranks(given["pipeline"].module, given["process_group"], error))
class StageBalancer(Pausable):
    """Balances a stage's tensor-parallel group by a :class:`~zeroresize.Balancer` over the layers that the stage has::

        layers = nn.ModuleList(Block(tp_group) for _ in range(24))
        zr.convert(layers, tp_group)
        pipeline = Pipeline(layers, loss, num_microbatches=8, process_group=pipeline_group)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        units = zr.StageBalancer(pipeline, optimizer, config, process_group=tp_group)
        balancer = PipelineBalancer(pipeline, optimizer, replicas=tp_group, units=units)
        for inputs, target in batches:
            optimizer.zero_grad()
            with balancer.step():
                pipeline.step(inputs, target=target)
            optimizer.step()
            units.step()

    Every rank of the group is in a pipeline of its own; these are replicas of each other. Units move first. What is
    left then of a stage's slowness makes layers move: units come home before, and what is known of the stage's ranks
    is learned anew with the new layers.

    Args:
        pipeline: of this rank, its layers converted before it was made.
        optimizer: the one that steps its parameters.
        config: how to balance; None for the defaults.
        process_group: the tensor-parallel group of this rank's stage, or a one-dimensional ``DeviceMesh`` of it; None
            for that of the layers.
        data_parallel_group: the ranks that hold the same shards of the same stage; None where there are none. Then
            give all ranks of a stage as the pipeline balancer's ``replicas``.
        on_update: as of :class:`~zeroresize.Balancer`.

    Attributes:
        balancer: the present one; another one after this stage's layers have changed. None where none of them is
            balanced.

    Raises:
        ValueError: as :class:`~zeroresize.Balancer`, of the layers that are here; for ``config.memory_limits``, and for
            balanced layers of which one has a parameter of another one.
        RuntimeError: as :class:`~zeroresize.Balancer`; or if the job's store does not answer.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Any,
        config: BalanceConfig | None = None,
        *,
        process_group: ProcessGroup | DeviceMesh | None = None,
        data_parallel_group: ProcessGroup | DeviceMesh | None = None,
        on_update: Callable[[UpdateRecord], None] | None = None,
    ) -> None:
        if config is not None and config.memory_limits is not None:
            raise ValueError(
                "memory_limits have no place within a stage, whose layers may leave it: give PipelineBalancer "
                "memory_limits, of every stage"
            )
        tied = {tie.parameter: tie.path for tie in pipeline.ties}
        for name, layer in balanced_layers(pipeline.module).items():
            paths = [tied[each] for each in pipeline.module.get_submodule(name).parameters() if each in tied]
            if paths and layer.stays_even is None:  # convert has seen no other layer with the parameter
                raise ValueError(
                    f"{name} has the tied parameter {paths[0]}, whose units each stage would move by itself, so its "
                    "gradients could not be summed: convert all layers of the pipeline in one call"
                )
        self._pipeline, self._optimizer, self._config = pipeline, optimizer, config
        present = nn.ModuleList(pipeline.layers[number] for number in pipeline.present)
        self._group, self._on_update = group_of(present, process_group), on_update
        # A balancer moves no units before it is told who holds the same shards: nobody else.
        self._owns_group = data_parallel_group is None
        self._same_shards = as_process_group(data_parallel_group) or make_side_group(
            self._group, [group_rank(self._group)], free_group_number()
        )
        self._num_updates = self._num_quiet = 0
        self.restraint, self._present = Restraint(), range(0)  # of which layers the present balancer is
        self.balancer: Balancer | None = None
        try:
            self.balancer = self._new_balancer()
        except Exception:
            self.close()
            raise

    def step(self) -> None:
        """Record that one optimizer step is done; see :meth:`zeroresize.Balancer.step`."""
        if self.balancer is not None:
            self.balancer.step()

    def close(self) -> None:
        """Stop balancing; see :meth:`zeroresize.Balancer.close`."""
        if self.balancer is not None:
            self.balancer.close()
        if self._owns_group:
            self._owns_group = False
            destroy_side_group(self._same_shards)

    def at_home(self) -> AbstractContextManager[None]:
        """Keep units at home for as long as this lasts, for checkpoints; see :meth:`zeroresize.Balancer.at_home`."""
        return nullcontext() if self.balancer is None else self.balancer.at_home()

    @property
    def num_ranks(self) -> int:
        """The size of the stage's tensor-parallel group."""
        return group_size(self._group)

    @property
    def has_settled(self) -> bool:
        """Whether the group's plan has stayed the same for :data:`QUIET_UPDATES`, and no step is to be measured."""
        if self.balancer is None:
            return True
        is_quiet = self._num_quiet >= QUIET_UPDATES or self._num_updates >= MOST_UPDATES
        return is_quiet and not self.balancer.is_calibrating

    def watch(self) -> None:
        """Count updates anew, as something may have changed."""
        self._num_updates = self._num_quiet = 0

    def leave(self, boundaries: Sequence[int]) -> None:
        """Prepare for new boundaries of the stages: if this stage gets other layers, bring units home, and close.

        Raises:
            RuntimeError: as :meth:`zeroresize.Balancer.move`.
        """
        stage = self._pipeline.stage
        if range(boundaries[stage], boundaries[stage + 1]) == self._present:
            return
        if self.balancer is not None:
            self.balancer.close(at_home=True)
        self._present = range(0)

    def attach(self) -> None:
        """Balance the layers that are here now."""
        if self._present != self._pipeline.present:
            self.balancer = self._new_balancer()

    def _new_balancer(self) -> Balancer | None:
        self._present = self._pipeline.present
        self.watch()
        present = nn.ModuleDict({str(number): self._pipeline.layers[number] for number in self._present})
        if not balanced_layers(present):
            return None
        balancer = Balancer(
            present,
            self._optimizer,
            self._config,
            process_group=self._group,
            data_parallel_group=self._same_shards,
            on_update=self._updated,
        )
        vars(balancer.restraint).update(vars(self.restraint))  # a pause outlasts a move of layers
        self.restraint = balancer.restraint
        self._decided = _shares_of(balancer)
        return balancer

    def _updated(self, record: UpdateRecord) -> None:
        assert self.balancer is not None
        decided = _shares_of(self.balancer)
        are_alike = all(abs(now - then) <= _ALIKE for now, then in zip(decided, self._decided, strict=True))
        self._num_updates += 1
        self._num_quiet = self._num_quiet + 1 if are_alike else 0
        self._decided = decided
        if self._on_update is not None:
            self._on_update(record)


def _shares_of(balancer: Balancer) -> list[float]:
    """What each rank prunes, lends and owns."""
    return [share for rank in balancer.plan.ranks for share in (rank.pruned, rank.lent, rank.owned)]

"""Each rank runs one stage of a pipeline whose layers may move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import (
    as_process_group,
    group_rank,
    group_ranks,
    group_size,
    require_group,
)
from zeroresize.comm.exchange import Meet
from zeroresize.comm.groups import CpuGroup, destroy_side_group
from zeroresize.layers.whole_parameters import require_references_within_stages, require_whole_parameters
from zeroresize.optim.gradient_clipping import grad_norm, norm_over, scale_gradients
from zeroresize.pipeline.stage_layers import (
    Initialize,
    StageLayers,
    Tie,
    divided_by_parameters,
    place,
    require_initialize,
    tensors_by_layer,
    ties_of,
)
from zeroresize.pipeline.stage_steps import Make, StageSteps
from zeroresize.plan.partition import Partition
from zeroresize.resharding.agreement import agreed, let_others_know, make_alike, meet_over, sum_alike
from zeroresize.resharding.parameter_state import ParameterState
from zeroresize.runtime.counted_loss import Count, CountedLoss, Loss, multiply_gradients, total_count
from zeroresize.runtime.schedules import Schedule
from zeroresize.utils.checked import checked, integer
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_private import hooks_of_parameter
from zeroresize.utils.torch_state import known_device


@checked(
    tell=lambda given, error: let_others_know(given["process_group"], given["device"] or "cpu", error),
    num_microbatches=integer(1),
    device=known_device,
)
class Pipeline:
    """Runs a model of layers over the stages of a process group; rank ``s`` of the group is stage ``s``.

    Every rank builds all layers, for real or on the meta device, and then holds the tensors of its own stage only:
    all modules and Parameter objects are there, empty where the layer is on another stage. Give the optimizer
    :meth:`parameters`, all of them: torch's optimizers skip those without a gradient, and groups stay alike on all
    ranks wherever layers move (:func:`~zeroresize.pipeline.move_layers`).

    A parameter that several layers have, as a tied embedding and head, is on every stage with one of them: as the first
    of them is built or filled, and with the gradient of the undivided model after each step, bitwise alike.

    Its constructor is collective.

    Args:
        layers: [L] called one after another; each takes what the one before returns: a tensor or a tuple of tensors,
            the batch as their first dimension.
        loss: of a micro-batch's outputs and targets. A step's loss is the mean over all targets of the batch that
            count, whether ``loss`` averages or sums over those of a micro-batch. Which do is known of torch's losses,
            such as ``cross_entropy`` with its ``ignore_index`` and ``weight``, as far as the targets tell; where only
            the loss knows, it returns (sum, count). Other numbers are taken for the mean over samples.
        num_microbatches: into which a batch is split.
        process_group: one rank for each stage, or a one-dimensional ``DeviceMesh`` of them.
        boundaries: stage ``s`` gets the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``; None to
            divide their parameters as evenly as possible.
        schedule: "1f1b", by which a stage keeps activations of at most as many micro-batches as there are stages from
            it on, or "gpipe": all forwards, then all backwards.
        device: for the stage's tensors; None for the CPU.
        initialize: ``initialize(number, layer)`` fills the tensors of a layer of this stage that was built on the meta
            device.
        count: ``count(target)`` tells how many targets of a micro-batch count, where ``loss`` averages over those.
        replicas: the ranks that are this stage in pipelines beside this one, which train other parts of the batch. The
            average of their gradients, which is up to you, is then the gradient of the mean over the whole batch, as
            the average of their losses is that mean.

    Attributes:
        layers: all modules, whose names begin with their numbers.
        boundaries: in force now.
        description: a fingerprint of layers, micro-batches and schedule, the same on all ranks.
        loss: a module that computes a micro-batch's part of it.
        replicas: may be set, alike on all ranks; a balancer with ``replicas`` does.
        schedule: as given.
        stage: this rank's number within the group; -1 where it was released.
        tensors: what each layer has [L], without parameters of earlier ones.
        ties: the parameters that several layers have.
        num_steps: how often :meth:`step` was called.

    Raises:
        ValueError: for boundaries that do not fit, such as fewer layers than stages; layers in wrappers; a reference to
            a parameter of a layer on another stage; a module with parameters and buffers on several stages; layers on
            the meta device without ``initialize``; another schedule, such as a class of torch.distributed.pipelining.
        RuntimeError: on every rank, if they differ in layers, boundaries, micro-batches or schedule, or filling them
            fails on one.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.ModuleList | nn.Sequential,
        loss: Loss,
        *,
        num_microbatches: int,
        process_group: ProcessGroup | DeviceMesh,
        boundaries: Sequence[int] | None = None,
        schedule: Schedule = "1f1b",
        device: torch.device | str | int | None = None,
        initialize: Initialize | None = None,
        count: Count | None = None,
        replicas: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        process_group = require_group(process_group)
        self._group: ProcessGroup | None = process_group
        self._owns_group = False
        self.stage, self.num_stages = group_rank(process_group), group_size(process_group)
        self.device = torch.device("cpu" if device is None else device)
        self.num_microbatches = num_microbatches
        self.loss, self.schedule = CountedLoss(loss, count, averages=True), schedule
        self.replicas = as_process_group(replicas)
        self._meets_before = self._meets_after = True  # until the last stage has told whether it needs to
        self.num_steps = 0
        self._joined: Meet | None = None
        self._side_group: CpuGroup | None = None

        def checked() -> list[nn.Module]:
            whole = list(layers)
            self.boundaries = (
                divided_by_parameters(whole, self.num_stages)
                if boundaries is None
                else Partition.of(boundaries, len(whole), self.num_stages)
            ).boundaries
            require_whole_parameters(whole)
            require_references_within_stages(whole, Partition(self.boundaries).stages)
            require_initialize(whole, self._present(), initialize)
            ties = [(tie.path, tie.layers) for tie in ties_of(whole)]
            self.description = fingerprint(str([num_microbatches, schedule, _description(whole), ties]))
            return whole

        same = "layers, boundaries, micro-batches or schedule"
        whole = make_alike(self.meet(), checked, lambda _: [self.boundaries, self.description], "a pipeline", same)
        self.module = StageLayers(whole, self._present())
        self._steps = StageSteps(schedule, self.module, self.device, self.loss)
        self._steps.follow(process_group)
        fill = partial(place, whole, self.module.present, self.device, initialize)
        agreed(self.meet(), fill, what="the layers of a pipeline")
        self.tensors, self.ties = tensors_by_layer(whole), ties_of(whole)
        for tie, holders in self.shared:
            if self.stage in holders:  # layers may have been filled otherwise on each
                sum_alike(tie.parameter, holders[:1], holders, process_group)

    @property
    def process_group(self) -> ProcessGroup:
        """The group of the stages: its rank ``s`` is stage ``s``; a RuntimeError on a rank that was released."""
        if self._group is None:
            raise RuntimeError(
                "this rank was released by a re-packing: it has no layers and is in no stage. Leave the training loop "
                "where pipeline.is_released, call torch.distributed.destroy_process_group() and end the process"
            )
        return self._group

    @property
    def is_released(self) -> bool:
        """Whether a re-packing has left this rank without a stage (:func:`~zeroresize.pipeline.repack`)."""
        return self._group is None

    @property
    def layers(self) -> nn.ModuleList:
        """All layers of the model [L]; those of other stages have empty tensors."""
        return self.module.layers

    @property
    def present(self) -> range:
        """The numbers of this stage's layers."""
        return self.module.present

    @property
    def shared(self) -> list[tuple[Tie, list[int]]]:
        """The tied parameters that several stages have now, each with these stages; the same on every rank."""
        stages = Partition(self.boundaries).stages if self.ties else []
        return [(tie, holders) for tie in self.ties if len(holders := tie.holders(stages)) > 1]

    def require_same_ties(self) -> None:
        """Check that the same layers share parameters as when the pipeline was made, which sums their gradients."""
        if changed := {*self.ties} ^ {*ties_of([*self.layers])}:
            named = ", ".join(sorted({f"{tie.path} (of layers {list(tie.layers)})" for tie in changed}))
            raise ValueError(f"{named}: other layers share it, or it is another, than when the pipeline was made")

    def require_same_parameters(self) -> None:
        """Check, besides, that layers have the parameters of when the pipeline was made, which it moves and saves."""
        self.require_same_ties()
        known = {each for of_layer in self.tensors for each in of_layer.parameters.values()}
        if others := [name for name, each in self.named_parameters() if each not in known]:
            raise ValueError(
                f"{', '.join(others)}: another Parameter than when the pipeline was made: replace it before"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of all layers, for an optimizer; those of other stages have no elements.

        They come in one order on all ranks.
        """
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate as :meth:`parameters` does, with names such as ``layers.7.weight``."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this stage's layers only, by the whole model's names, such as ``layers.7.weight``."""
        return {
            f"layers.{number}.{name}": value
            for number in self.present
            for name, value in self.layers[number].state_dict().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this stage's layers from a dictionary that may hold more, such as that of the whole model.

        Raises:
            RuntimeError: if something of this stage is missing or of another shape.
        """
        for number in self.present:
            prefix = f"layers.{number}."
            values = {name.removeprefix(prefix): one for name, one in state_dict.items() if name.startswith(prefix)}
            self.layers[number].load_state_dict(values)

    def open_side_group(self) -> CpuGroup:
        """Return a group of the same ranks, for layers that travel while a step runs; collective where not open."""
        if self._side_group is None:
            self._side_group = CpuGroup(self.process_group, {}, group_ranks(self.process_group))
        return self._side_group

    def leave_side_group(self) -> None:
        """Close the side group here; its next use opens a new one. All ranks leave it, also where not all opened it."""
        side_group, self._side_group = self._side_group, None
        if side_group is not None:
            side_group.close()

    def step(self, *inputs: Tensor, target: Tensor | None = None) -> Tensor | None:
        """Run forward and backward of one batch, and add the gradients to those there are; collective.

        Every rank calls it. The first stage must be given the inputs and the last one the target; what other stages
        are given is not used. Under ``torch.autocast``, which every rank then enters, layers hand on what it gives.

        Args:
            inputs: [B, …] each, of any shape; micro-batches differ by at most one sample, and of fewer samples than
                micro-batches each is one.
            target: [B, …].

        Returns:
            The loss, the mean over all that counts, on the last stage.

        Raises:
            ValueError: where gradients are off, as under ``torch.no_grad()``: :meth:`evaluate` runs the forward alone.
                On the last stage, where no target counts; the others raise a RuntimeError then.
                For a batch without samples, and for post-accumulate hooks of a tied parameter.
            RuntimeError: where another stage has such an error, or does not come. In the first step also where a layer
                or the loss fails on any stage, on all of them. Where copies of tied parameters are not alike.
        """
        _require_gradients("step")
        return self._run_microbatches(
            lambda: (
                _split(inputs if self.stage == 0 else (), self.num_microbatches),
                [each for (each,) in _split([] if target is None else [target], self.num_microbatches)],
            )
        )

    def step_microbatches(
        self, microbatches: Sequence[Sequence[Tensor]], targets: Sequence[Tensor | None] = ()
    ) -> Tensor | None:
        """Run forward and backward of micro-batches that differ in shape, as :meth:`step`; collective.

        What counts is known as in :meth:`step`.

        Args:
            microbatches: [M] the inputs of each, on the first stage; as many as there are, whatever
                ``num_microbatches`` is.
            targets: [M], on the last stage.

        Returns:
            The loss, the mean over all that counts, on the last stage.

        Raises:
            ValueError, RuntimeError: as :meth:`step`; also without micro-batches and for another number of targets.
        """
        _require_gradients("step_microbatches")
        return self._run_microbatches(lambda: (microbatches if self.stage == 0 else [], targets))

    def evaluate(self, *inputs: Tensor) -> Any:
        """Run the forward of one batch without gradients; return the outputs on the last stage, None on the others.

        Every rank calls it, as :meth:`step`. The caller decides on ``pipeline.layers.eval()``.
        """
        _ = self.process_group  # an error where this rank was released
        given = inputs if self.stage == 0 else ()
        outputs = self._steps.evaluate(lambda: (_split(given, self.num_microbatches), []))
        joined = [torch.cat(of_each) for of_each in zip(*outputs, strict=True)]
        return None if not joined else joined[0] if len(joined) == 1 else tuple(joined)

    def refresh(self) -> None:
        """Find what layers hand to each other anew at the next step.

        To be called on every rank after anything but the shapes of batches, ``requires_grad`` of parameters and
        autocast has changed it.
        """
        self._steps.refresh()

    def follow(self, boundaries: Sequence[int]) -> None:
        """Run other layers from now on, which must be there; :func:`~zeroresize.pipeline.move_layers` calls it."""
        self.boundaries = tuple(boundaries)
        self.module.present = self._present()
        if self._group is not None:
            self._steps.follow(self._group)

    def follow_to(self, boundaries: Sequence[int], process_group: ProcessGroup | None) -> None:
        """Run other layers, as :meth:`follow`, over the stages of another group; None where this rank is released.

        The pipeline owns the group from now on, and destroys it when it follows to the next one.
        """
        before, self._group = self._group, process_group
        self.leave_side_group()
        if self._owns_group and before is not None:
            destroy_side_group(before)
        self._owns_group = True
        self._meets_before = self._meets_after = True  # the last stage may be another rank, which has to tell anew
        self.num_stages = len(boundaries) - 1
        self.stage = -1 if process_group is None else group_rank(process_group)
        self.follow(boundaries)

    def meet(self) -> Meet:
        """Return a :data:`~zeroresize.comm.exchange.Meet` of all stages, and of the pipelines joined with this one."""
        return self._joined or meet_over(self.process_group, self.device)

    def meet_aside(self) -> Meet:
        """Return a ``Meet`` that works whatever became of the stages' messages, such as of a step that failed.

        Collective where the side group is not open.
        """
        return self._joined or meet_over(self.process_group, self.device, self.open_side_group())

    def join(self, meet: Meet) -> None:
        """Move layers together with other pipelines from now on, by a ``meet`` of the ranks of all of them."""
        self._joined = meet

    @property
    def is_joined(self) -> bool:
        """Whether this pipeline moves layers together with others."""
        return self._joined is not None

    @property
    def message_bytes(self) -> tuple[float, ...]:
        """Return [L + 1] bytes of a micro-batch's message at each boundary, the mean of both directions.

        They are those of the first micro-batch of the first step.

        Raises:
            RuntimeError: before that.
        """
        if self._steps.message_bytes is None:
            raise RuntimeError("the shapes of messages are not known before the first step of the pipeline")
        return self._steps.message_bytes

    @property
    def knows_shapes(self) -> bool:
        """Whether a step has shown what layers hand to each other."""
        return self._steps.message_bytes is not None

    def _run_microbatches(self, make: Make) -> Tensor | None:
        _ = self.process_group  # an error where this rank was released
        self.num_steps += 1

        def made() -> tuple[Sequence[Sequence[Tensor]], Sequence[Tensor | None]]:
            if self.ties or self.num_steps & (self.num_steps - 1) == 0:  # to look at all takes milliseconds
                self.require_same_ties()
            for tie, _ in self.shared:
                hooks = hooks_of_parameter(tie.parameter, "post_accumulate_grad").values()
                if any(not str(getattr(hook, "__module__", None)).startswith("zeroresize.") for hook in hooks):
                    raise ValueError(
                        f"{tie.path} has a post-accumulate hook, but is on several stages, which sum its gradients "
                        "behind their backward: do what the hook does after pipeline.step"
                    )
            return make()

        with self._gradients_apart():
            loss = self._scaled(self._steps.step(made, self._count))
            if self.shared:
                self._sum_tied_gradients()
            return loss

    def _count(self, targets: Sequence[Any], sizes: Sequence[float]) -> None:
        """Learn what the micro-batches count, before the first forward; collective, where that may be nothing."""

        def counted() -> tuple[float, float]:
            return sum(self.loss.prepare(targets, sizes)), not self.loss.is_foreseen

        def gathered() -> tuple[float, float, float]:
            if not self._is_last:
                return 0.0, 0.0, 0.0
            if not sizes:
                raise ValueError("target=None: the last stage needs the targets")
            _, rows = agreed(self._meet_replicas, counted, lambda row: row, what="a step")
            self.loss.begin(total_count(count for count, _ in rows) / len(rows))
            return 0.0, self.loss.can_be_empty, any(is_unforeseen for _, is_unforeseen in rows)

        if self._meets_before:
            _, table = agreed(meet_over(self.process_group, self.device), gathered, lambda row: row, what="a step")
            self._meets_before, self._meets_after = map(bool, table[-1][1:])
        else:
            gathered()

    def _scaled(self, loss: Tensor | None) -> Tensor | None:
        """Scale the step's gradients, and its loss, where only the loss knew what counts; collective then."""
        if not self._meets_after:
            return loss

        def gathered() -> tuple[float, float]:
            if not self._is_last:
                return 0.0, 0.0
            rows = self._meet_replicas(self.loss.counted, self.loss.num_unforeseen)
            total = total_count(count for count, _ in rows) / len(rows)
            is_unforeseen = any(number for _, number in rows)  # alike on all replicas, which meet again or not
            return self.loss.total / total if is_unforeseen else 1.0, is_unforeseen

        _, table = agreed(meet_over(self.process_group, self.device), gathered, lambda row: row, what="a step")
        factor, meets_after = table[-1]
        self._meets_after = bool(meets_after)
        self.loss.warn()
        multiply_gradients(self.parameters(), factor)
        return None if loss is None else loss * factor

    @contextmanager
    def _gradients_apart(self) -> Iterator[None]:
        """Keep what earlier steps have added to gradients out of what may be scaled, or is summed over stages."""
        apart = self.parameters() if self._meets_after else [tie.parameter for tie, _ in self.shared]
        before = [(each, each.grad) for each in apart if each.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in before:  # the same object: a flat buffer may be behind it
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _sum_tied_gradients(self) -> None:
        """Sum the step's gradients of tied parameters over the stages that have them, as Megatron does; collective."""
        shared = self.shared

        def numbers_here() -> list[float]:
            for tie, _ in shared:
                ParameterState(tie.path, tie.parameter, None, None).require_dense_gradients()
            gradients = [tie.parameter.grad for tie, _ in shared]
            kinds = [0.0 if each is None else fingerprint(f"{each.shape} {each.dtype}") for each in gradients]
            return [*kinds, *(_fingerprint_of(tie.parameter) for tie, _ in shared)]

        _, table = agreed(meet_over(self.process_group, self.device), numbers_here, lambda row: row, what="a step")
        columns = list(zip(*table, strict=True))  # by tie and stage
        for (tie, holders), kinds, weights in zip(shared, columns[: len(shared)], columns[len(shared) :], strict=True):
            if len(set(kinds) - {0.0}) > 1:
                raise RuntimeError(
                    f"the gradients of {tie.path} on the stages {holders} are of different shapes or types, so they "
                    "cannot be summed: a parameter that layers of several stages have must be whole on each of them"
                )
            if len({weights[stage] for stage in holders}) > 1:
                raise RuntimeError(
                    f"{tie.path} is one parameter, but copies on the stages {holders} have come apart: load, fill and "
                    "step them alike, clip by zeroresize.pipeline.clip_grad_norm_ and scale by zeroresize.GradScaler"
                )
            senders = [stage for stage in holders if kinds[stage]]
            if senders and self.stage in holders:
                if tie.parameter.grad is None:
                    tie.parameter.grad = torch.zeros_like(tie.parameter)
                sum_alike(tie.parameter.grad, senders, holders, self.process_group)

    @property
    def _meet_replicas(self) -> Meet:
        return (lambda *numbers: [numbers]) if self.replicas is None else meet_over(self.replicas, self.device)

    @property
    def _is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def _present(self) -> range:
        if self._group is None:
            return range(0)
        return range(self.boundaries[self.stage], self.boundaries[self.stage + 1])


@torch.no_grad()
def clip_grad_norm_(pipeline: Pipeline, max_norm: float) -> Tensor:
    """Scale the gradients of all stages so that their 2-norm is at most ``max_norm``; collective.

    The result is that of ``torch.nn.utils.clip_grad_norm_`` on the undivided model.

    With tensor parallelism inside stages the norm is taken over the stages' groups, too: see
    :func:`zeroresize.clip_grad_norm_`.

    Args:
        max_norm: of all stages' gradients together, as one vector.

    Returns:
        The 2-norm before scaling, on every rank.

    Raises:
        ValueError: for layers of several tensor-parallel groups.
    """
    parameters = list(pipeline.parameters())  # of all stages' layers, so all ranks find the same groups
    elsewhere = {tie.parameter for tie, holders in pipeline.shared if holders[0] != pipeline.stage}
    counting = [parameter for parameter in parameters if parameter not in elsewhere]
    total = norm_over(grad_norm(counting).to(pipeline.device).square(), pipeline.process_group)
    scale_gradients(parameters, max_norm, total)
    return total


def _require_gradients(method: str) -> None:
    if not torch.is_grad_enabled():
        raise ValueError(
            f"pipeline.{method}() trains, but gradients are off here, as under torch.no_grad(): to validate, call "
            "pipeline.evaluate(*inputs) on every rank"
        )


def _fingerprint_of(weight: Tensor) -> float:
    """Of the bits of about a thousand of its elements; alike for copies, whatever their strides."""
    flat = weight.detach().flatten()
    some = flat[:: max(flat.numel() // 1024, 1)].contiguous().cpu()
    return fingerprint(bytes(some.view(torch.uint8).tolist()))


def _split(tensors: Sequence[Tensor], num_microbatches: int) -> list[tuple[Tensor, ...]]:
    """[M] parts along the first dimension that differ by one at most; none is empty."""
    if not tensors:
        return []
    if others := [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]:
        raise ValueError(f"a batch is made of tensors: {others[0]} is none")
    number = max(min(num_microbatches, *(len(tensor) for tensor in tensors)), 1)
    return list(zip(*(tensor.tensor_split(number) for tensor in tensors), strict=True))


def _description(layers: Sequence[nn.Module]) -> list[Any]:
    """What must be alike on all ranks: classes, names, shapes and dtypes."""
    return [
        [type(layer).__name__, [(name, tuple(one.shape), str(one.dtype)) for name, one in layer.named_parameters()]]
        for layer in layers
    ]

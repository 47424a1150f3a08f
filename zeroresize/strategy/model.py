"""A model whose parallelism is switched while training goes on (HotSPa): the weights move, the step goes on.

``L`` layers, ``P`` tensors, ``R`` ranks of the job.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size, require_group
from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise
from zeroresize.optim.optimizers import require_stepping
from zeroresize.plan.layout import Layout, TensorSpec
from zeroresize.plan.strategy import Position, Strategy
from zeroresize.policy.strategy.switches.transfers import MAX_MESSAGE_BYTES
from zeroresize.resharding.agreement import agreed, gather_texts, let_others_know, make_alike, meet_over
from zeroresize.resharding.parameter_state import settings_of
from zeroresize.resharding.transaction import Participants, run_transaction
from zeroresize.strategy.placement.placement import Placement, RankGroups, held_bytes
from zeroresize.strategy.placement.whole_layers import Initialize, SegmentsOf, WholeLayers, WholeTensor
from zeroresize.strategy.switching.optimizer_move import OptimizerMove
from zeroresize.strategy.switching.placements import Placements
from zeroresize.strategy.switching.switch import SwitchReport, TravelTypes
from zeroresize.strategy.switching.switcher import OneThread, Switcher, by_one_thread
from zeroresize.utils.checked import checked, integer
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_state import known_device


def _device_of(layers: Iterable[nn.Module], device: torch.device | str | int | None) -> torch.device:
    """The device that is wanted, or that of the first tensor."""
    tensors = itertools.chain.from_iterable((*layer.parameters(), *layer.buffers()) for layer in layers)
    first = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    return first if device is None else torch.device(device)


def _tell(given: Mapping[str, Any], error: ValueError) -> None:
    device = given["device"]
    with suppress(Exception):  # it may be just the layers that are wrong
        device = _device_of(given["layers"], device)
    let_others_know(given["process_group"] or dist.group.WORLD, device, error)


def tell_ranks(model: SwitchableModel, error: ValueError) -> None:
    """Let the other ranks of a model fail, too, where this one's call, trainer or balancer was given what is wrong."""
    let_others_know(model.process_group, model.device, error)


_checked_on_all = checked(tell=lambda given, error: tell_ranks(given["self"], error))


@checked(tell=_tell, nodes=integer(0), max_bytes=integer(1), device=known_device)
class SwitchableModel:
    """Runs whole layers under one of several strategies at a time (HotSPa); collective, as all of its methods.

    ::

        model = SwitchableModel(layers, strategies=[Strategy(dp=4), Strategy(tp=4)], process_group=dist.group.WORLD)
        optimizer = torch.optim.AdamW(model.parameters())
        ...
        model.switch_to(model.strategies[1])  # and forwards and backwards of model.stage_layers
        model.collect()
        optimizer.step()

    The optimizer steps the parameters of **the optimizer's strategy**, and its state stays there. Within a step the
    weights travel from strategy to strategy, and each one's gradients to the optimizer's strategy, where they are
    added. Between switches each rank holds one set of weights: its part under the strategy in force.

    Gradients are added, never averaged: a loss is a sum over tokens, divided by the tokens of the whole mini-batch.
    Under (dp, tp, pp) every rank has the gradients of its own part of the model and of its replica's sequences only.

    Args:
        layers: [L] whole layers, built alike on all ranks, called ``layer(x, packed)``. They stay as they are, and are
            not needed any more: to hold no whole model, give layers on meta, and ``initialize``.
        strategies: under which it will run; more come with :meth:`add`. The same on all ranks.
        process_group: of all ranks of the job (or a one-dimensional ``DeviceMesh``), those that a strategy leaves out
            included.
        optimizer_strategy: where the optimizer's state is; None for the first strategy.
        segments: ``segments(number, layer)`` tells which linear layers are divided; None asks each layer's method
            ``segments``, if it has one.
        initialize: ``initialize(number, layer)`` fills a layer's parameters and buffers, alike on all ranks. Only
            layers on meta are given to it.
        device: of the weights; None for that of the first parameter, or the CPU for layers on meta.
        nodes: [R] on which node each rank is, as switches prefer links inside nodes; None asks for host names.
        max_bytes: of the messages that a rank sends and receives at once.
        compute_dtype: in which layers compute and weights travel, such as ``torch.bfloat16``: mixed precision. The
            parameters stay as they are, under the optimizer's strategy, as master weights; gradients are added to
            theirs, in their type, after each backward. None: everything is in the type of the parameters.
        gradient_dtype: in which gradients travel between strategies; None for that of the parameters. Each replica's
            sum is rounded once, and sums are added in the type of the parameters: of bfloat16 with a relative error
            of 2⁻⁸ of each sum at most.

    Attributes:
        strategies: all that it may run under.
        optimizer_strategy, current: the strategy of the optimizer, and the one in force.
        tensors: [P], of the undivided model.
        rank: of this process within the group.
        one_thread: entered by who makes collective calls: a RuntimeError where another thread of this rank does.
        failure: what ended a step under way, told by who runs it; None if nothing did, and after :meth:`abandon`.

    Raises:
        ValueError: for strategies that do not fit the ranks or layers, tied parameters that are divided, buffers with
            state, layers inside DistributedDataParallel or FSDP, segments and types that do not fit; see
            :class:`~zeroresize.strategy.placement.whole_layers.WholeLayers`.
        RuntimeError: if ranks differ in what they were given, the weights included, if one fails, or does not come.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.ModuleList | nn.Sequential,
        *,
        strategies: Iterable[Strategy],
        process_group: ProcessGroup | DeviceMesh | None = None,
        optimizer_strategy: Strategy | Sequence[int] | Mapping[str, Any] | None = None,
        segments: SegmentsOf | None = None,
        initialize: Initialize | None = None,
        device: torch.device | str | int | None = None,
        nodes: Sequence[int] | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        compute_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.process_group = require_group(process_group or dist.group.WORLD)
        self.rank = group_rank(self.process_group)
        self.device = _device_of(layers, device)
        meet = meet_over(self.process_group, self.device)
        self._job = Participants(self.process_group, self.device, meet)
        self.one_thread = OneThread(meet)
        self._max_bytes, types = max_bytes, TravelTypes(compute_dtype, gradient_dtype)
        num_ranks = group_size(self.process_group)

        def checked() -> tuple[WholeLayers, dict[Strategy, Layout]]:
            wanted = [*strategies, *([] if optimizer_strategy is None else [optimizer_strategy])]
            whole = WholeLayers([*layers], segments, compute_dtype)
            if gradient_dtype is not None and not gradient_dtype.is_floating_point:
                raise ValueError(f"gradient_dtype={gradient_dtype} is not allowed: a type such as torch.bfloat16 is")
            if not wanted:
                raise ValueError("strategies=[]: at least one is needed")
            specs = [tensor.spec for tensor in whole.tensors]
            different = dict.fromkeys(map(Strategy.of, wanted))
            return whole, {way: way.layout(specs, num_ranks, whole.num_layers) for way in different}

        self._layers, layouts = make_alike(
            meet,
            checked,
            lambda given: [
                [[asdict(tensor.spec), str(tensor.dtype)] for tensor in given[0].tensors],
                given[0].ties,
                [strategy.as_dict() for strategy in given[1]],
                optimizer_strategy and Strategy.of(optimizer_strategy).as_dict(),
                [max_bytes, str(compute_dtype), str(gradient_dtype)],
            ],
            "the layers, the strategies, the optimizer's strategy, max_bytes, compute_dtype or gradient_dtype",
        )
        self._nodes = _nodes_of(self._job, nodes)
        self._placements = Placements(self._layers, self._nodes, self._job, max_bytes, types)
        self._switcher = Switcher(self._placements, self._job)
        self.optimizer_strategy = self.current = (
            next(iter(layouts)) if optimizer_strategy is None else Strategy.of(optimizer_strategy)
        )
        self.failure: str | None = None
        weights = self._first_weights(layouts[self.optimizer_strategy], initialize)
        self._placements.place(layouts)
        self._optimizer_placement.fill_masters(weights)

    def _first_weights(self, layout: Layout, initialize: Initialize | None) -> dict[int, Tensor]:
        """This rank's part of the weights that the layers were given, by the number of the tensor; collective."""
        parts: dict[int, Tensor] = {}
        digest = 0

        def take(number: int, tensor: WholeTensor, whole: Tensor) -> None:
            nonlocal digest
            digest = zlib.crc32(whole.detach().reshape(-1).view(torch.uint8).cpu().numpy().data, digest)
            if position is not None and stages[tensor.spec.layer] == position.stage:
                parts[number] = tensor.part_of(whole, layout.units_of(number, self.rank)).to(self.device)

        strategy = self.optimizer_strategy
        position, stages = strategy.position_of(self.rank), strategy.partition(self.num_layers).stages
        make_alike(
            self._job.meet,
            lambda: self._layers.take_weights(self.device, initialize, take),
            lambda _: digest,
            "the weights that the layers were given: call torch.manual_seed alike on all ranks before they are filled",
        )
        return parts

    @property
    def strategies(self) -> list[Strategy]:
        """Return all strategies that it may run under."""
        return list(self._placements)

    @property
    def tensors(self) -> list[TensorSpec]:
        """Return [P] the names, shapes and divisions of the undivided model's tensors."""
        return [one.spec for one in self._layers.tensors]

    @property
    def ties(self) -> list[list[int]]:
        """Return the numbers of tensors that are one parameter, of which each of several layers has a copy."""
        return self._layers.ties

    @property
    def num_layers(self) -> int:
        """Return L."""
        return self._layers.num_layers

    @property
    def whole_layers(self) -> list[nn.Module]:
        """Return [L] the undivided layers, with parameters on meta: for shapes."""
        return self._layers.on_meta

    @property
    def nodes(self) -> list[int]:
        """Return [R] on which node each rank is."""
        return list(self._nodes)

    @property
    def position(self) -> Position | None:
        """Return this rank's place in the strategy in force; None where it is left out."""
        return self._placements[self.current].position

    @property
    def stage_layers(self) -> dict[int, nn.Module]:
        """Return the layers of this rank's stage in the strategy in force, by their numbers in ascending order.

        In mixed precision those of the optimizer's strategy are cast from the master weights here, where they were not
        since :meth:`drop_copies`.
        """
        placement = self._placements[self.current]
        if placement is self._optimizer_placement:
            placement.cast()
        return placement.stage_layers

    @property
    def held_bytes(self) -> int:
        """Return the bytes of parameters and gradients that this rank holds now."""
        return held_bytes(list(self._placements.values()))

    def layout_of(self, strategy: Strategy) -> Layout:
        """Return what every rank holds under a strategy."""
        return self._placements[strategy].layout

    def groups_of(self, strategy: Strategy) -> RankGroups:
        """Return the process groups of a strategy that this rank is in."""
        return self._placements[strategy].groups

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's part under the optimizer's strategy, by the names of the undivided model.

        They stay the same objects until :meth:`move_optimizer`. Their weights are there while the optimizer's strategy
        is in force.
        """
        for number, parameter in self._optimizer_placement.masters.items():
            yield self._layers.tensors[number].spec.name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of :meth:`named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    @by_one_thread
    @_checked_on_all
    def switch_to(self, strategy: Strategy, *, gradients: bool = True, in_background: bool = False) -> SwitchReport:
        """Go on under another strategy, within an optimizer's step (HotSPa, Algorithm 1 plans who sends what).

        The gradients under the strategy that is left travel to the optimizer's strategy and are added there, and the
        weights travel to the next one. A parameter without a gradient counts as one with zeros.

        All or nothing: old weights stay until every rank has all of its new ones. After an error the weights are as
        they were; where one came while messages were on their way, what gradients of the step the optimizer's strategy
        has is not complete, so the step is to be repeated.

        Args:
            gradients: False where nothing was computed but evaluations: no gradients travel, and to the optimizer's
                strategy it is :meth:`drop_copies` besides.
            in_background: whether gradients travel beside what is trained next, until the next switch waits for them,
                and reports and raises what became of them. Where memory does not suffice they travel now.

        Raises:
            ValueError: for a strategy that the model was not given, and without ``gradients`` where there are some; the
                other ranks raise a RuntimeError.
            NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
            RuntimeError: on every rank that lives, if ranks differ in the switch, or one dies or fails; it names them.
        """
        report = self._switcher.switch(
            self._placements[self.current],
            strategy,
            self._optimizer_placement,
            gradients=gradients,
            in_background=in_background,
        )
        self.current = strategy
        if not gradients and self._placements[strategy] is self._optimizer_placement:
            self._let_go_of_casts()
        return report

    def drop_copies(self) -> None:
        """Leave no copies of the weights on this rank: what computes next, computes with what the parameters hold then.

        These are the casts of mixed precision, and what :meth:`prefetch` has sent. Whoever changes parameters in place,
        as a checkpoint does that is loaded, and computes by himself calls it first, on every rank, between two steps:
        :meth:`collect`, :meth:`abandon`, :meth:`move_optimizer` and trainers do so by themselves.
        """
        self._switcher.discard_coming()
        if self._placements[self.current] is self._optimizer_placement:
            self._let_go_of_casts()

    @by_one_thread
    @checked()
    def prefetch(self, strategy: Strategy) -> bool:
        """Let the weights travel to a strategy from now on, beside what is trained until :meth:`switch_to` it.

        A rank holds two sets of weights then. Messages have a process group and a thread of their own, on a GPU also
        a stream. What came for another strategy than the next one is dropped.

        Returns:
            Whether they travel; where memory does not suffice on some rank they will at the switch.

        Raises:
            ValueError: for a strategy that the model was not given; the other ranks raise a RuntimeError.
            RuntimeError: if ranks differ in the strategy, or one does not come. That one dies later is told by
                ``switch_to``.
        """
        is_cast_there = self._optimizer_placement.is_mixed and strategy in self._placements
        if is_cast_there and self._placements[strategy] is self._optimizer_placement:
            return True  # nothing travels: weights are cast there
        if self._placements[self.current] is self._optimizer_placement:
            self._optimizer_placement.cast()
        return self._switcher.prefetch(self._placements[self.current], strategy, self._optimizer_placement)

    @by_one_thread
    def collect(self) -> SwitchReport:
        """End a step: weights and gradients go to the optimizer's strategy, and gradients are summed over its replicas.

        And those of tied parameters over their layers, each of which has a copy, bitwise alike. Then
        ``optimizer.step()`` may follow; a second time before gradients are zeroed it would sum sums again.

        Raises:
            Exception: as :meth:`switch_to`.
        """
        begin = time.perf_counter()
        report = self.switch_to(self.optimizer_strategy)
        self._let_go_of_casts()  # the optimizer's step makes them stale
        self._optimizer_placement.sum_gradients()
        self._optimizer_placement.sum_ties(self.ties, self.optimizer_strategy.partition(self.num_layers).stages)
        return replace(report, seconds=time.perf_counter() - begin)

    @by_one_thread
    def abandon(self) -> SwitchReport:
        """Give up the step under way: its gradients are dropped, and the weights go to the optimizer's strategy.

        It goes on after a step that failed on *all* ranks alike. Where one rank failed alone, the others may be in the
        midst of the step: then that process has to exit, so that they notice.

        Raises:
            Exception: as :meth:`switch_to`; the gradients are gone even so.
        """
        self._switcher.discard()
        self.drop_gradients()
        report = self.switch_to(self.optimizer_strategy, gradients=False)
        self.failure = None
        return report

    def drop_gradients(self) -> None:
        """Leave no gradients on this rank, of whatever strategy."""
        for placement in set(self._placements.values()):
            placement.drop_gradients()

    @by_one_thread
    def move_optimizer(self, strategy: Strategy, optimizer: object | None) -> SwitchReport:
        """Make another strategy the optimizer's, between two steps, with all that the optimizer keeps.

        State tensors of a parameter's shape travel with its weights, numbers such as the step are told, all bit for
        bit. :meth:`parameters` are then those under the new strategy, in the same parameter groups of the optimizer. A
        rank the optimizer's strategy leaves out has none: its optimizer has empty groups, as ``AdamW([{"params":
        []}])`` makes.

        All or nothing, as :meth:`switch_to`.

        Args:
            strategy: one of the model's; it may be on other ranks.
            optimizer: the only one that steps the parameters, with groups of equal settings on all ranks; None for
                none.

        Raises:
            ValueError: for a strategy that the model was not given, within a step (``collect`` comes before), where
                gradients are left (``zero_grad``), and for an optimizer that is a wrapper, steps other parameters,
                keeps what cannot move or sees whole matrices the optimizer's strategy divides; the other ranks raise a
                RuntimeError. On all ranks for tied tensors in parameter groups of different settings.
            NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
            RuntimeError: on every rank that lives, if ranks differ in the strategy, the groups' settings, or the state
                of what they share, or one dies or fails.
        """
        begin, held = time.perf_counter(), self.held_bytes
        before = self._optimizer_placement

        def make() -> OptimizerMove:
            if self.current != self.optimizer_strategy:
                raise ValueError(
                    f"the optimizer's strategy cannot change while {self.current} is in force: call collect() before"
                )
            require_divisible(optimizer, strategy, dict(self.named_parameters()), self.tensors)
            after = self._placements[strategy]
            where = self.process_group, self.device
            move = OptimizerMove(strategy, before, after, optimizer, self._nodes, *where, self._max_bytes)
            nonlocal held
            held += move.held_bytes
            return move

        if self.ties:
            _, table = agreed(self._job.meet, lambda: settings_of_ties(self, optimizer), list, what="the optimizer")
            require_equal_settings(self, table)
        move = run_transaction(make, self._job)
        self.optimizer_strategy = self.current = strategy
        self.drop_copies()
        return SwitchReport(peak_bytes=held + move.needed_bytes, **move.figures(begin))

    @by_one_thread
    @_checked_on_all
    def add(self, strategy: Strategy) -> None:
        """Take a further strategy, to which a later :meth:`switch_to` may go, until :meth:`forget`.

        Where its shares come to the same units as those of one that the model has, both are one: nothing is made.

        Raises:
            ValueError: for one that does not fit the ranks or layers.
            RuntimeError: if ranks differ in it, or one does not come.
        """
        self._placements.add(strategy)

    @by_one_thread
    @_checked_on_all
    def forget(self, strategy: Strategy) -> None:
        """Give up a strategy, with the process groups, modules and plans that no other one needs.

        Raises:
            ValueError: for a strategy that the model does not have, the optimizer's, and the one in force; the other
                ranks raise a RuntimeError.
            RuntimeError: if ranks differ in it, or one does not come.
        """
        self._placements.forget(strategy, {self.optimizer_strategy, self.current})

    def close(self) -> None:
        """Destroy the process groups of all strategies, on all ranks; the model is not to be used after that.

        Raises:
            RuntimeError: if a rank does not come.
        """
        make_alike(self._job.meet, lambda: None, lambda _: "close", "whether the model is closed")
        self._switcher.close()
        self._placements.close()

    @property
    def _optimizer_placement(self) -> Placement:
        return self._placements[self.optimizer_strategy]

    def _let_go_of_casts(self) -> None:
        if self._optimizer_placement.is_mixed:
            self._optimizer_placement.let_go()


def _nodes_of(job: Participants, nodes: Sequence[int] | None) -> list[int]:
    """[R] on which node each rank is: ``nodes``, or by the ranks' host names if they are None; collective."""
    num_ranks = group_size(job.process_group)

    def checked() -> list[int]:
        if nodes is not None and len(nodes) != num_ranks:
            raise ValueError(f"nodes={list(nodes)}: one number for each of the {num_ranks} ranks is needed")
        return list(nodes or ())

    given = make_alike(job.meet, checked, list, "nodes")
    if given:
        return given
    names = list(gather_texts(socket.gethostname(), job.meet, job.process_group, job.message_device))
    return [names.index(name) for name in names]


def require_divisible(
    optimizer: object | None,
    optimizer_strategy: Strategy,
    parameters: Mapping[str, Tensor],
    tensors: Sequence[TensorSpec],
) -> None:
    """Check that steps on the parts under the optimizer's strategy are those on the undivided model.

    Args:
        parameters: that this rank steps now, by name.
        tensors: of the undivided model.

    Raises:
        ValueError: if the optimizer does not step all parameters that want gradients; if its strategy divides tensors
            and it does not treat them element by element, or it has tensors on several ranks and the optimizer does not
            treat them one by one.
    """
    require_stepping(optimizer, parameters)
    if optimizer is None:
        return
    divided = {tensor.name for tensor in tensors if tensor.division is not None}
    reason = None
    if optimizer_strategy.tp > 1:
        reason = why_not_elementwise(
            optimizer, [parameter for name, parameter in parameters.items() if name in divided]
        )
    if reason is None and optimizer_strategy.pp > 1:
        reason = why_not_by_parameter(optimizer, parameters.values())
    if reason is not None:
        raise ValueError(
            f"the optimizer's strategy {optimizer_strategy} divides what it steps, but {reason}. Or choose "
            "another optimizer_strategy="
        )


def settings_of_ties(model: SwitchableModel, optimizer: Any) -> list[float]:
    """Return a number for the optimizer's settings of each tensor of each tie: 0.0 for one that is not here."""
    groups = zip(settings_of(optimizer), getattr(optimizer, "param_groups", ()), strict=True)
    texts = {id(each): json.dumps(settings) for settings, group in groups for each in group["params"]}
    here = {name: fingerprint(texts.get(id(parameter), "")) for name, parameter in model.named_parameters()}
    return [here.get(model.tensors[number].name, 0.0) for tie in model.ties for number in tie]


def require_equal_settings(model: SwitchableModel, table: Sequence[Sequence[float]]) -> None:
    """Raise a ValueError that names copies of one parameter whose :func:`settings_of_ties` on all ranks differ."""
    columns = zip(*table, strict=True)
    for tie in model.ties:
        if len({number for column in itertools.islice(columns, len(tie)) for number in column} - {0.0}) > 1:
            names = ", ".join(model.tensors[number].name for number in tie)
            raise ValueError(
                f"{names} are one parameter, and steps of the optimizer would take its copies apart: put them into "
                "parameter groups with equal settings, such as weight_decay, or into one"
            )

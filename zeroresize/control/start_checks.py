"""Ranks that hold different copies of a weight, add up only parts of its gradient, or are given other batches train
something else, and nothing fails: so all that is compared, at the start and now and then.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.checks.replicated import (
    differing_gradients,
    distance_of_sums,
    key_of_parameter,
    replicated_parameters,
    sums_of_parameters,
)
from zeroresize.comm.collectives import group_rank
from zeroresize.comm.exchange import Exchange
from zeroresize.control.seen_batches import Difference, SeenBatches
from zeroresize.control.setup import HINT, MOST_NAMED, Layers, check_data_parallelism
from zeroresize.optim.optimizers import hook_steps, stepped_gradients, torch_optimizer
from zeroresize.resharding.segments.search_segments import first_of
from zeroresize.utils.texts import minority, named_ranks

logger = logging.getLogger(__name__)

#: Of its norm: what two ranks' copies of a parameter may differ by in sum. Rounding in another order, as atomic
#: additions on a GPU do it, stays below over a long training; other seeds, or another checkpoint, are far above.
_TOLERANCE = 1e-3
#: Of its norm, times the machine epsilon and the root of the steps: what rounding adds to that at most, as it adds up
#: like a random walk. A gradient that is scaled by other factors on other ranks is above after a few steps.
_ROUNDINGS = 8.0
#: Copies are compared again after so many steps, whenever their number has doubled, and after so many at the latest.
_FIRST_STEP, _MOST_STEPS = 10, 1000
#: In so many steps gradients are looked for: the first may be skipped, or make them within itself.
_MOST_TRIES = 10
#: Of its norm: what a gradient may differ by in sum. Devices differ in more than last bits where some multiply in TF32.
_GRADIENT_TOLERANCE = 1e-2
#: Packages whose steps take gradients as they are, and sum none over ranks before.
_STEPPING = ("torch", "colossalai", "accelerate", "transformers", "zeroresize")
_IN_STEP = ". All is well if the optimizer's step, which is not a known one, does so itself"
_DRAW_ALIKE = (
    "Draw alike what is random before it, for which one seed does not suffice where devices are of several models; "
    "zeroresize.check_parallel names the cause"
)
_OTHER_CAUSES = ", unless the targets, or what is random outside of the layers, differ between the ranks"
#: Of one rank's parameter the sums of its elements, plain and by place, and its norm; None where it has none such.
_Sums = Sequence[float] | None


class StartCheck:
    """Compares what the ranks of a group should hold alike: in the first training forward, until which a model may be
    loaded; gradients before the first optimizer step changes weights; and at updates, with which copies of a parameter
    may have drifted apart. What enters the model, and the layers, travels along.

    Compared are the parameters that are no shards, by a few sums of each. Left out is what may be a shard: parameters
    of modules that hold a process group, those that a framework has marked (``dist_layout``,
    ``tensor_model_parallel``), and those whose shapes differ between the ranks.

    Attributes:
        why_units_stay: why no unit may leave its home now, as it would compute with something else on another rank;
            None where it may.
    """

    def __init__(
        self, model: nn.Module, layers: Layers, optimizer: Any, process_group: ProcessGroup, exchange: Exchange
    ) -> None:
        self._model, self._layers, self._group, self._exchange = model, layers, process_group, exchange
        self._optimizer = optimizer
        self.why_units_stay: str | None = None
        self._at_start: dict[str, list[float]] | None = None
        self._next_step, self._num_tries_left = _FIRST_STEP, 0
        self._has_begun = self._has_stepped = False
        self._warned: set[str] = set()
        self._first = next(iter([*(name for name, layer in layers.items() if layer.is_column_parallel), *layers]))
        self._batches = SeenBatches(model, self._first, len(exchange.ranks))
        self._undo = ExitStack()
        self._undo.callback(self._batches.unhook)
        for name, layer in layers.items():
            if layer.is_column_parallel or name == self._first:
                layer.watch_start = _calling(weakref.WeakMethod(self._layer_begins), name)
                self._undo.callback(setattr, layer, "watch_start", None)
        self.close = weakref.finalize(self, self._undo.close)
        self.close.atexit = False

    def _layer_begins(self, name: str, x: Tensor) -> None:
        self._batches.layer_begins(name, self._layers[name], x)
        if name == self._first and not self._has_begun:
            self._training_begins()

    def _training_begins(self) -> None:
        self._has_begun = True
        with suppress(ValueError):  # a wrapper that hides its optimizer
            # Only now, so that the hooks of others that reduce gradients are called before it.
            self._undo.callback(hook_steps(self._optimizer, self._before_step))
            self._num_tries_left = _MOST_TRIES
        check_data_parallelism(self._model, self._layers, self._group)
        replicated, sums, other_batches = self._gathered()
        self._at_start = _distances(sums)
        differing = {
            name: _description(sums[name], _TOLERANCE)
            for name, of_ranks in self._at_start.items()
            if max(of_ranks) > _TOLERANCE
        }
        if differing:
            raise ValueError(
                f"{len(differing)} of {len(replicated)} parameters that all ranks of the group should hold alike "
                f"differ between the ranks: {_named(differing)}. Seed the "
                "ranks alike before the model is built, or load the same checkpoint on all. A shard of a layer of "
                f"your own is left out where its parameter has tensor_model_parallel=True; {HINT}"
            )
        self._judge_batches(other_batches)

    def step_is_called(self, num_steps: int) -> None:
        """Note the call of ``balancer.step()`` that ends so many steps."""
        if not self._has_stepped:
            self._compare_gradients(steps=False)  # whoever skipped a first step meets the others here
        self._has_stepped = False
        self._batches.is_due = self._num_tries_left > 0 or self._next_step <= num_steps + 1

    def after_update(self, num_steps: int) -> None:
        """Warn, once and on rank 0, of copies that have drifted apart since the start; collective, if it is due."""
        at_start = self._at_start
        if at_start is None or num_steps < self._next_step:
            return
        self._next_step = min(2 * num_steps, num_steps + _MOST_STEPS)
        replicated, sums, other_batches = self._gathered()
        drifted = {}
        for name, of_ranks in _distances(sums).items():
            before = at_start.get(name, [0.0] * len(of_ranks))
            rounding = _ROUNDINGS * torch.finfo(replicated[name].dtype).eps * math.sqrt(num_steps)
            most = min(rounding, _TOLERANCE)
            if max(now - then for now, then in zip(of_ranks, before, strict=True)) > most:
                drifted[name] = _description(sums[name], most)
        self._note_inputs(other_batches)
        if other_batches.batches:
            self._warn("batches", f"step {num_steps}: {other_batches.batches}; {HINT}")
        elif drifted:
            self._warn(
                "drift",
                f"step {num_steps}: {len(drifted)} of {len(replicated)} parameters that all ranks of the group hold "
                f"alike have drifted apart, so the ranks train different models: {_named(drifted)}. Give every rank "
                "of the group the same batches (samplers divide them over data-parallel ranks only), clip gradients "
                "by zeroresize.clip_grad_norm_ (torch's takes a rank's own shards), step on all ranks or on none "
                "where a gradient scaler skips steps, and draw alike what is random outside of the parallel layers; "
                f"{HINT}",
            )

    def _before_step(self) -> None:
        self._has_stepped = True
        self._compare_gradients(steps=True)

    def _compare_gradients(self, *, steps: bool) -> None:
        """Raise a ValueError on all ranks if gradients of what is replicated differ; collective."""
        if not self._num_tries_left:
            return
        self._num_tries_left -= 1
        _, gathered, other_batches = self._gathered(
            lambda replicated: stepped_gradients(self._optimizer, replicated) if steps else {}
        )
        self._judge_batches(other_batches)
        sums = {name: of_ranks for name, of_ranks in gathered.items() if any(of_ranks)}
        numbers = [number for of_ranks in sums.values() for each in of_ranks for number in each or ()]
        if not all(map(any, zip(*sums.values(), strict=True))) or not sums or not all(map(math.isfinite, numbers)):
            return  # some rank skips this step, or is about to
        self._num_tries_left = 0
        differing, is_certain = differing_gradients(
            {name: [each or (0.0, 0.0, 0.0) for each in of_ranks] for name, of_ranks in sums.items()},
            max(_GRADIENT_TOLERANCE, self._batches.rounding),
        )
        if differing:
            module = getattr(torch_optimizer(self._optimizer).step, "__module__", None)
            is_known = str(module).partition(".")[0] in _STEPPING
            cause = (
                f"For {self.why_units_stay}. {_DRAW_ALIKE}"
                if self.why_units_stay is not None and not is_certain
                else "Each is a part of a sum, as its layer works on what is divided over the ranks"
                f"{'' if is_certain else _OTHER_CAUSES}. Sum it over the group once a step, behind the last backward "
                "and before clipping, and the gradient of its layer's whole input in every backward; or divide the "
                f"layer as those beside it{'' if is_known else _IN_STEP}"
            )
            self._judge(
                f"the gradients of {len(differing)} of {len(sums)} parameters that all ranks of the group hold alike "
                f"differ between the ranks in the first optimizer step: {first_of(differing)}. {cause}",
                is_certain,
                only_warns=not is_known,
            )

    def _judge_batches(self, difference: Difference) -> None:
        self._judge(difference.batches, difference.is_certain, difference.only_warns)
        self._note_inputs(difference)

    def _note_inputs(self, difference: Difference) -> None:
        """Let units stay where replicated activations differ, until they are seen to be alike again."""
        names = difference.within
        self.why_units_stay = None
        if names:
            self.why_units_stay = (
                f"activations that all ranks of the group should have alike differ between them: {first_of(names)}"
            )
            self._warn("inputs", f"{self.why_units_stay}. No unit leaves its home. {_DRAW_ALIKE}; {HINT}")

    def _judge(self, difference: str, is_certain: bool, only_warns: bool = False) -> None:
        """Raise an error; or warn, where dropout that is drawn otherwise on each rank, as in some hosts, may be why."""
        if difference and only_warns:
            self._warn(difference[:40], f"{difference}; {HINT}")
        elif difference and not is_certain and any(map(_drops, self._model.modules())):
            self._warn(difference[:40], f"{difference}; dropout outside of the layers must be drawn alike, too; {HINT}")
        elif difference:
            raise ValueError(f"{difference}; {HINT}")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned and group_rank(self._group) == 0:
            logger.warning("%s", text)
        self._warned.add(kind)

    def _gathered(
        self, of: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, list[_Sums]], Difference]:
        """Return the replicated parameters, every rank's sums of each, or of a tensor ``of`` each, and how their
        batches differ; collective."""
        replicated = dict(replicated_parameters(self._model, self._group))
        tensors = replicated if of is None else of(replicated)
        keys = {name: key_of_parameter(name, parameter) for name, parameter in replicated.items()}
        rows = [[keys[name], *row[1:]] for name, row in zip(tensors, sums_of_parameters(tensors), strict=True)]
        numbers_of_rank = [number for row in rows for number in row] + self._batches.take()
        tables = [
            {numbers[at]: numbers[at + 1 : at + 4] for at in range(0, len(numbers), 4)}
            for numbers in self._exchange.gather(numbers_of_rank)
        ]
        sums: dict[str, list[_Sums]] = {name: [table.get(key) for table in tables] for name, key in keys.items()}
        return replicated, sums, self._batches.difference(tables)


def _distances(sums: Mapping[str, Sequence[_Sums]]) -> dict[str, list[float]]:
    """Return by how much each rank's parameters differ from rank 0's, by name."""
    return {
        name: [distance_of_sums(of_rank, of_ranks[0]) for of_rank in of_ranks]
        for name, of_ranks in sums.items()
        if of_ranks[0] is not None
    }


def _description(sums: Sequence[_Sums], most: float) -> str:
    """Tell which ranks hold a parameter alike: the few that differ from the many, or what each of them has."""
    groups: list[tuple[Sequence[float], list[int]]] = []
    for rank, of_rank in enumerate(sums):
        if of_rank is None:
            continue
        known = next((ranks for of_first, ranks in groups if distance_of_sums(of_rank, of_first) <= most), None)
        if known is None:
            groups.append((of_rank, [rank]))
        else:
            known.append(rank)
    few = minority([ranks for _, ranks in groups])
    if few:
        return f"on {named_ranks(few)}, other than on most ranks"
    digests = [
        f"{named_ranks(ranks)}: sum {total:.8g} and norm {norm:.8g}" for (total, _, norm), ranks in groups[:MOST_NAMED]
    ]
    return f"({', '.join(digests)}{', …' if groups[MOST_NAMED:] else ''})"


def _named(differing: Mapping[str, str]) -> str:
    differences = [f"{name} {description}" for name, description in list(differing.items())[:MOST_NAMED]]
    return f"{'; '.join(differences)}{'; …' if len(differing) > MOST_NAMED else ''}"


def _calling(method: weakref.WeakMethod[Any], name: str) -> Any:
    return lambda x: None if (alive := method()) is None else alive(name, x)


def _drops(module: nn.Module) -> bool:
    """Whether it drops something now."""
    rate = getattr(module, "p", getattr(module, "drop_prob", None))
    return module.training and "drop" in type(module).__name__.lower() and bool(rate)

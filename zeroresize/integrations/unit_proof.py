"""The numerical proof that nothing between a segment's layers mixes units.

What lies between is computed twice, from the same numbers in float64 in place of the column-parallel layers' outputs:
of some units, and of a few of these in another order. Each unit must have the same result and the same gradient both
times. Nothing is sent, and what the model holds is put back. That heads may be divided is proven likewise: of some
tokens and of all others, results and gradients must sum up to those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroresize.integrations.changed_modules import own_hooks_off
from zeroresize.integrations.lora import wrappers_in
from zeroresize.integrations.module_state import in_mode, nothing_kept
from zeroresize.layers.divided_heads import Division, marked, whole_heads
from zeroresize.layers.shared_rows import Span
from zeroresize.utils.torch_private import gradients_within_modes, is_compiled_module

#: How many units there are, and which of them remain, in which order.
NUM_UNITS, KEPT = 12, (7, 2, 3, 11, 5)
#: Dimensions before the features.
_BATCH = (2, 3)
#: Of so many tokens, those of which two ranks compute heads: all of a sequence are one's, of the other both have some.
_NUM_TOKENS, _SPANS = 6, ((0, 5), (5, 6))
#: Of the largest element: more than rounding makes where something computes in float32 whatever it is given.
_TOLERANCE = 1e-5
#: Of a layer's output, or input: how many features a unit has in each of its parts.
Rows = tuple[int, ...]
#: What runs a module on x, and what tells it of its units.
Call = Callable[[Tensor], object]
Tell = Callable[[list[int]], object]


class MixesUnitsError(Exception):
    """Raised where units are not independent of each other; the reason is its text."""


class _Reached(Exception):
    """Raised by the row-parallel layer, behind which nothing is of interest."""


class Stimulus:
    """Stands for what the column-parallel layers return, and records what reaches the row-parallel one.

    Args:
        columns: the column-parallel layers, with their rows.
        row, num_rows: the row-parallel layer, and how many features of a unit it reads.
        units: that are there.
        times: how often each unit of a layer is returned, one after the other; once where none is told.
        span: of which tokens units are computed.
        shared: the layers that compute all tokens of a sequence, where it is not of all.

    Attributes:
        division: of the units among ranks, one of which this is.
        results: the row-parallel layer's inputs, each followed by the gradients of the outputs so far, with their rows.
        elsewhere: what else was computed with, where a forward is traced; units must have no part in it.
        is_in_backward: whether a gradient is computed, for which activation checkpointing may compute again.
    """

    def __init__(
        self,
        columns: Mapping[Any, Rows],
        row: Any,
        num_rows: int,
        units: Sequence[int],
        times: Mapping[Any, int] | None = None,
        span: Span = (0, _NUM_TOKENS),
        shared: Collection[Any] = (),
    ) -> None:
        self.columns, self.row, self.units, self._rows, self._times = columns, row, units, (num_rows,), times or {}
        self.device = torch.device("cpu") if row.weight.is_meta else row.weight.device
        self.results: list[tuple[Tensor, Rows]] = []
        self.elsewhere: list[Tensor] = []
        *of_layers, weights = map(
            self._of_units, (*columns.values(), self._rows), _drawn((*columns.values(), self._rows))
        )
        self._drawn, self._weights = dict(zip(columns, of_layers, strict=True)), weights
        self.division, self._shared = Division(((span,),) * len(units), _NUM_TOKENS, _NUM_TOKENS), shared
        tokens = torch.arange(_NUM_TOKENS, device=self.device).view(*_BATCH, 1)
        self._is_here = (tokens >= span[0]) & (tokens < span[1])
        self.begin()

    def begin(self) -> None:
        """Begin another forward."""
        self._outputs: list[tuple[Tensor, Rows]] = []
        self.is_in_backward = False

    def output_of(self, layer: Any) -> Tensor:
        """Return numbers in place of a column-parallel layer's output, alike in every call."""
        output = self._drawn[layer].clone().requires_grad_()
        if not self.is_in_backward:  # where activation checkpointing computes again
            self._outputs.append((output, self.columns[layer]))
        if layer in self._shared:
            return output * self._is_here.any(dim=1, keepdim=True)
        if self._shared:
            return marked(output * self._is_here, self.division)
        if layer not in self._times:
            return output
        return output.unflatten(-1, (len(self.units), -1)).repeat_interleave(self._times[layer], -2).flatten(-2)

    def record(self, x: Any) -> None:
        """Record the row-parallel layer's input, and gradients of a sum of it in which no two elements cancel."""
        weights, x = self._weights * self._is_here, whole_heads(x)
        if not isinstance(x, Tensor) or x.shape[-1] != weights.shape[-1] or x.numel() != weights.numel():
            what = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else "changed by other inputs, too"
            raise MixesUnitsError(f"for {len(self.units)} units what the row-parallel layer reads is {what}")
        outputs = [output for output, _ in self._outputs]
        with torch.enable_grad():  # x may be an output itself
            weighted_sum = (x * weights.view_as(x)).sum()
        if self.is_in_backward:
            return
        gradients: Sequence[Tensor | None] = [None] * len(outputs)
        if x.requires_grad:
            self.is_in_backward = True
            gradients = gradients_within_modes(weighted_sum, outputs)
            self.is_in_backward = False
        self.results.append((x.detach().reshape(weights.shape).double() * self._is_here, self._rows))
        for (output, rows), gradient in zip(self._outputs, gradients, strict=True):
            self.results.append((torch.zeros_like(output) if gradient is None else gradient, rows))

    def _of_units(self, rows: Rows, values: Tensor) -> Tensor:
        return values[..., _features_of(self.units, rows)].to(self.device)


@lru_cache(maxsize=16)
def _drawn(all_rows: tuple[Rows, ...]) -> tuple[Tensor, ...]:
    """Random numbers for features of units with so many rows, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(*_BATCH, NUM_UNITS * sum(rows)) for rows in all_rows]
    return tuple(2 * torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)


def require_unmixed(
    columns: Mapping[Any, Rows],
    row: Any,
    num_rows: int,
    compute: Callable[[Stimulus], object],
    times: Mapping[Any, int] | None = None,
) -> None:
    """Check that each unit has the same numbers, whichever other units there are.

    Args:
        times: of ``Stimulus``, by which the part of the units is computed.
    """
    whole, part = Stimulus(columns, row, num_rows, range(NUM_UNITS)), Stimulus(columns, row, num_rows, KEPT, times)
    compute(whole)
    compute(part)
    if not part.results or [rows for _, rows in whole.results] != [rows for _, rows in part.results]:
        raise MixesUnitsError("where there are fewer units the layers are called otherwise")
    is_alike = len(whole.elsewhere) == len(part.elsewhere) and all(map(torch.equal, whole.elsewhere, part.elsewhere))
    if not is_alike:
        raise MixesUnitsError("something else than the row-parallel layer reads what depends on the units")
    for (expected, rows), (values, _) in zip(whole.results, part.results, strict=True):
        difference = (expected[..., _features_of(KEPT, rows)] - values).abs().max()
        if not difference <= _TOLERANCE * max(1.0, float(values.abs().max())):  # so that NaN counts, too
            raise MixesUnitsError("a unit has other numbers where there are other units beside it")


class Between:
    """Runs what lies between a segment's layers with numbers, in training and in evaluation.

    Args:
        module: that holds it.
        columns, row, num_rows: as of :class:`Stimulus`.
        call: runs the module.
        tell: tells it of its units; None where it counts none.
        returned: makes of an output what a column-parallel layer returns.
    """

    def __init__(
        self,
        module: nn.Module,
        columns: Mapping[Any, Rows],
        row: Any,
        num_rows: int,
        call: Call,
        tell: Tell | None = None,
        returned: Call = lambda y: y,
    ) -> None:
        self._module, self._call, self._tell, self._returned = module, call, tell, returned
        self._columns, self._row, self._num_rows = columns, row, num_rows

    def require_unmixed(self, apart: tuple[Tell, Mapping[Any, int]] | None = None) -> None:
        """Check that it mixes no units.

        Args:
            apart: what tells it instead of fewer units, and how often layers then return each.
        """
        tell_part, times = apart or (self._tell, {})

        def compute(stimulus: Stimulus) -> None:
            self._compute(stimulus, self._tell if len(stimulus.units) == NUM_UNITS else tell_part)

        for training in (True, False):
            with in_mode(self._module, training):
                require_unmixed(self._columns, self._row, self._num_rows, compute, times)

    def computes_with_none(self) -> bool:
        """Return whether it computes with no units at all, as on a rank that has given all of them away."""
        stimuli = {training: self._stimulus(()) for training in (True, False)}
        for training, stimulus in stimuli.items():
            with in_mode(self._module, training), suppress(Exception):  # whatever its functions make of nothing
                self._compute(stimulus, self._tell)
        return all(stimulus.results for stimulus in stimuli.values())

    def require_divisible(self, shared: Collection[Any]) -> None:
        """Check that heads may be computed on several ranks, by each for some of the tokens.

        Args:
            shared: those of the column-parallel layers that compute keys and values.
        """
        units = range(NUM_UNITS)
        for training in (True, False):
            whole, *parts = self._stimulus(units), *(self._stimulus(units, span, shared) for span in _SPANS)
            with in_mode(self._module, training):
                for stimulus in (whole, *parts):
                    self._compute(stimulus, self._tell)
            if not all(part.division.was_attended for part in parts):
                raise MixesUnitsError("its attention is not torch's scaled_dot_product_attention")
            for (expected, _), *ones in zip(whole.results, *(part.results for part in parts), strict=True):
                difference = (expected - torch.stack([values for values, _ in ones]).sum(dim=0)).abs().max()
                if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
                    raise MixesUnitsError("a token has other numbers where others are computed elsewhere")

    def _stimulus(self, units: Sequence[int], span: Span = (0, _NUM_TOKENS), shared: Collection[Any] = ()) -> Stimulus:
        return Stimulus(self._columns, self._row, self._num_rows, units, span=span, shared=shared)

    def _compute(self, stimulus: Stimulus, tell: Tell | None) -> None:
        """Have the module compute from a stimulus, once it is told of its units."""

        def read(x: Any, *_: Any) -> None:
            stimulus.record(x)
            raise _Reached

        module, row, wrappers = self._module, self._row, wrappers_in(self._module)  # LoRA's add what is of the units
        x = torch.ones(*_BATCH, row.even_shape[0], dtype=torch.float64, device=stimulus.device)
        is_compiled = any(map(is_compiled_module, module.modules()))
        eagerly = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        kept = nothing_kept(module, but_for_attributes=True)
        gradients = torch.set_grad_enabled(module.training)
        with own_hooks_off(module), kept, gradients, eagerly, WatchedFunctions(_without_dropout):
            if tell is not None:
                tell(list(range(len(stimulus.units))))
            for layer in self._columns:
                vars(wrappers.get(layer, layer))["forward"] = lambda *_, layer=layer: self._returned(
                    stimulus.output_of(layer)
                )
            vars(wrappers.get(row, row))["forward"] = read
            with suppress(_Reached):
                self._call(x)


class WatchedFunctions(TorchFunctionMode):
    """Has ``call(function, args, kwargs)`` call every function of torch while its block lasts."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def _without_dropout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch so that it drops nothing."""
    if args and getattr(function, "__name__", "").strip("_").endswith("dropout"):
        return args[0]
    return function(*args, **(kwargs | {"dropout_p": 0.0} if "dropout_p" in kwargs else kwargs))


def _features_of(units: Sequence[int], rows: Rows) -> Tensor:
    """Which of ``NUM_UNITS * sum(rows)`` features belong to units, where parts lie one after another."""
    of_parts = []
    for part, size in enumerate(rows):
        begin = NUM_UNITS * sum(rows[:part])
        of_parts.append(begin + (torch.tensor(list(units)).long()[:, None] * size + torch.arange(size)).flatten())
    return torch.cat(of_parts)

"""check_parallel() tells whether a divided model computes what the undivided model does, and what is wrong if not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroresize.checks.apart import Apart, Loss, gradients_aside
from zeroresize.checks.divided import Part, group_of_model, parts_of
from zeroresize.checks.divided_batch import find_other_gradients
from zeroresize.checks.finding import (
    ACTIVATIONS,
    DRAWS,
    GRADIENTS,
    INPUTS,
    OF_GRADIENTS,
    REFERENCE,
    SUM,
    ParallelFinding,
    finding,
)
from zeroresize.checks.forward_checks import (
    find_cut_packed_weights,
    find_differing_activations,
    find_later_tokens,
    find_where_ranks_part,
    find_wrong_sums,
    how_much_later_tokens_change,
)
from zeroresize.checks.gradient_checks import (
    GradientCheck,
    find_backwards_that_do_not_add_up,
    find_broken_ties,
    find_other_norm,
    local_gradients,
)
from zeroresize.checks.recording import Numbers, Recorder, are_alike, are_all_alike, numbers_in
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.resharding.ranks import Ranks
from zeroresize.resharding.segments.in_float64 import require_replaceable
from zeroresize.utils.progress import Progress

logger = logging.getLogger(__name__)

#: Of models that see no later tokens, parts of their classes' names.
_CAUSAL = ("CausalLM", "LMHeadModel", "GPT")


def check_parallel(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor],
    *,
    reference: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: Any = None,
    clip: Callable[[Any], Any] | None = None,
    counts: Sequence[int] | None = None,
    counted: Callable[[Any], float] | None = None,
) -> list[ParallelFinding]:
    """Tell whether a model that is divided over ranks computes what the undivided model does: call it first where a
    loss looks odd.

    The model may be divided by torch's styles, transformers' plans, Colossal-AI, DeepSpeed or this package, converted
    or not. It computes some forwards and backwards in its present division, with copies of its parameters in float64,
    or in its own dtype where an operation has no float64. What must hold is compared between ranks, and gradients with
    derivatives that differences of the loss give; docs/checking.md lists what is found, how, and from which size on.

    Parameters, gradients, buffers, the optimizer, generators, hooks and training flags are bitwise as before when it
    returns, also by an error. Reducers of DistributedDataParallel do not run; hooks on parameters do. Needs memory for
    a copy in float64, and the time of about twelve forwards; where gradients are wrong, two more for each of the first
    200 parameters.

    Collective: call alike on every rank, in the mode (``train()``) in which the model trains, between two steps.

    Args:
        model: as it trains, in its host's wrapper if it has one.
        batch: what ``loss`` takes, the same on all ranks of the tensor-parallel group.
        loss: ``loss(model, batch)`` returns a scalar. It is called with the model without its wrappers.
        reference: the undivided model with the same weights, or a function that makes it; its loss and what its
            modules return are compared, too.
        optimizer: whose own clipping is checked where it has one (Colossal-AI's) and ``clip`` is not given.
        clip: ``clip(model)`` returns the host's total norm of the gradients that the model has; it may scale them.
        counts: [R] samples of each data-parallel rank, where each holds the whole model. Then ``batch`` is a global
            one, with these samples first in its tensors' shapes, and asked is alone whether the gradients of its parts
            are together those of the whole, as with :class:`zeroresize.DataBalancer`, divided like this or evenly.
        counted: of a part of the batch, what its loss is a mean over, as ``loss_scale`` takes it; None for samples.

    Returns:
        What is wrong, the same on every rank, and a warning in the log of the first rank for each; empty where
        nothing is. Of faults that follow from another one only that one is named: check again when it is mended.

    Raises:
        ValueError: on every rank, if the model's parameters are FSDP's, or if ``loss``, ``reference`` or ``clip``
            raises on some rank, with what it raised.
        RuntimeError: if a rank does not come.
    """
    inner: nn.Module = unwrap(model)
    require_replaceable(inner, "check_parallel")
    if not (reference is None or isinstance(reference, nn.Module) or callable(reference)):
        raise ValueError(f"check_parallel: reference={type(reference).__name__}: wanted is a module, or what makes one")
    tensors = [one for one in inner.parameters() if one.is_floating_point()]
    of_replicas = model.process_group if counts is not None and isinstance(model, DistributedDataParallel) else None
    ranks = Ranks(of_replicas or group_of_model(inner), tensors[0].device if tensors else torch.device("cpu"))
    if ranks.size == 1:
        logger.info("check_parallel: the process group has one rank, so there is nothing to check")
        return []
    arguments = ("reference", reference), ("clip", clip), (f"counts={counts}", counts), ("counted", counted)
    given = ranks.share([name for name, value in arguments if value is not None])
    if any(each != given[0] for each in given):
        raise ValueError(f"check_parallel: given were {given} by rank: give the same arguments on every rank")
    if counts is not None and (len(counts) != ranks.size or min(counts) < 0 or not sum(counts)):
        raise ValueError(
            f"check_parallel: counts={list(counts)}: wanted are {ranks.size} numbers of samples, of 0 or more"
        )
    if clip is None and hasattr(optimizer, "_compute_grad_norm"):  # Colossal-AI's

        def clip(_: Any) -> Any:
            held = inner.parameters()
            return optimizer._compute_grad_norm([(each, each.grad) for each in held if each.grad is not None])

    whole = None
    try:
        if reference is not None:
            whole = reference if isinstance(reference, nn.Module) else ranks.together(reference)
        coarsest = max((one.dtype for one in tensors), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
        divided = None if counts is None else partial(find_other_gradients, counts=counts, counted=counted)
        with Progress("check_parallel", tell=logger.info, is_shown=ranks.rank == 0):
            findings = _run(model, inner, batch, loss, whole, clip, ranks, coarsest, divided)
    except ValueError as error:
        raise ValueError(f"check_parallel: {error}") from error
    if ranks.rank == 0:
        for each in findings:
            logger.warning("check_parallel: %s", each)
    return findings


def _run(
    model: Any,
    inner: nn.Module,
    batch: Any,
    loss: Loss,
    whole: Any,
    clip: Any,
    ranks: Ranks,
    coarsest: torch.dtype,
    divided: Callable[..., list[ParallelFinding]] | None,
) -> list[ParallelFinding]:
    """In float64 if that goes, else in the model's dtypes."""
    for dtype in (torch.float64, coarsest):
        reference = None if whole is None else Apart(whole, whole, batch, loss, ranks, dtype)
        check = _Check(Apart(model, inner, batch, loss, ranks, dtype), reference, divided)
        try:
            with check.apart.computing():
                check.run()
        except ValueError as error:
            if check.has_computed or dtype is coarsest:
                raise
            logger.info("check_parallel: it computes in %s, as float64 failed: %s", coarsest, error)
            continue
        if clip is not None and check.gradients:
            with gradients_aside(inner):
                originals = dict(inner.named_parameters())
                check.findings += find_other_norm(model, clip, originals, check.parts, check.gradients, ranks)
        break
    return check.findings


class _Check:
    """One check; ``run`` within ``apart.computing()``. ``gradients`` of one backward are right enough to be clipped."""

    def __init__(self, apart: Apart, whole: Apart | None, divided: Callable[..., list[ParallelFinding]] | None) -> None:
        self.apart, self._whole, self._ranks, self._divided = apart, whole, apart.ranks, divided
        self.findings: list[ParallelFinding] = []
        self.parts: list[Part] = []
        self.gradients: dict[str, Tensor] = {}
        self.has_computed = False
        eps = torch.finfo(apart.dtype).eps
        self._alike, self._rounding = 0.1 * math.sqrt(eps), 3.0 * math.sqrt(eps)

    def run(self) -> None:
        model, ranks, findings = self.apart.inner, self._ranks, self.findings
        if (others := self._other_batches()) is not None:  # ranks whose sizes differ could not meet in a layer
            findings.append(others)
            return
        self.parts, differing = parts_of(model, ranks)
        if self._divided is not None:
            if shards := [part.name for part in self.parts if part.is_shard]:
                raise ValueError(
                    f"counts divide batches over ranks that hold the whole model, and {shards[0]} is a shard"
                )
            findings += [*differing, *self._divided(self.apart, tolerance=self._rounding)]
            return
        recorder = Recorder(model, ranks)
        self.apart.recorded(recorder)
        events = recorder.events_of_ranks()
        self.has_computed = True
        read = next((event.inputs for event in events if not event.module and not event.operation), [])
        if (others := self._other_inputs(read)) is not None:
            findings.append(others)
            return
        findings += differing
        findings += (activations := find_differing_activations(events, model, self.parts, self._alike))
        if any(each.cause == DRAWS for each in activations):
            model.eval()  # what else is wrong shows without draws
            self.apart.remember()
        other_than_reference = [] if self._whole is None else self._beside_reference(self._whole)
        self._vary_constants()
        recorder = Recorder(model, ranks)
        loss, gradients = self.apart.gradients(recorder=recorder)
        events = recorder.events_of_ranks()
        trained = [part for part in self.parts if part.tensor.requires_grad]
        held = local_gradients(trained, gradients)
        findings += find_wrong_sums(model, recorder, ranks, self._rounding)
        findings += find_cut_packed_weights(model, recorder, ranks)
        reference = None if self._whole is None else self._whole.inner
        findings += find_broken_ties(model, reference, held, ranks, self._rounding)
        losses = ranks.share(loss)
        apart = sum(abs(each - losses[0]) for each in losses)  # not a number where one is none
        are_equal = apart <= self._rounding * max(1.0, *map(abs, losses))
        if not self._is_forward_wrong() and not are_equal:
            findings.append(find_where_ranks_part(events, self._alike))
        if not self._is_forward_wrong() and not find_differing_activations(events, model, self.parts, self._alike):
            findings += GradientCheck(self.apart, trained, gradients, self._alike).find(events, recorder.loss)
            _, double = self.apart.gradients(num_backwards=2)
            twice = local_gradients(trained, double)
            findings += find_backwards_that_do_not_add_up(held, twice, ranks, self._rounding)
            if not any(each.cause == GRADIENTS for each in findings):
                self.gradients = gradients
        if self._is_causal():
            findings += find_later_tokens(self.apart, self._rounding)
        if all(each.cause in OF_GRADIENTS for each in findings):  # which explain no other loss
            findings += other_than_reference

    def _is_forward_wrong(self) -> bool:
        return any(each.cause in (ACTIVATIONS, SUM) for each in self.findings)

    def _other_batches(self) -> ParallelFinding | None:
        modes = self._ranks.share([name for name, module in self.apart.inner.named_modules() if module.training])
        if any(mode != modes[0] for mode in modes):
            trains = " and ".join(f"{len(mode)} modules on rank {rank}" for rank, mode in enumerate(modes[:4]))
            return finding(INPUTS, f"other modules are in train() on some ranks: {trains}")
        return self._other_inputs(self._ranks.share(numbers_in(self.apart.batch)))

    def _other_inputs(self, of_ranks: Sequence[Numbers]) -> ParallelFinding | None:
        if are_all_alike(of_ranks, self._alike):
            return None
        rows = enumerate(zip(*of_ranks, strict=False))
        at, row = next(
            ((at, row) for at, row in rows if not are_all_alike([[each] for each in row], self._alike)), (0, ())
        )
        if not row:
            return finding(INPUTS, f"the ranks have {list(map(len, of_ranks))} tensors and values")
        figures = [f"rank {rank}: shape {shape}, {sums}" for rank, (shape, *sums) in enumerate(row[:4])]
        return finding(INPUTS, f"number {at} of what the loss is given differs, by sums: {'; '.join(figures)}")

    def _vary_constants(self) -> None:
        """New biases and norms are constants, with which a bias that counts twice would not show."""
        generator = torch.Generator()
        for number, part in enumerate(self.parts):
            if part.is_constant:
                generator.manual_seed(number + 1000 * (1 + self._ranks.rank) * part.is_shard)
                drawn = torch.randn(part.local.shape, generator=generator, dtype=torch.float64)
                part.local.add_(0.05 * drawn.to(part.local))

    def _is_causal(self) -> bool:
        if self._whole is not None:
            with self._whole.computing():
                return how_much_later_tokens_change(self._whole) <= self._rounding
        modules = list(self.apart.inner.modules())
        is_decoder = getattr(getattr(modules[0], "config", None), "is_decoder", False)
        return (
            is_decoder is True
            or any(word in type(modules[0]).__name__ for word in _CAUSAL)
            or {getattr(module, "is_causal", None) for module in modules} - {None} == {True}
        )

    def _beside_reference(self, whole: Apart) -> list[ParallelFinding]:
        """Find the first module that returns something else than the reference's, where their losses differ.

        Of the parameters' present values, without draws: those of shards are others than the undivided model's.
        """
        recorders = Recorder(self.apart.inner, self._ranks), Recorder(whole.inner, self._ranks)
        self.apart.inner.eval()  # until the forward's end
        loss = self.apart.recorded(recorders[0])
        with whole.computing():
            whole.inner.eval()
            expected = whole.recorded(recorders[1])
        if max(self._ranks.share(abs(loss - expected))) <= self._rounding * max(1.0, abs(expected)):
            return []
        layer, where = "", ""
        for key, (module, operation, inputs, outputs) in recorders[0].events.items():
            *_, known, others = recorders[1].events.get(key, ("", "", [], []))
            is_comparable = not operation and inputs and [row[0] for row in outputs] == [row[0] for row in others]
            reads_the_same = is_comparable and are_alike(inputs, known, self._rounding)
            if reads_the_same and not are_alike(outputs, others, self._rounding):
                layer, where = module, "; this layer is the first that reads the same and returns other values"
                break
        detail = f"the loss is {loss:.8g}, and the reference's {expected:.8g}{where}"
        detail, layer = self._ranks.share([detail, layer])[0]
        return [finding(REFERENCE, detail, layer=layer, operation="forward")]

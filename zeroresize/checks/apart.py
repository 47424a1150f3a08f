"""A model that computes beside its training: with copies of its parameters, in float64 where that goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroresize.comm.collectives import same_ranks
from zeroresize.integrations.module_state import ModuleState, random_restored
from zeroresize.resharding.ranks import Ranks
from zeroresize.resharding.segments.in_float64 import in_float64, to_float64
from zeroresize.utils.torch_private import hooks_of_parameter, is_dtensor

#: ``loss(model, batch)``, a scalar.
Loss = Callable[[Any, Any], Tensor]
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Apart:
    """Computes losses and gradients of a model within :meth:`computing`, always from the same random states.

    ``inner`` is what is in a host's wrappers, whose reducers must not run; ``dtype`` is float64 or the narrowest.
    """

    def __init__(self, model: Any, inner: nn.Module, batch: Any, loss: Loss, ranks: Ranks, dtype: torch.dtype) -> None:
        self.model, self.inner, self.ranks, self.dtype = model, inner, ranks, dtype
        self.batch, self._loss, self.weight = batch, loss, 1.0  # by which a backward's loss is multiplied
        self._computes_in = dtype if dtype is torch.float64 else None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.last_value = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model compute with copies of its parameters, hooks on them included, while the block lasts."""
        default, stance = torch.get_default_dtype(), getattr(torch.compiler, "set_stance", None)
        try:
            torch.set_default_dtype(self._computes_in or default)
            with (
                gradients_aside(self.inner),
                random_restored(self.inner),
                in_float64(self.inner, self._computes_in) as copies,
                stance("force_eager") if stance is not None else nullcontext(),
                nullcontext() if self._computes_in is None else _InFloat64(),
                torch.autocast(self.ranks.device.type, enabled=False),
                torch.enable_grad(),
            ):
                for original, copy in copies:
                    for hook in hooks_of_parameter(original, "backward").values():
                        copy.register_hook(hook)
                    for hook in hooks_of_parameter(original, "post_accumulate_grad").values():
                        copy.register_post_accumulate_grad_hook(hook)
                self._marks = [(copy, dict(vars(copy))) for _, copy in copies]
                self.remember()
                self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.inner.buffers()]
                yield
        finally:
            torch.set_default_dtype(default)

    def remember(self) -> None:
        """Let what modules hold now be what they hold before each forward."""
        self._held = ModuleState(self.inner)

    def forward(self, *, meets: bool = False) -> Tensor:
        """Return the loss on this rank; collective, with a ValueError on every rank where some fail."""

        def call() -> Tensor:
            for buffer, was in self._buffers:
                buffer.copy_(was)
            loss = self._loss(self.inner, to_float64(self.batch, self._computes_in))
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                kind = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"loss(model, batch) must return a scalar tensor with a gradient, and returned {kind}")
            return loss

        try:
            with random_restored(self.inner):
                return self.ranks.together(call, meets=meets)
        finally:
            self._held.restore()

    def value(self) -> float:
        """Return the loss, the mean of all ranks'; collective."""
        values = self.ranks.share(number_of(self.forward()))
        self.last_value = float(sum(values) / len(values))
        return self.last_value

    def recorded(self, recorder: Any) -> float:
        """Return this rank's loss, of a forward within the block of ``recorder``."""
        with recorder:
            return number_of(self.forward(meets=True))

    def gradients(self, *, num_backwards: int = 1, recorder: Any = None) -> tuple[float, dict[str, Tensor]]:
        """Return this rank's loss, and by name what backwards have accumulated, after the host's reductions."""
        self.inner.zero_grad(set_to_none=True)
        for parameter, marks in self._marks:  # in which hooks may count
            vars(parameter).clear()
            vars(parameter).update(marks)
        for _ in range(num_backwards):
            with nullcontext() if recorder is None else recorder:
                loss = self.forward(meets=recorder is not None)
            value = number_of(loss)
            with random_restored(self.inner):
                self.ranks.together((loss if self.weight == 1.0 else loss * self.weight).backward)
        self._reduce()
        gradients = {name: one.grad for name, one in self.inner.named_parameters() if one.grad is not None}
        self.inner.zero_grad(set_to_none=True)
        return value, gradients

    def _reduce(self) -> None:
        """Reduce gradients of divided sequences as the backward of Colossal-AI's optimizer does."""
        reduce = getattr(self.model, "sync_sp_grads", None)
        mode = getattr(getattr(self.model, "shard_config", None), "sequence_parallelism_mode", None)
        if mode in ("all_to_all", "ring_attn") and same_ranks(self.model.dp_group, self.ranks.process_group):
            reduce = self.model.sync_dp_grads
        if callable(reduce):
            self.ranks.together(reduce)


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Let parameters have no gradients until the block has ended, which then are those that they had."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _InFloat64(TorchFunctionMode):
    """Lets what a forward computes in float32 whatever it is given, such as norms and softmaxes, compute in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "__get__":
            return func(*args, **(kwargs or {}))
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        return func(*map(_wide, args), **{key: _wide(value) for key, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def number_of(loss: Any) -> float:
    """Return a scalar's value, of a DTensor that of all ranks; collective then."""
    return float((loss.full_tensor() if is_dtensor(loss) else loss).detach())

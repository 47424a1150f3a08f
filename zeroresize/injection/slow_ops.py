"""Slowing the products of any model, whoever wrote its layers, forward and backward: below autograd, op by op."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from zeroresize.injection.delay import Slowdown
from zeroresize.injection.schedule import Scope
from zeroresize.utils.checked import checked
from zeroresize.utils.torch_private import DispatchMode, FakeTensor, Operator, dispatch_modes, name_of_operator

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::linear", "aten::_scaled_mm"}) | {
    "zeroresize::kept_inner",
    "zeroresize::kept_columns",
}
_NO_WORK = ("c10d", "_c10d", "_dtensor", "symm_mem", "prim::", "profiler::")


@checked()
class SlowOps(Slowdown):
    """While active, delays the linear products of this thread (and of its backward), or every op.

    Only a rank with χ > 1 pays for watching its ops (some 4 µs each). Code inside ``torch.compile`` is not seen.

    Args:
        scope: ``"gemm"`` delays the matrix products of linear layers (not attention's, which multiply batch by batch);
            ``"all"`` every op but collectives, the optimizer's included.

    Raises:
        ValueError: for an unknown scope.
        RuntimeError: where χ rises above 1 inside a mode that was entered later.
    """

    def __init__(self, *, scope: Scope = "gemm") -> None:
        super().__init__()
        self._mode = _SlowOpsMode(self, scope == "all")
        self._is_active = False
        self._num_modes_below = 0

    def _chi_has_changed(self) -> None:
        if self._is_active:
            self._watch(self.chi > 1.0)

    def __enter__(self) -> SlowOps:
        self._num_modes_below = len(dispatch_modes())
        self._is_active = True
        self._watch(self.chi > 1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_active = False
        self._watch(False)

    def _watch(self, should_watch: bool) -> None:
        """Put the mode on torch's stack or take it off, never out of turn with other modes."""
        modes = dispatch_modes()
        if should_watch and self._mode not in modes:
            if len(modes) != self._num_modes_below:
                raise RuntimeError("χ cannot rise above 1 inside another TorchDispatchMode: set it outside that")
            self._mode.__enter__()
        elif not should_watch and modes and modes[-1] is self._mode:
            self._mode.__exit__(None, None, None)


class _SlowOpsMode(DispatchMode):
    def __init__(self, slowdown: Slowdown, is_every_op: bool) -> None:
        super().__init__()
        self._slowdown = slowdown
        self._is_every_op = is_every_op

    def __torch_dispatch__(
        self,
        func: Operator,
        types: tuple[type[Tensor], ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(cls, FakeTensor) for cls in types):  # of DTensors, whose shapes are told
            return func(*args, **(kwargs or {}))
        if any(cls.__torch_dispatch__ is not Tensor.__torch_dispatch__ for cls in types):
            # A subclass such as DTensor: the ops that it is made of come by here in their turn.
            return NotImplemented
        delay = self._slowdown.delay_on(_device_of(args, kwargs or {}))
        if delay.chi == 1.0 or not self._is_slowed(func, args):
            return func(*args, **(kwargs or {}))
        delay.begins()
        result = func(*args, **(kwargs or {}))
        delay.ends(_key_of(func, args))
        return result

    def _is_slowed(self, func: Operator, args: tuple[Any, ...]) -> bool:
        name = name_of_operator(func)
        if self._is_every_op:
            return not name.startswith(_NO_WORK) and not getattr(func, "is_view", False)
        if name in _PRODUCTS:
            return True
        if name == "aten::bmm":  # a linear layer's, where torch repeats the weight over the batch
            return args[1].shape[0] > 1 and args[1].stride(0) == 0
        return name == "aten::matmul" and args[1].dim() == 2


def _tensors_in(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors_in(tuple(arg))


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for tensor in _tensors_in(args):
        if tensor.is_cuda:
            return tensor.device
    return torch.device(kwargs.get("device") or "cpu")


def _key_of(func: Operator, args: tuple[Any, ...]) -> Hashable:
    return (func, tuple((tensor.shape, tensor.dtype) for tensor in _tensors_in(args)))

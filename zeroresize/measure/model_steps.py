"""Times the steps of any model by hooks, on one rank: busy, waiting, before its forward, and in matrix products.

Layers and results stay as they are. What is heard all the time are the model's own forward, the first gradients of a
backward, and the optimizer's steps; the modules that multiply matrices only in one step of some.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure.clocks import clock_for
from zeroresize.measure.step_timer import StepTimer
from zeroresize.policy.slowness.windows import WatchedStep
from zeroresize.policy.tensor.estimation.times import StepTimes
from zeroresize.utils.torch_private import is_compiled_module

_T = TypeVar("_T")

#: In one step of so many the products are timed.
_TIMED_EVERY = 5
#: In a backward each product of a forward has two, of as many FLOPs: dgrad and wgrad.
_PRODUCTS_OF_FORWARD = 3.0
#: So many of the modules that multiply are timed, and stand for all, by the sizes of their weights.
_MOST_PRODUCTS = 32
#: Of so many parameters, far from each other, any tells that a backward is under way.
_MOST_PARAMETERS = 2
#: A result is searched for tensors down to so many levels.
_MOST_NESTED = 4


class ModelSteps:
    """Times the steps of a model on this rank, from :meth:`end_step` to :meth:`end_step`.

    Evaluation counts as what passes before a forward, and a forward is one that autograd records.

    Args:
        model: any module, on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._timer = StepTimer(clock_for(device))
        multiplying = [] if _is_compiled(model) else list(_modules_that_multiply(model))
        self._products = _some(multiplying, _MOST_PRODUCTS)
        self._products_of_timed = _PRODUCTS_OF_FORWARD * _size_of(multiplying) / max(_size_of(self._products), 1)
        self._timing: list[RemovableHandle] = []  # hooks of a step in which products are timed
        self._are_timed: deque[bool] = deque()  # of the steps that were not read yet
        self._works: deque[float] = deque()
        self._num_steps = 0
        self._has_seen_work = False
        reference = weakref.ref(self)
        handles = [
            model.register_forward_pre_hook(_calling(reference, ModelSteps._work_begins), prepend=True),
            model.register_forward_hook(_hearing_of_backward(reference)),
        ]
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in _some(learning, _MOST_PARAMETERS):
            hook = _calling(reference, ModelSteps._backward_is_under_way)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._close = weakref.finalize(self, _detach, self._timer, handles, self._timing)
        self._close.atexit = False
        self._begin_step()

    def end_step(self, work: float = math.nan) -> list[WatchedStep]:
        """End a step, of so much work, and begin the next one; return the steps that can be read without waiting.

        A step without any work of the model, such as that of another model's optimizer, is told as well.
        """
        self._stop_timing_products()
        self._works.append(work)
        read = [self._described(step) for step in self._timer.end_step()]
        self._num_steps += 1
        self._begin_step()
        return read

    def close(self) -> None:
        """Take back all hooks, and time nothing more."""
        self._close()

    def _begin_step(self) -> None:
        is_timed = bool(self._products) and self._num_steps % _TIMED_EVERY == _TIMED_EVERY // 2
        self._are_timed.append(is_timed)
        self._timer.begin_step()
        if is_timed:
            self._time_products()

    def _described(self, step: StepTimes) -> WatchedStep:
        is_timed = self._are_timed.popleft()
        products_s = self._products_of_timed * step.gemm_s if is_timed else 0.0
        return WatchedStep.of_times(step, products_s, self._works.popleft())

    def _time_products(self) -> None:
        begin = _calling(weakref.ref(self), ModelSteps._product_begins)
        end = _calling(weakref.ref(self), ModelSteps._product_ends)
        for module in self._products:
            self._timing.append(module.register_forward_pre_hook(begin))
            self._timing.append(module.register_forward_hook(end))

    def _stop_timing_products(self) -> None:
        for handle in self._timing:
            handle.remove()
        self._timing.clear()

    def _work_begins(self) -> None:
        if torch.is_grad_enabled():
            self._timer.work_begins()

    def _product_begins(self) -> None:
        # What is computed again in a backward is left out: so all steps are alike, with checkpointing or without.
        # Nor does evaluation count; a checkpointed part of a forward records no gradients either.
        if not self._timer.is_in_backward and (torch.is_grad_enabled() or not self._timer.is_outside):
            self._timer.product_begins()
            self._timer.whole_begins(())

    def _product_ends(self) -> None:
        self._timer.product_ends()

    def _backward_is_under_way(self) -> None:
        self._timer.watch_end_of_backward()


def _detach(timer: StepTimer, handles: list[RemovableHandle], timing: list[RemovableHandle]) -> None:
    timer.close()
    for handle in [*handles, *timing]:
        handle.remove()
    handles.clear()
    timing.clear()


def _calling(reference: weakref.ref[ModelSteps], method: Callable[[ModelSteps], None]) -> Callable[..., None]:
    def call(*_: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code hears nothing of this
            return
        steps = reference()
        if steps is not None:
            method(steps)

    return call


def _hearing_of_backward(reference: weakref.ref[ModelSteps]) -> Callable[..., None]:
    """Return a hook of a model's forward: the gradient of its result tells that a backward has begun."""
    backward_begins = _calling(reference, ModelSteps._backward_is_under_way)

    def hear(module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tensor = next((tensor for tensor in _tensors_in(result) if tensor.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(backward_begins)

    return hear


def _tensors_in(value: Any, level: int = 0) -> Iterator[Tensor]:
    """Yield the tensors of a model's result: of mappings, sequences and dataclasses, nested or not."""
    if isinstance(value, Tensor):
        yield value
        return
    if level == _MOST_NESTED:
        return
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    for part in parts:
        yield from _tensors_in(part, level + 1)


def _some(known: Sequence[_T], most: int) -> list[_T]:
    """Choose at most so many, 2 or more, at equal distances, the first and the last among them."""
    number = min(len(known), most)
    return [known[round(at * (len(known) - 1) / max(number - 1, 1))] for at in range(number)]


def _size_of(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a part of the model is compiled: it would be compiled anew for hooks of its modules."""
    return any(is_compiled_module(module) for module in model.modules())


def _modules_that_multiply(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose forward is a matrix product or a convolution, or attention as a whole.

    Not this package's own layers: their balancer knows their products, and they may be traced.
    """
    if isinstance(module, BalancedLinear):
        return
    children = list(module.children())
    weight = getattr(module, "weight", None)
    has_matrix = not children and isinstance(weight, Tensor) and weight.dim() >= 2
    if isinstance(module, nn.MultiheadAttention) or (has_matrix and not isinstance(module, _NO_PRODUCTS)):
        yield module
        return
    for child in children:
        yield from _modules_that_multiply(child)


#: They have a weight of two dimensions, perhaps, and multiply no matrices by it.
_NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)

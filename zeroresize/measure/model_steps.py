"""Times the steps of any model by hooks, on one rank: busy, waiting, before its forward, and in matrix products.

Layers and results stay as they are. What is heard are the model's own forward, the first gradients of a backward, and
waits; the modules that multiply matrices only in one step of some.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure import waits
from zeroresize.measure.clocks import clock_for
from zeroresize.measure.step_timer import StepTimer
from zeroresize.measure.waits import END_OF_BACKWARD, Where
from zeroresize.policy.slowness.windows import WatchedStep
from zeroresize.policy.tensor.estimation.times import StepTimes
from zeroresize.utils.torch_private import current_backward, is_compiled_module
from zeroresize.utils.torch_state import remove_all, tensors_in

_T = TypeVar("_T")

#: In one step of so many the products are timed.
_TIMED_EVERY = 5
#: In a backward each product of a forward has two, of as many FLOPs: dgrad and wgrad.
_PRODUCTS_OF_FORWARD = 3.0
#: So many of the modules that multiply are timed, and stand for all, by the sizes of their weights.
_MOST_PRODUCTS = 16
#: Of so many parameters, far from each other, any tells that a backward is under way.
_MOST_PARAMETERS = 2


class ModelSteps:
    """Times the steps of a model on this rank, from :meth:`end_step` to :meth:`end_step`.

    Evaluation counts as what passes before a forward, and a forward is one that autograd records.

    Attributes:
        listens: whether a step is timed now; else hooks return at once, and no wait is heard.
        close: takes back all hooks, and times nothing more.
    """

    def __init__(self, model: nn.Module) -> None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._timer = StepTimer(clock_for(device))
        # A compiled model would be compiled anew for hooks of its modules.
        is_compiled = any(is_compiled_module(module) for module in model.modules())
        multiplying = [] if is_compiled else list(_modules_that_multiply(model))
        self._products = _some(multiplying, _MOST_PRODUCTS)
        self._products_of_timed = _PRODUCTS_OF_FORWARD * _size_of(multiplying) / max(_size_of(self._products), 1)
        self._timing: list[RemovableHandle] = []  # hooks of a step in which products are timed
        self._inputs = 0  # elements of what the model was given in this step
        # Of each step, whether products were timed, its work, and its inputs.
        self._unread: deque[tuple[bool, float, int]] = deque()
        self._num_steps = 0
        # The reducer waits in C++.
        reducing: Any = model.process_group if isinstance(model, DistributedDataParallel) else None
        self._where_of_backward: Where = (reducing.group_name, None) if reducing is not None else None
        reference = weakref.ref(self)
        handles = [
            model.register_forward_pre_hook(
                _calling(reference, ModelSteps._work_begins), prepend=True, with_kwargs=True
            ),
            model.register_forward_hook(_calling(reference, ModelSteps._hear_of_backward)),
        ]
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in _some(learning, _MOST_PARAMETERS):
            handles.append(parameter.register_post_accumulate_grad_hook(_backward_is_under_way))
        self.close = weakref.finalize(self, _detach, self._timer, handles, self._timing)
        self.close.atexit = False
        self.listens = True
        self.begin_step()

    def end_step(self, work: float = math.nan, *, goes_on: bool = True) -> list[WatchedStep]:
        """End a step, of so much work, and begin the next if it ``goes_on``; return the steps that can be read now.

        A step without any work of the model, such as that of another model's optimizer, is told as well.
        """
        self._unread.append((bool(self._timing), work, self._inputs))
        _remove(self._timing)
        steps = self._timer.end_step()
        read = [self._described(*each) for each in zip(steps, self._timer.waits, strict=True)]
        self._num_steps, self._inputs = self._num_steps + 1, 0
        if goes_on:
            self.begin_step()
        return read

    def pause(self) -> None:
        """Time nothing until :meth:`begin_step`."""
        self.listens = False
        waits.stop_listening(self._timer)

    def begin_step(self) -> None:
        """Begin a step."""
        if not self.listens:
            self.listens = True
            waits.listen(self._timer)
        self._timer.begin_step()
        if self._num_steps % _TIMED_EVERY == _TIMED_EVERY // 2:
            reference = weakref.ref(self)
            for module in self._products:
                begin = module.register_forward_pre_hook(_calling(reference, ModelSteps._product_begins))
                self._timing += [begin, module.register_forward_hook(_calling(reference, ModelSteps._product_ends))]

    def _described(self, step: StepTimes, waits_s: dict[Where, float]) -> WatchedStep:
        is_timed, work, inputs = self._unread.popleft()
        where, in_backward_s = self._where_of_backward, waits_s.pop(END_OF_BACKWARD, 0.0)
        waits_s[where] = waits_s.get(where, 0.0) + in_backward_s
        products_s = self._products_of_timed * step.gather_fill_s if is_timed else 0.0
        return WatchedStep.of_times(step, products_s, work, inputs, waits_s)

    def _work_begins(self, _: nn.Module, *given: Any) -> None:
        if torch.is_grad_enabled():
            self._timer.work_begins()
            self._inputs += sum(tensor.numel() for tensor in tensors_in(given))

    def _product_begins(self, *_: Any) -> None:
        # What is computed again in a backward is left out: so all steps are alike, with checkpointing or without.
        # Nor does evaluation count; a checkpointed part of a forward records no gradients either.
        if current_backward() == -1 and (torch.is_grad_enabled() or not self._timer.is_outside):
            self._timer.product_begins()

    def _product_ends(self, *_: Any) -> None:
        self._timer.product_ends()

    def _hear_of_backward(self, _module: nn.Module, _given: Any, result: Any) -> None:
        """The gradient of a model's result tells that a backward has begun."""
        tensor = next((tensor for tensor in tensors_in(result) if tensor.requires_grad), None)
        if torch.is_grad_enabled() and tensor is not None:
            tensor.register_hook(_backward_is_under_way)


def _detach(timer: StepTimer, *handles: list[RemovableHandle]) -> None:
    timer.close()
    for some in handles:
        _remove(some)


def _remove(handles: list[RemovableHandle]) -> None:
    remove_all(handles)
    handles.clear()


def _calling(reference: weakref.ref[ModelSteps], method: Callable[..., None]) -> Callable[..., None]:
    def call(*given: Any) -> None:
        steps = None if torch.compiler.is_compiling() else reference()  # compiled code hears nothing of this
        if steps is not None and steps.listens:
            began = time.perf_counter()
            method(steps, *given)
            waits.spend(began)

    return call


def _backward_is_under_way(_: Tensor) -> None:
    waits.watch_end_of_backward()


def _some(known: Sequence[_T], most: int) -> list[_T]:
    """Choose at most so many, 2 or more, at equal distances, the first and the last among them."""
    number = min(len(known), most)
    return [known[round(at * (len(known) - 1) / max(number - 1, 1))] for at in range(number)]


def _size_of(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _modules_that_multiply(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose forward is a matrix product or a convolution, or attention as a whole.

    Not this package's own layers: their balancer knows their products, and they may be traced.
    """
    children = list(module.children())
    weight = getattr(module, "weight", None)
    has_matrix = not children and isinstance(weight, Tensor) and weight.dim() >= 2
    if isinstance(module, nn.MultiheadAttention) or (has_matrix and not isinstance(module, _NO_PRODUCTS)):
        yield module
        return
    for child in children:
        yield from _modules_that_multiply(child)


#: They have a weight of two dimensions, perhaps, and multiply no matrices by it.
_NO_PRODUCTS = (BalancedLinear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)

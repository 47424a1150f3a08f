"""Statistics of each column of a layer, epoch by epoch, by which ZERO-Pri chooses.

``N`` output and ``K`` input features of a layer on this rank. A statistic is a [K] vector a layer, larger for columns
that matter more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroresize.config import BalanceConfig
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.optim.optimizers import SteppedTensors, hook_steps, require_stepped
from zeroresize.utils.torch_private import version_of

#: Activations are sampled in one of so many steps, beginning with the first: a sample costs some per cent of a step.
_SAMPLE_EVERY = 10

Layers = Mapping[str, BalancedLinear]
Fresh = dict[str, NDArray[np.float64]]


class ColumnStatistic(ABC):
    """Keeps one kind of statistic over all balanced layers of this rank.

    Args:
        layers: balanced layers by name.

    Attributes:
        incremental: whether pruning a column spoils its statistic, so the last value from before must be kept.
        adds_up: whether it adds up over the steps of an epoch.
        state: what it keeps from step to step within the epoch, by names; tensors are replaced, not changed in place.
    """

    incremental: bool = True
    adds_up: bool = True

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.state: dict[str, Tensor] = {}
        self.restart()

    @abstractmethod
    def take(self) -> Fresh:
        """Return the statistic of the epoch, [K] a layer, NaN where there is none, and begin the next epoch."""

    @abstractmethod
    def restart(self) -> None:
        """Begin the epoch anew, with the layers as they are: units have moved, or other weights were loaded."""

    def begin_step(self, step: int) -> None:  # noqa: B027 - most statistics need not know
        """Begin optimizer step number ``step`` (from 0)."""

    @property
    def bytes_held(self) -> int:
        """Memory that it keeps from step to step."""
        return sum(tensor.nbytes for tensor in self.state.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Return its state within the epoch, this rank's own."""
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from :meth:`state_dict`."""
        for name, tensor in self.state.items():
            self.state[name] = state[name].to(tensor, copy=True)

    def close(self) -> None:
        """Detach its hooks."""
        for layer in self._layers.values():
            layer.watch_input = None


def build_statistic(config: BalanceConfig, layers: Layers, optimizer: Any) -> ColumnStatistic:
    """Make the statistic that ``config.priority`` names; ValueError if the optimizer does not fit it."""
    if config.priority == "activation":
        return ActivationNorms(layers)
    if config.priority == "path_length":
        return PathLength(layers, optimizer)
    return WeightVariation(layers, storage=config.paper.snapshot)


class WeightVariation(ColumnStatistic):
    """δ_i = Σ_j |w_ji(now) − w_ji(at the last epoch's end)| / N (paper, section III-B).

    The first epoch counts from the weights of the first training forward: a checkpoint may be loaded until then.

    Args:
        layers: balanced layers by name.
        storage: ``"host"`` keeps the second copy of the weights on the CPU, unchanged; ``"bf16"`` on the device, two
            bytes a value. Then both ends of the difference are rounded alike: a weight that did not move differs by
            nothing, and small changes are right on average.
    """

    def __init__(self, layers: Layers, *, storage: str) -> None:
        self._to: Any = torch.bfloat16 if storage == "bf16" else "cpu"
        super().__init__(layers)
        for name, layer in layers.items():
            layer.watch_input = self._first_forward(name)

    @torch.no_grad()
    def take(self) -> Fresh:
        fresh, then = {}, self.state
        self.restart()
        for name, layer in self._layers.items():
            change_NK = self.state[name].to(torch.float32) - then[name].to(torch.float32)
            fresh[name] = change_NK.abs_().mean(dim=0, dtype=torch.float64).cpu().numpy()
            if not layer.weight.requires_grad:
                fresh[name][:] = np.nan  # a frozen weight does not move, which says nothing
        return fresh

    def restart(self) -> None:
        self.state = {name: self._copy_of(layer) for name, layer in self._layers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.close()
        super().load_state_dict(state)

    def _first_forward(self, name: str) -> Callable[[Tensor], None]:
        layer = self._layers[name]
        version = version_of(layer.local_weight)

        def look(_: Tensor) -> None:
            layer.watch_input = None
            if version_of(layer.local_weight) != version:
                self.state[name] = self._copy_of(layer)

        return look

    def _copy_of(self, layer: BalancedLinear) -> Tensor:
        return layer.local_weight.detach().to(self._to, copy=True)


class ActivationNorms(ColumnStatistic):
    """‖x_i‖ · ‖w_i‖, the most that column i can add to y = Σ_i x_i w_iᵀ, with ‖x_i‖ the root mean square over tokens.

    x is whole even while columns are pruned, so every epoch tells of all columns. An epoch's first step and every tenth
    after it are sampled, except forwards in which a column overflows, as in half precision while a loss scale settles.
    """

    incremental = adds_up = False

    def restart(self) -> None:
        self.state = {"first_step": torch.tensor(-1)}
        for name, layer in self._layers.items():
            device = layer.local_weight.device
            self.state[f"{name}.squares"] = torch.zeros(layer.num_columns, dtype=torch.float32, device=device)
            self.state[f"{name}.num_tokens"] = torch.zeros((), dtype=torch.int64, device=device)

    def begin_step(self, step: int) -> None:
        if self.state["first_step"] < 0:
            self.state["first_step"] = torch.tensor(step)
        is_sampled = (step - int(self.state["first_step"])) % _SAMPLE_EVERY == 0
        for name, layer in self._layers.items():
            layer.watch_input = self._watcher(name) if is_sampled else None

    @torch.no_grad()
    def take(self) -> Fresh:
        fresh = {}
        for name, layer in self._layers.items():
            # NaN where there were none
            mean_squares_K = self.state[f"{name}.squares"] / self.state[f"{name}.num_tokens"]
            norms_K = _norms_of_columns(layer.local_weight.detach())
            fresh[name] = (norms_K * mean_squares_K.sqrt()).to("cpu", torch.float64).numpy()
            if not len(layer.local_weight):
                fresh[name][:] = np.nan  # without outputs no column matters, and none less than another
        self.restart()
        return fresh

    def _watcher(self, name: str) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def watch(x: Tensor) -> None:
            x_TK = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])  # K may be 0
            squares_K = _norms_of_columns(x_TK).square()
            is_finite = squares_K.isfinite().all()  # stays on the device
            seen = {"squares": squares_K.where(is_finite, 0.0), "num_tokens": is_finite * x_TK.shape[0]}
            self.state |= {f"{name}.{what}": self.state[f"{name}.{what}"] + more for what, more in seen.items()}

        return watch


def _norms_of_columns(x_TK: Tensor) -> Tensor:
    """[K], in single precision at least."""
    return torch.linalg.vector_norm(x_TK, dim=0, dtype=torch.promote_types(x_TK.dtype, torch.float32))


class PathLength(ColumnStatistic):
    """Σ over the epoch's steps of Σ_j |Δw_ji| / N: the length of column i's way, not the distance between its ends.

    There is no second copy of the weights: each step samples one layer, in turn, and a layer's samples stand for all of
    the epoch's steps. With fewer steps in an epoch than layers, some layers get no value; nor do frozen ones.
    """

    def __init__(self, layers: Layers, optimizer: Any) -> None:
        weights = {name: layer.weight for name, layer in layers.items()}
        require_stepped(optimizer, weights, "priority='path_length'")
        self._stepped = SteppedTensors(optimizer, weights)
        super().__init__(layers)
        self._unhook = hook_steps(optimizer, self._before_step, self._after_step)

    def restart(self) -> None:
        """As all do; the next step samples the layer whose turn it is."""
        self.state = {"turn": self.state.get("turn", torch.tensor(0)), "steps": torch.tensor(0)}
        for name, layer in self._layers.items():
            self.state |= {f"{name}.path": torch.zeros(layer.num_columns), f"{name}.looks": torch.tensor(0)}
        self._looked_at: tuple[str, Tensor, Tensor] | None = None

    def take(self) -> Fresh:
        fresh = {}
        for name in self._layers:
            looks = int(self.state[f"{name}.looks"])
            steps_a_look = int(self.state["steps"]) / looks if looks else math.nan
            fresh[name] = self.state[f"{name}.path"].to("cpu", torch.float64).numpy() * steps_a_look
        self.restart()
        return fresh

    def close(self) -> None:
        self._unhook()

    @torch.no_grad()
    def _before_step(self) -> None:
        stepped = self._stepped.now()
        trained = [name for name in stepped if self._layers[name].weight.requires_grad]
        if trained:
            name = trained[int(self.state["turn"]) % len(trained)]
            tensor = local_of(stepped[name])
            self._looked_at = name, tensor, tensor.detach().clone()

    @torch.no_grad()
    def _after_step(self) -> None:
        if self._looked_at is None:
            return
        name, now, before = self._looked_at
        self._looked_at = None
        step_K = (now.detach() - before).abs_().mean(dim=0, dtype=torch.float32)
        self.state[f"{name}.path"] = self.state[f"{name}.path"].to(step_K.device) + step_K
        for counted in ("turn", "steps", f"{name}.looks"):
            self.state[counted] = self.state[counted] + 1

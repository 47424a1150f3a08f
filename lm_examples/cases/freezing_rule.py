"""Which layers are frozen, decided on plain numbers: from the front, those that have stopped changing.

After Egeria (Wang et al., EuroSys '23), on which DynMo's layer freezing is built (section 4.2.3): a layer whose
plasticity has become stationary is frozen, and layers thaw when the learning rate has dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vit_examples.harness.sections import each_at_least
from zeroresize.utils.value_checks import at_least, number


@dataclass(frozen=True, kw_only=True)
class FreezingOptions:
    """When layers are frozen.

    Attributes:
        start: the first step with a check.
        every: steps from one check to the next.
        window: checks over which a layer's plasticity is averaged.
        tolerance: a layer is calm when this average is at most so large a share of the highest it has had.
        patience: checks in a row in which a layer must be calm.
        keep_active: how many layers at the end are never frozen, the head among them.
        thaw_at_lr: all layers thaw when the learning rate has fallen to this share of what it was when the first of
            them was frozen; None for never.
        thaw_at_loss: all layers thaw when the mean loss between two checks is this many times its lowest since the
            first of them was frozen; None for never.
    """

    start: int = 0
    every: int = 50
    window: int = 3
    tolerance: float = 0.2
    patience: int = 2
    keep_active: int = 1
    thaw_at_lr: float | None = 0.1
    thaw_at_loss: float | None = 1.2

    def __post_init__(self) -> None:
        at_least("freezing.start", self.start, 0)
        each_at_least("freezing", self, ("every", "window", "patience", "keep_active"), 1)
        number("freezing.tolerance", self.tolerance, above=0, below=1)
        if self.thaw_at_lr is not None:
            number("freezing.thaw_at_lr", self.thaw_at_lr, above=0, below=1)
        if self.thaw_at_loss is not None:
            number("freezing.thaw_at_loss", self.thaw_at_loss, above=1)


class FreezingRule:
    """The layers that are frozen, always the first ones.

    Args:
        num_layers: of the whole model.

    Attributes:
        num_frozen: layers from the front.
    """

    def __init__(self, num_layers: int, options: FreezingOptions) -> None:
        self._options, self._num_layers = options, num_layers
        self._forget()

    def check(self, plasticity: Sequence[float], lr: float, loss: float) -> int:
        """Decide anew.

        Args:
            plasticity: [L] since the last check; NaN where it is not known, as of frozen layers.
            lr: learning rate.
            loss: mean since the last check; NaN if not known.

        Returns:
            How many layers are frozen now.
        """
        if self.num_frozen and self._is_time_to_thaw(lr, loss):
            self._forget()
            return 0
        for layer, value in enumerate(plasticity):
            if not math.isnan(value):
                self._see(layer, value)
        most = max(self._num_layers - self._options.keep_active, 0)
        was_frozen = self.num_frozen
        while self.num_frozen < most and self._calm[self.num_frozen] >= self._options.patience:
            self.num_frozen += 1
        if self.num_frozen and not was_frozen:
            self._lr = lr
        if self.num_frozen and not loss >= self._lowest_loss:
            self._lowest_loss = loss
        return self.num_frozen

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_frozen": self.num_frozen,
            "recent": [list(one) for one in self._recent],
            "highest": list(self._highest),
            "calm": list(self._calm),
            "lr": self._lr,
            "lowest_loss": self._lowest_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ValueError: for a state of a model with another number of layers.
        """
        if len(state["calm"]) != self._num_layers:
            raise ValueError(
                f"the state is of {len(state['calm'])} layers, but the model has {self._num_layers}: go on with the "
                "model that was saved"
            )
        self.num_frozen = state["num_frozen"]
        self._recent = [list(one) for one in state["recent"]]
        self._highest, self._calm = list(state["highest"]), list(state["calm"])
        self._lr, self._lowest_loss = state["lr"], state["lowest_loss"]

    def _forget(self) -> None:
        self.num_frozen = 0
        self._recent: list[list[float]] = [[] for _ in range(self._num_layers)]
        self._highest = [0.0] * self._num_layers
        self._calm = [0] * self._num_layers
        self._lr = self._lowest_loss = math.nan

    def _is_time_to_thaw(self, lr: float, loss: float) -> bool:
        at_lr, at_loss = self._options.thaw_at_lr, self._options.thaw_at_loss
        has_lr_dropped = at_lr is not None and lr <= at_lr * self._lr
        return has_lr_dropped or (at_loss is not None and loss >= at_loss * self._lowest_loss)

    def _see(self, layer: int, value: float) -> None:
        recent = self._recent[layer] = [*self._recent[layer], value][-self._options.window :]
        if len(recent) < self._options.window:
            return
        average = sum(recent) / len(recent)
        self._highest[layer] = max(self._highest[layer], average)
        is_calm = average <= self._options.tolerance * self._highest[layer] and self._highest[layer] > 0.0
        self._calm[layer] = self._calm[layer] + 1 if is_calm else 0

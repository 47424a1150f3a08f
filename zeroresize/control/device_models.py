"""Ranks whose devices are of other models draw other random numbers from one seed."""

from __future__ import annotations

import torch

from zeroresize.comm.exchange import Exchange


class DeviceModels:
    """Says which models of devices a group has; collective when made.

    Args:
        device: of this rank.
        exchange: with the ranks of the group.
    """

    def __init__(self, device: torch.device, exchange: Exchange) -> None:
        self._device = device
        ranks = exchange.gather([float(byte) for byte in model_of(device).encode()])
        self._models = [bytes(map(int, name)).decode() for name in ranks]
        self._state = _state(device)

    def warning(self) -> str | None:
        """Return the text of a warning where models differ and this rank has drawn on its device since the start."""
        if len(set(self._models)) == 1 or torch.equal(_state(self._device), self._state):
            return None
        named = ", ".join(
            f"{model} (ranks {', '.join(str(rank) for rank, one in enumerate(self._models) if one == model)})"
            for model in dict.fromkeys(self._models)
        )
        return (
            f"the group's devices are of several models, {named}, which draw other random numbers from one seed: "
            "dropout of what all ranks hold alike drops other elements on each. Set p = 0 outside of the parallel "
            "layers, or draw its masks on the CPU"
        )


def model_of(device: torch.device) -> str:
    """Return the name of a device's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

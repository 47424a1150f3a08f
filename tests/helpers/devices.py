"""Where ranks of tests on GPUs compute."""

from __future__ import annotations

import torch


def device_here() -> torch.device:
    """The device of this rank: a CPU where there is no GPU, as when a check is tried by hand."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

"""The command that trains in a torchrun of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def train_command(config: str, overrides: Sequence[str], num_ranks: int) -> list[str]:
    """``vit_examples.train`` on ``num_ranks`` ranks of this machine, with overrides such as ``training.epochs=3``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "vit_examples.train", "--config", config]
    return [*command, *(f"--set={override}" for override in overrides)]

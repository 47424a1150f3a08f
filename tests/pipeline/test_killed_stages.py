"""A stage's process is killed in the midst of a step: every survivor names it, whatever the schedule."""

import os
import signal
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.processes import told_by_survivors
from torch import nn

from zeroresize.comm import words
from zeroresize.pipeline import Pipeline
from zeroresize.runtime.executor import Executor
from zeroresize.runtime.instructions import planned_instructions
from zeroresize.runtime.messages import StageMessages
from zeroresize.runtime.schedules import adaptive_orders

NUM_MICROBATCHES = 6


class Mortal(nn.Linear):
    """Its process is killed in the third forward of one of its steps."""

    left = None

    def forward(self, x):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def by_adaptive_orders(group, layer):
    """What a stage of planned micro-batches runs."""
    rank, size = group.rank(), group.size()
    ones = np.ones((NUM_MICROBATCHES, size))
    instructions = planned_instructions(adaptive_orders(ones, [3.0] * size), ones, ones)[rank]

    def forward(_, xs):
        y = layer(torch.ones(2, 4) if xs is None else xs[0])
        return (y if rank + 1 < size else y.sum(),)

    def step():
        messages = StageMessages(group, torch.device("cpu"), list(range(NUM_MICROBATCHES)), {}, {})
        Executor(forward, messages, trains=True).carry_out(instructions)

    return step


def by_pipeline(schedule, group, layer):
    layers = [layer if stage == group.rank() else Mortal(4, 4) for stage in range(group.size())]
    pipeline = Pipeline(
        layers,
        nn.functional.mse_loss,
        num_microbatches=NUM_MICROBATCHES,
        process_group=group,
        schedule="1f1b" if schedule == "evaluation" else schedule,
    )
    x = torch.ones(12, 4)
    return lambda: pipeline.evaluate(x) if schedule == "evaluation" else pipeline.step(x, target=x)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "adaptive", "evaluation"])
@pytest.mark.parametrize(
    ("num_ranks", "killed"),
    [(2, 0), (2, 1), *(pytest.param(4, killed, marks=pytest.mark.slow) for killed in (0, 1, 3)), (3, 0)],
)
def test_a_killed_stage_is_named_by_every_survivor(tmp_path, monkeypatch, schedule, num_ranks, killed):
    monkeypatch.setattr(words, "WAIT_S", 0.4)

    def train(rank, group):
        group = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=1.5))
        torch.manual_seed(0)
        layer = Mortal(4, 4)
        step = by_adaptive_orders(group, layer) if schedule == "adaptive" else by_pipeline(schedule, group, layer)
        step()
        if rank == killed:
            layer.left = 3
        for _ in range(3):  # a stage may have ended that step before
            try:
                step()
            except RuntimeError as error:
                return str(error)
        return "no error"

    texts = told_by_survivors(train, num_ranks, tmp_path)
    assert sorted(texts) == [rank for rank in range(num_ranks) if rank != killed]
    for rank, text in texts.items():
        named = f"rank {killed}: busy, stopped or dead"
        assert named in text and f"rank {rank}: in the pipeline: " in text, (rank, text)
        assert abs(rank - killed) == 1 or f"ranks [{killed}] failed" in text, (rank, text)  # as its neighbours say

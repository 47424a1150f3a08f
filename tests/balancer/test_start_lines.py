"""What is logged as training starts: short lines, none of which says what another says."""

import itertools
import logging

import pytest
import torch
from helpers.processes import caught_log_lines, for_each
from torch import nn

import zeroresize as zr
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.same_ranks

WIDTH, MOST, SAME = 48, 200, 60


class Lonely(nn.Module):
    """A feed-forward whose units may move, and layers, with names as they are in models, whose units may not."""

    def __init__(self, group):
        super().__init__()
        self.feed_forward_up = ColumnParallelLinear(WIDTH, 2 * WIDTH, process_group=group)
        self.feed_forward_down = RowParallelLinear(2 * WIDTH, WIDTH, process_group=group)
        self.vocabulary_projection = ColumnParallelLinear(WIDTH, WIDTH, process_group=group)
        self.second_projection = ColumnParallelLinear(WIDTH, WIDTH, process_group=group)

    def forward(self, x):
        hidden = self.feed_forward_down(torch.relu(self.feed_forward_up(x)))
        return self.vocabulary_projection(hidden).sin() + self.second_projection(hidden)


class ByNorm(torch.optim.SGD):
    """Sees whole matrices, as LAMB does."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(1.0 + parameter.grad.norm())
        super().step()


def repeated(lines):
    """A run of characters that two lines share, if any does."""
    for first, second in itertools.combinations(lines, 2):
        for at in range(len(first) - SAME + 1):
            if first[at : at + SAME] in second:
                yield first[at : at + SAME]


def test_each_line_of_a_start_is_short_and_says_what_no_other_one_says(run_ranks):
    @for_each([("exact", torch.optim.AdamW), ("semi", torch.optim.AdamW), ("exact", ByNorm), ("off", torch.optim.SGD)])
    def train(rank, group, mode, kind):
        with caught_log_lines(logging.INFO) as lines:
            model = zr.convert(Lonely(group), process_group=group)
            optimizer = kind(model.parameters(), lr=1e-3)
            config = zr.BalanceConfig(mode=mode, update_every=2)
            balancer = zr.Balancer(model, optimizer, config, process_group=group)
            for _ in range(4):
                model(torch.ones(8, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
        balancer.close()
        lines = [line for line in lines if not line.startswith("step ")]  # of what is decided later
        assert rank or lines
        assert max(map(len, lines), default=0) <= MOST, max(lines, key=len)
        assert list(repeated(lines)) == [], lines
        if rank == 0 and mode != "off":
            assert "units of 2 of 4 layers stay on a slow rank; the first is vocabulary_projection" in lines
            assert any(line.startswith("vocabulary_projection stays even: no row-parallel layer was") for line in lines)

    run_ranks(train, 2, timeout_s=60)

"""Tensor parallelism inside the stages of a pipeline: units move first, then layers, and training goes on unchanged."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import virtual_training
from helpers.on_ranks import on_ranks
from helpers.sleeping_layers import clock_of
from helpers.virtual_training import VirtualTime
from torch import nn

import zeroresize as zr
from zeroresize.measure import clocks
from zeroresize.pipeline import (
    Pipeline,
    PipelineBalancer,
    clip_grad_norm_,
    measuring,
    moving_layers,
)

NUM_LAYERS, MICRO, BATCH, WIDTH = 6, 4, 8, virtual_training.FEATURES


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Divided(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        self.up = zr.ColumnParallelLinear.from_linear(whole.up, process_group=group)
        self.down = zr.RowParallelLinear.from_linear(whole.down, process_group=group)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def whole_layers():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [Whole() for _ in range(NUM_LAYERS)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator).unbind()


def undivided_losses(num_steps):
    model = nn.Sequential(*whole_layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(num_steps):
        x, target = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Training:
    """Two stages of two ranks: 0 and 1, 2 and 3. The pipelines are of 0 and 2, 1 and 3. Time is virtual."""

    def __init__(self, rank):
        stages, pipelines = [
            [dist.new_group(ranks) for ranks in groups] for groups in (([0, 1], [2, 3]), ([0, 2], [1, 3]))
        ]
        stage, shard = divmod(rank, 2)
        self.group, self.step, self.losses, self.events = stages[stage], 0, [], []
        config = zr.BalanceConfig(update_every=3)
        layers = nn.ModuleList(Divided(one, self.group) for one in whole_layers())
        zr.convert(layers, process_group=self.group)
        self.time = VirtualTime(0.001)
        virtual_training.keep_time(self.time, [one for layer in layers for one in (layer.up, layer.down)])
        for module in (moving_layers, measuring, clocks):
            module.time = clock_of(self.time.perf_counter)
        self.pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=pipelines[shard])
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=1e-3)
        self.units = zr.StageBalancer(
            self.pipeline, self.optimizer, process_group=self.group, config=config, on_update=self._updated
        )
        self.balancer = PipelineBalancer(
            self.pipeline,
            self.optimizer,
            profile_every=10,
            max_measuring=math.inf,
            replicas=self.group,
            units=self.units,
            on_change=lambda record: self.events.append(record.after),
        )

    def _updated(self, record):
        if record.moved_bytes:
            self.events.append("units")

    def train(self, num_steps):
        for _ in range(num_steps):
            x, target = batch(self.step)
            self.time.now += 0.01
            self.optimizer.zero_grad()
            with self.balancer.step():
                loss = self.pipeline.step(x, target=target)
            self.optimizer.step()
            self.units.step()
            self.losses += [] if loss is None else [loss.item()]
            self.step += 1
        return self.pipeline.boundaries

    @property
    def owned(self):
        return self.units.balancer.plan.owned


@pytest.mark.slow
def test_units_move_first_and_layers_by_what_is_left(run_ranks, cheap_moves, lending_is_dear):
    def check(rank, group):
        training = Training(rank)
        training.train(12)
        assert not training.events
        training.time.chi = 3.0 if rank == 3 else 1.0
        slow = training.train(40), training.owned
        training.time.chi = 1.0
        recovered = training.train(50), training.owned
        return slow, recovered, training.events, training.losses

    by_rank = run_ranks(check, 4)
    for rank, (slow, recovered, events, _) in enumerate(by_rank):
        # With units divided by speed the second stage takes 1.5 times as long, not 3: it would keep one layer then.
        assert slow[0] == (0, 4, 6) and recovered[0] == (0, 3, 6)
        moves = [one for one in events if one != "units"]
        assert moves == [(0, 4, 6), (0, 3, 6)]
        if rank >= 2:
            assert slow[1] == pytest.approx((1.5, 0.5), abs=0.1) and recovered[1] == (1.0, 1.0)
            assert events[0] == "units"
        else:
            assert events == moves
    for *_, losses in by_rank[2:]:
        assert losses == pytest.approx(undivided_losses(102), rel=1e-10, abs=0.0)


def test_a_stage_without_balanced_layers_has_settled_and_units_can_be_at_home(run_ranks):
    def check(rank, group):
        config = zr.BalanceConfig(update_every=3)
        layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Divided(Whole(), group)])
        zr.convert(layers, process_group=group)
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=alone)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        units = zr.StageBalancer(pipeline, optimizer, process_group=group, config=config)
        assert not units.has_settled
        units.balancer.move((2, 1))
        with units.at_home():
            assert layers[1].up.weight.shape[0] == 2 * WIDTH
        assert layers[1].up.weight.shape[0] != 2 * WIDTH
        units.close()
        pipeline.module.present = range(1)
        units = zr.StageBalancer(pipeline, optimizer, process_group=group, config=config)
        with units.at_home():
            units.step()
        assert units.balancer is None and units.has_settled
        units.leave((0, 1))
        units.attach()
        units.close()

    run_ranks(check, 2)


@on_ranks(2)
def test_a_pause_of_one_rank_outlasts_the_layers_that_a_stage_has(rank, group):
    layers = nn.ModuleList([Divided(Whole(), group)])
    zr.convert(layers, process_group=group)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=alone)
    config = zr.BalanceConfig(update_every=1, mode="zero-rd")
    units = zr.StageBalancer(pipeline, torch.optim.AdamW(pipeline.parameters()), config, process_group=group)

    def after_steps():
        for _ in range(2):
            units.step()
        return units.balancer.restraint.state

    if rank == 1:
        units.pause(advice=True)
    assert after_steps() == "advice"
    first = units.balancer
    units.leave((0, 0))
    units.attach()
    assert units.balancer is not first and units.balancer.restraint.state == "advice"
    assert after_steps() == "advice"
    units.resume()
    assert after_steps() == "on"
    units.close()


def test_clipping_is_by_the_norm_over_stages_and_over_the_shards_of_each(run_ranks):
    def clip(rank, group):
        stages, pipelines = [[dist.new_group(ranks) for ranks in own] for own in (([0, 1], [2, 3]), ([0, 2], [1, 3]))]
        stage, shard = divmod(rank, 2)
        layers = nn.ModuleList(Divided(one, stages[stage]) for one in whole_layers())
        pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=pipelines[shard])
        x, target = batch(0)
        pipeline.step(x, target=target)
        return [clip_grad_norm_(pipeline, 1e-3).item() for _ in range(2)]

    whole = nn.Sequential(*whole_layers())
    x, target = batch(0)
    nn.functional.mse_loss(whole(x), target).backward()
    norms = run_ranks(clip, 4)
    assert norms == [norms[0]] * 4
    assert norms[0] == [pytest.approx(nn.utils.clip_grad_norm_(whole.parameters(), 1e-3).item()), pytest.approx(1e-3)]


@on_ranks(4)
def test_units_of_a_tied_weight_stay(rank, group):
    stages, pipelines = [[dist.new_group(ranks) for ranks in groups] for groups in (([0, 1], [2, 3]), ([0, 2], [1, 3]))]
    stage, shard = divmod(rank, 2)
    for at_once in (True, False):
        layers = nn.ModuleList(Divided(whole, stages[stage]) for whole in whole_layers()[:2])
        layers[1].up.weight = layers[0].up.weight
        for part in [layers] if at_once else layers:
            zr.convert(part, process_group=stages[stage])
        pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=pipelines[shard])
        optimizer = torch.optim.AdamW(pipeline.parameters())
        if at_once:
            zr.StageBalancer(pipeline, optimizer, process_group=stages[stage]).close()
            continue
        with pytest.raises(
            ValueError, match=r"layers\.0\.up has the tied parameter layers\.0\.up\.weight, whose units"
        ):
            zr.StageBalancer(pipeline, optimizer, process_group=stages[stage])

"""A rank becomes slow and fast again while strategies are switched: it is shrunk, left out, and comes back."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.paced_layers import Pace, paced_cost_model, paced_layers, sequences_of
from helpers.pausing import Wishes
from helpers.strategies import mean_loss
from torch import nn

from lm_examples.llama import token_loss
from zeroresize.measure.clocks import CpuClock
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.policy.strategy.stragglers.candidates import StragglerCosts
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.placement.whole_layers import WholeLayers
from zeroresize.strategy.strategy_balancer import StrategyBalancer
from zeroresize.strategy.trainer import StrategyTrainer

NUM_BLOCKS, MAX_TOKENS = 2, 32
TOKEN_S = 1.0  # of a token in a whole block, forward and backward: so much that what changes take does not matter
RANGES = [LengthRange(6, Strategy(2, 2)), LengthRange(16, Strategy(1, 4))]
OF_TWO = [LengthRange(6, Strategy(2)), LengthRange(16, Strategy(1, 2))]
LIMITED = [replace(each, max_tokens=MAX_TOKENS) for each in RANGES]


class Clock(CpuClock):
    """Moves only when this rank's blocks compute, χ times as far as usual."""

    def __init__(self, pace):
        self._pace = pace

    def mark(self):
        return self._pace.taken_s


def layers_of(pace=None):
    return paced_layers(NUM_BLOCKS, pace or Pace(TOKEN_S))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 17, (6,), generator=generator).tolist()
    return sequences_of([*lengths, 16], step)


def optimizer_of(parameters):
    return torch.optim.AdamW([{"params": list(parameters)}], lr=1e-2)


def undivided_losses(num_steps):
    layers = layers_of()
    optimizer, losses = optimizer_of(nn.ModuleList(layers).parameters()), []
    for step in range(num_steps):
        loss = mean_loss(layers, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def cost_of(tensors, num_ranks=4):
    return paced_cost_model(tensors, NUM_BLOCKS, TOKEN_S, num_ranks)


def trainer_of(group, ranges=RANGES, pace=None, **options):
    strategies = [one.strategy for one in ranges]
    model = SwitchableModel(layers_of(pace), strategies=strategies, process_group=group, **options)
    return StrategyTrainer(model, optimizer_of(model.parameters()), ranges, loss=token_loss, max_tokens=MAX_TOKENS)


def training(group, ranges=RANGES, **options):
    pace = Pace(TOKEN_S)
    trainer = trainer_of(group, ranges, pace)
    cost = cost_of(trainer.model.tensors, group.size())
    return trainer, StrategyBalancer(trainer, cost, probe=pace.probe, clock=Clock(pace), **options), pace


@on_ranks(4)
def test_a_slow_rank_is_shrunk_left_out_and_comes_back_and_results_are_those_of_undisturbed_training(rank, group):
    records, losses = [], []
    trainer, balancer, pace = training(group, on_change=records.append)

    def run_until(kind, chi, most):
        pace.chi = chi if rank == 1 else 1.0
        for _ in range(most):
            losses.append(balancer.step(batch(len(losses))).loss)
            if records and records[-1].what == kind:
                return
        raise AssertionError(f"{kind} did not come: {[one.what for one in records]}, {balancer.what_if()}")

    for _ in range(5):
        losses.append(balancer.step(batch(len(losses))).loss)
    assert not records and balancer.what_if()[0].candidate.kind == "stay"
    run_until("shares", 1.4, 30)
    status = balancer.status()
    assert status.kind == "strategies" and status.ranks[1].speed == pytest.approx(1 / 1.4, rel=0.1) and str(status)
    assert all(
        strategy.ranks == original.strategy.ranks for strategy, original in zip(balancer.in_force, RANGES, strict=True)
    )
    balancer.load_state_dict(json.loads(json.dumps(balancer.state_dict())))
    run_until("leave out", 8.0, 30)
    assert [each.share == 0.0 for each in balancer.status().ranks] == [False, True, False, False]
    assert records[-1].left_out == (1,) and trainer.model.optimizer_strategy == balancer.in_force[0]
    assert not any(1 in one.ranks for one in balancer.in_force)
    assert rank != 1 or not list(trainer.model.parameters())
    for _ in range(12):  # it stays where it is while it is slow
        losses.append(balancer.step(batch(len(losses))).loss)
    assert len(records) == 2
    run_until("original", 1.0, 60)
    assert [one.strategy for one in trainer.ranges] == [one.strategy for one in RANGES]
    for _ in range(2):
        losses.append(balancer.step(batch(len(losses))).loss)
    assert trainer.model.strategies == [one.strategy for one in RANGES]  # the others are forgotten
    by_rank = gathered(group, (losses, [(one.step, one.what) for one in records], [one.to_dict() for one in records]))
    losses, decisions, records = by_rank[0]
    assert all(one[1] == decisions for one in by_rank)
    assert losses == pytest.approx(undivided_losses(len(losses)), rel=1e-10)
    for record in json.loads(json.dumps(records)):
        assert record["kind"] == "strategies" and record["is_made"] and record["expected_step_s"] < record["step_s"]
    assert records[-1]["moved_bytes"] > 0


@pytest.mark.slow
@on_ranks(2)
def test_paused_by_one_rank_strategies_stay_and_are_advised_until_it_is_over(rank, group, *, tmp_path):
    wishes, records, losses = Wishes(rank, tmp_path, by_file=False), [], []
    with wishes.read():
        _, balancer, pace = training(group, OF_TWO, on_change=records.append)

    def run(state, num_steps):
        wishes.say(balancer, state)
        for _ in range(num_steps):
            losses.append(balancer.step(batch(len(losses))).loss)
        return balancer.restraint.state, [(each.step, each.what, each.is_made) for each in records]

    states = [run("on", 5)]
    pace.chi = 1.4 if rank == 1 else 1.0
    states += [run("off", 2), run("off", 12), run("advice", 20)]
    stayed = balancer.in_force
    states += [run("on", 4)]
    by_rank = gathered(group, states)
    assert by_rank[0] == by_rank[1] and [state for state, _ in states] == ["on", "off", "off", "advice", "on"]
    assert stayed == tuple(each.strategy for each in OF_TWO) != balancer.in_force
    *_, (_, off), (_, advised), (_, made) = states
    assert not off and advised and not any(is_made for *_, is_made in advised)
    assert len(advised) == len({what for _, what, _ in advised}), "each is told once"
    assert made[-1][2] and made[-1][0] <= 5 + 2 + 12 + 20 + 2, "at once, by what was learned"
    assert losses == pytest.approx(undivided_losses(len(losses)), rel=1e-10)


@on_ranks(2)
def test_ranks_must_agree_on_all_of_the_costs_and_ranges_and_the_optimizers_strategy_is_that_of_a_range(rank, group):
    for others in ({"links": LinkSpeeds(1e9, 2e9)}, {"nodes": (0, 1)}, {"optimizer_ratio": 3.0}, {"up_to": 5}):
        options, trainer = {} if rank else dict(others), trainer_of(group, OF_TWO)
        if "up_to" in options:
            first, last = trainer.ranges
            trainer.use([replace(first, up_to=options.pop("up_to")), last])
        with pytest.raises(ValueError, match="ranges" if "up_to" in others else next(iter(others))):
            StrategyBalancer(trainer, replace(cost_of(trainer.model.tensors, 2), **options), probe=lambda: 1.0)
    trainer = trainer_of(group, OF_TWO, optimizer_strategy=Strategy(1, 1, 2))
    with pytest.raises(ValueError, match="strategy of no range"):
        StrategyBalancer(trainer, cost_of(trainer.model.tensors, 2))


def test_a_rank_is_expected_to_take_its_share_of_its_replicas_tokens():
    tensors = tuple(one.spec for one in WholeLayers(layers_of(), None).tensors)
    costs = StragglerCosts(cost_of(tensors), LIMITED, optimizer_strategy=0)
    shrunk = (Strategy(2, 2, shares=(3, 1)), Strategy(1, 4))
    # Two sequences of 4 tokens, one a replica; one of 12 that all four share.
    assert costs.rank_s(shrunk, [4, 4, 12], 0) == pytest.approx(NUM_BLOCKS * TOKEN_S * (4 * 0.75 + 12 / 4))
    assert costs.rank_s(shrunk, [4, 4, 12], 3) == pytest.approx(NUM_BLOCKS * TOKEN_S * (4 * 0.25 + 12 / 4))
    # 12 units of 5 ranks: two have 3, which is 5 / 4 of an equal share; costs are those of tp = 4, the last known.
    of_five = StragglerCosts(cost_of(tensors, 5), LIMITED, optimizer_strategy=0)
    fifth = (Strategy(1, 5, shares=(2, 1, 1, 1, 1)), Strategy(1, 5, shares=(1.000001, 1, 1, 1, 1)))
    assert of_five.rank_s(fifth, [12], 0) == pytest.approx(NUM_BLOCKS * 12 * TOKEN_S / 4 * 5 / 4, rel=1e-6)
    costs.expect([[4, 4, 12]])
    even = (1.0,) * 4
    assert costs.range_s(0, shrunk[0], even) == pytest.approx(NUM_BLOCKS * TOKEN_S * 4 * 0.75)
    assert costs.range_s(1, Strategy(1, 3, ranks=(0, 1, 2), shares=(2, 1, 1)), even) < math.inf
    tight = StragglerCosts(cost_of(tensors), LIMITED, optimizer_strategy=0, limit_bytes=10.0)
    ours = [one.strategy for one in RANGES]
    assert tight.fits(1, ours[1], ours[0]) and tight.switches_fit(ours)  # it is what the caller does
    assert not tight.fits(0, shrunk[0], shrunk[0]) and not tight.switches_fit([shrunk[0], ours[1]])
    assert not tight.fits(1, ours[1], shrunk[0])  # beside another strategy of the optimizer more may be needed

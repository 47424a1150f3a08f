"""A rank is slow on the real clock: it gets less to do while it is, and what it had when it has recovered."""

import pytest
import torch
from helpers.paced_layers import Pace, paced_cost_model, paced_layers, sequences_of
from torch import nn

from lm_examples.llama import token_loss
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.strategy_balancer import StrategyBalancer
from zeroresize.strategy.trainer import StrategyTrainer

NUM_BLOCKS, MAX_TOKENS, SLOW_RANK, CHI = 2, 32, 1, 4.0
TOKEN_S = 0.012  # what ranks compute besides, and wait for a core to do it, is to be small beside what they sleep
HOME = (Strategy(2, 2), Strategy(1, 4))
#: Other work on the machine makes ranks look slow by a little, and moves for that do not belong here.
MIN_SAVING = 0.1


def batch(step):
    """Few micro-batches, since each takes something besides: one of each replica, and a long one of all ranks."""
    short, long = torch.randint(0, 4, (2,), generator=torch.Generator().manual_seed(step)).tolist()
    return sequences_of([3 + short, 6 - short, 13 + long], step)


def training(group, pace):
    ranges = [LengthRange(up_to, strategy) for up_to, strategy in zip((6, 16), HOME, strict=True)]
    model = SwitchableModel(paced_layers(NUM_BLOCKS, pace), strategies=HOME, process_group=group)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=1e-2)
    return StrategyTrainer(model, optimizer, ranges, loss=token_loss, max_tokens=MAX_TOKENS)


@pytest.mark.exhaustive  # by real time, which other work on the machine changes
def test_a_rank_that_really_is_slow_gets_less_while_it_is_and_losses_are_those_of_a_training_without(run_ranks):
    def train(rank, group):
        pace, chis, losses, taken_s, records = Pace(TOKEN_S, sleeps=True), [], [], [], []
        trainer = training(group, pace)
        cost = paced_cost_model(trainer.model.tensors, NUM_BLOCKS, TOKEN_S, 4)
        balancer = StrategyBalancer(trainer, cost, min_saving=MIN_SAVING, probe=pace.probe, on_change=records.append)

        def step(chi):
            pace.chi, before_s = chi if rank == SLOW_RANK else 1.0, pace.taken_s
            losses.append(balancer.step(batch(len(losses))).loss)
            chis.append(chi)
            taken_s.append(pace.taken_s - before_s)

        def steps_until(condition, chi, most):
            for _ in range(most):
                step(chi)
                if condition():
                    return
            raise AssertionError(f"{[(one.step, one.what) for one in records]}, {balancer.what_if()}")

        for _ in range(5):
            step(1.0)
        assert balancer.in_force == HOME and not records
        steps_until(lambda: balancer.in_force != HOME, CHI, 20)
        changed = len(losses)
        for _ in range(4):
            step(CHI)
        recovered = len(losses)
        steps_until(lambda: balancer.in_force == HOME, 1.0, 60)
        step(1.0)
        balancer.close()
        return losses, chis, taken_s, (changed, recovered)

    def train_without(rank, group, chis):
        pace, losses, taken_s = Pace(TOKEN_S, sleeps=False), [], []
        trainer = training(group, pace)
        for number, chi in enumerate(chis):
            pace.chi, before_s = chi if rank == SLOW_RANK else 1.0, pace.taken_s
            losses.append(trainer.step(batch(number)).loss)
            taken_s.append(pace.taken_s - before_s)
        return losses, taken_s

    balanced = run_ranks(train, 4, timeout_s=120)
    losses, chis, _, (changed, recovered) = balanced[0]
    assert all(one[0] == losses and one[3] == (changed, recovered) for one in balanced)
    unbalanced = run_ranks(lambda rank, group: train_without(rank, group, chis), 4)
    assert losses == pytest.approx(unbalanced[0][0], rel=1e-10)
    # What the busiest rank was given in the same steps, counted: so no clock is asked.
    for first, last, least, most in ((0, changed, 1.0, 1.0), (changed, recovered, 0.0, 0.7), (-1, None, 1.0, 1.0)):
        balanced_s, unbalanced_s = (
            sum(max(step) for step in zip(*(one[-2 + is_without][first:last] for one in run), strict=True))
            for is_without, run in enumerate((balanced, unbalanced))
        )
        assert least * (1 - 1e-9) <= balanced_s / unbalanced_s <= most * (1 + 1e-9)


def test_the_slow_rank_is_slow_by_the_clock():
    pace = Pace(TOKEN_S, sleeps=True)
    pace.chi = CHI
    assert pace.probe() >= CHI * 0.002  # sleeping takes at least as long
    x = nn.Parameter(torch.zeros(1, 4, dtype=torch.float64))
    paced_layers(1, pace)[1](x, None).sum().backward()
    assert pace.taken_s == pytest.approx(CHI * TOKEN_S)

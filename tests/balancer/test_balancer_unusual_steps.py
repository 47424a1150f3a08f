"""What is not usual training: evaluations, steps without the layers, late ranks, balancers one after another."""

import copy
import gc

import pytest
import torch
from helpers.processes import caught_log_lines, for_each
from helpers.virtual_training import FEATURES, Run
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.config.keys import PRIORITIES

pytestmark = pytest.mark.same_ranks


def slow_rank_1(run, rank, chi=4.0):
    run.time.chi = chi if rank == 1 else 1.0
    return run


@torch.no_grad()
def evaluate(run):
    run.model.eval()
    run.model(torch.randn(200, FEATURES))
    run.model.train()


def test_products_of_an_evaluation_are_not_those_of_the_step_it_falls_into(run_ranks):
    def train(rank, group):
        run = slow_rank_1(Run(group, update_every=1), rank)
        seen = []
        for evaluates in (False, False, True, False, True):
            if evaluates:
                evaluate(run)
            run.steps(1)
            seen.append(run.balancer.metrics()["balance/gemm_s"])
        return seen

    for seen in run_ranks(train, 2):
        assert seen == pytest.approx([seen[0]] * 5, rel=0.05)


def test_an_interval_without_the_balanced_layers_tells_nothing_and_breaks_nothing(run_ranks):
    @for_each([("off",), ("zero-rd",), ("semi",)])
    def train(rank, group, mode):
        run = slow_rank_1(Run(group, mode=mode, update_every=2), rank)
        run.steps(8)
        for _ in range(8):  # only another part of the model trains
            run.time.now += 0.01
            run.balancer.step()
        run.steps(8)
        assert (run.balancer.plan.ranks[1].spared > 0.3) == (mode != "off")

    run_ranks(train, 2)


def steps(run, num_steps, late_s, num_batches=1):
    for _ in range(num_steps):
        for _ in range(num_batches):
            run.time.now += 0.01 + late_s
            run.model(run.x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.balancer.step()


def test_a_slow_data_loader_moves_lends_and_prunes_nothing_and_is_said_once(run_ranks):
    cases = [("exact", 1), ("semi", 3), ("zero-rd", 1)]

    @for_each(cases)
    def train(rank, group, mode, num_batches):
        with caught_log_lines() as lines:
            run = Run(group, mode=mode, update_every=2)
            steps(run, 16, 0.05 if rank == 1 else 0.0, num_batches)
        shares = [(one.pruned, one.lent, one.owned) for one in run.balancer.plan.ranks]
        late = [line for line in lines if "come late to the model" in line]
        return shares, run.balancer.metrics()["balance/busy_s"], late

    for (_, num_batches), first, second in zip(cases, *run_ranks(train, 2), strict=True):
        (shares, busy_s, lines), (others, late_busy_s, nothing) = first, second
        assert shares == others == [(0.0, 0.0, 1.0)] * 2
        assert late_busy_s - busy_s == pytest.approx(0.05 * num_batches)  # what a user measures
        assert nothing == [] and len(lines) == 1
        assert f"rank 1 by {50 * num_batches} ms" in lines[0]


LEAVES_HOOKS = [{"pruned_update": "freeze"}, *({"priority": priority} for priority in PRIORITIES)]


def hooks_of(run):
    optimizer = run.optimizer
    watched = [layer.watch_input for layer in (run.model.up, run.model.down) if layer.watch_input is not None]
    return [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks, *watched]


def test_a_balancer_that_was_dropped_leaves_no_hooks(run_ranks):
    @for_each([(config,) for config in LEAVES_HOOKS])
    def train(rank, group, config):
        run = Run(group, mode="zero-pri", **config)
        attached = hooks_of(run)
        run.steps(run.config.update_every)  # a step that is sampled begins
        del run.balancer
        gc.collect()
        run.balancer = zr.Balancer(run.model, run.optimizer, zr.BalanceConfig(mode="off"), process_group=group)
        assert len(hooks_of(run)) == len(hooks_of(Run(group, mode="off"))) < len(attached)

    run_ranks(train, 2)


def forward_without_gradients(run):
    with torch.no_grad():
        run.model(run.x)


def recompute(run):
    checkpoint(run.model, run.x.clone().requires_grad_(), use_reentrant=True).square().mean().backward()
    run.optimizer.zero_grad()


@pytest.mark.slow
def test_a_model_may_be_loaded_when_its_balancer_has_been_made(run_ranks):
    """With a forced ratio loans are in force at once, and whoever loads pretrained weights has no balancer's state."""

    @for_each([(use,) for use in (lambda _: None, forward_without_gradients, recompute)])
    def train(rank, group, use_first):
        pretrained = Run(group, mode="off")
        pretrained.steps(5)
        weights, outcomes = copy.deepcopy(pretrained.model.state_dict()), []
        for config in ({"mode": "off"}, {"mode": "mig", "ratio": 0.5, "ranks": [0]}):
            run = Run(group, **config)
            run.model.load_state_dict(weights)
            use_first(run)
            outcomes.append(run.steps(3))
        assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-5)

    run_ranks(train, 2)

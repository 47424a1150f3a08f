"""A balancer's beginning and end: which ranks and models it takes, and what is left when it closes or dies."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines
from helpers.virtual_training import Pair, Run

import zeroresize as zr

pytestmark = pytest.mark.same_ranks


def test_a_balancer_can_be_closed_and_made_anew_but_not_twice_at_once(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.updates(2)
        make = lambda: zr.Balancer(run.model, run.optimizer, process_group=group, config=run.config)  # noqa: E731
        with pytest.raises(ValueError, match=r"close\(\) that one first"):
            make()
        run.balancer.pin(1, 0.5)
        run.balancer.close()
        with pytest.raises(RuntimeError, match="is closed"):
            run.balancer.step()
        assert run.model.up.plan is run.model.down.plan is None, "the layers are as they were"
        if rank == 1:
            time.sleep(0.5)  # nobody waits for the others between two balancers
        run.balancer = make()
        run.time.chi = 4.0 if rank == 1 else 1.0
        return run.updates(3)[-1][1] > 0.5

    assert run_ranks(train, 2, timeout_s=20) == [True, True]


def test_what_one_rank_cannot_set_up_the_others_hear_at_once_and_all_may_try_again(run_ranks):
    def build(rank, group):
        run = Run(group)
        run.balancer.close()
        of_some = torch.optim.SGD(run.model.up.parameters(), lr=0.1)
        began = time.monotonic()
        expected = "ranks [1] of the group failed to agree on what to balance: the optimizer does not step the weights"
        with pytest.raises((RuntimeError, ValueError)) as error:
            zr.Balancer(run.model, of_some if rank == 1 else run.optimizer, run.config, process_group=group)
        assert (expected in str(error.value)) == (rank == 0), error.value
        with pytest.raises(ValueError, match="do not agree on update_every: rank 0: 3; rank 1: 4"):
            Run(group, update_every=3 + rank)
        zr.Balancer(run.model, run.optimizer, run.config, process_group=group).close()
        return time.monotonic() - began < 10.0

    assert run_ranks(build, 2, timeout_s=20) == [True, True]


def test_what_does_not_fit_together_is_refused(run_ranks):
    """Another group than the layers', also one of a single rank, which would never balance; an optimizer of other
    weights, as made before the layers were split; and a model without parallel layers."""

    def build(rank, group):
        pair = dist.new_group([0, 1])
        alone = [dist.new_group([own]) for own in range(3)][rank]
        for given in ({}, {"process_group": group}):
            with pytest.raises(ValueError, match=r"no layer that can be balanced\. Wanted are .*from_linear"):
                zr.Balancer(torch.nn.Linear(4, 4), None, **given)
        if rank < 2:
            config = zr.BalanceConfig(mode="zero-pri")
            with pytest.raises(ValueError, match="has one rank, and layer up is split over 2"):
                zr.convert(Pair(pair), process_group=alone)
            model = zr.convert(Pair(pair), process_group=pair)
            for other in (group, alone):
                with pytest.raises(ValueError, match="layer up belongs to another process group"):
                    zr.Balancer(model, None, process_group=other, config=config)
            stale = torch.optim.SGD(Pair(pair).parameters(), lr=0.1)
            with pytest.raises(ValueError, match="does not step the weights of up, down, nor any other layer's"):
                zr.Balancer(model, stale, process_group=pair, config=config)

    run_ranks(build, 3)


def test_nothing_measured_is_said_as_that_and_as_evaluation_where_it_is_that(run_ranks):
    def train(rank, group):
        lines = {}
        for is_training in (True, False):
            model = Pair(group).train(is_training)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            config = zr.BalanceConfig(mode="zero-pri", update_every=2)
            balancer = zr.Balancer(model, optimizer, config, process_group=group)
            for layer in (model.up, model.down):
                layer.forward = lambda x, layer=layer: torch.nn.functional.linear(x, layer.weight)
            with caught_log_lines() as lines[is_training]:
                for _ in range(4):
                    balancer.step()
            balancer.close()
        return lines

    for lines in run_ranks(train, 2):
        (measured,) = [line for line in lines[True] if "no converted layer" in line]
        (evaluated,) = [line for line in lines[False] if "no converted layer" in line]
        assert measured.startswith("nothing was measured in 2 steps") and "eval" not in measured
        assert evaluated.endswith("layers in eval() compute in full and are not balanced")

"""Mode "semi" on real ranks: a straggler lends what others have time for and prunes the rest."""

import pytest
import torch
from helpers.states import held_by
from helpers.virtual_training import Run


def slow_run(group, chis, **config):
    return Run(group, chi=dict(enumerate(chis)), mode="semi", update_every=5, **config)


@pytest.mark.parametrize("chis", [(1.0, 4.0), (1.0, 8.0, 3.0)])
def test_stragglers_are_relieved_to_the_normal_ranks_time_and_the_others_filled_up(run_ranks, chis):
    def train(rank, group):
        run = slow_run(group, chis)
        run.updates(8)
        began_s = run.time.now
        run.steps(1)
        busy_s = run.time.now - began_s
        metrics = run.balancer.metrics()
        plan = run.balancer.plan
        run.time.chi = 1.0
        run.updates(5)
        after = [(own.pruned, own.lent) for own in run.balancer.plan.ranks]
        shares = [metrics[f"balance/{name}_share"] for name in ("pruned", "lent", "borrowed")]
        return busy_s, shares, plan, after

    results = run_ranks(train, len(chis))
    normal_s = results[0][0]
    for rank, (busy_s, (pruned, lent, borrowed), plan, after) in enumerate(results):
        assert plan == results[0][2]
        assert after == [(0.0, 0.0)] * len(chis)
        assert busy_s <= 1.1 * normal_s
        if chis[rank] == 1.0:
            assert borrowed > 0 and pruned == lent == 0
        else:
            assert pruned > 0 and borrowed == 0
    assert sum(shares[1] for _, shares, *_ in results) == pytest.approx(results[0][1][2], abs=0.1)


def test_what_is_lent_is_most_important_and_what_is_pruned_least(run_ranks):
    def train(rank, group):
        run = slow_run(group, (1.0, 4.0), ageing=0.0, tolerance=0.5)
        run.steps(5)
        run.balancer.epoch_end()  # from here on the importance of every column is known
        run.updates(6)
        run.steps(1)  # which may be one at full work
        w_vars = []
        for name, layer in (("up", run.model.up), ("down", run.model.down)):
            if layer.plan is not None:
                state = held_by(run.balancer.state_dict(), f"group 0-1 rank {rank}")
                w_var = torch.tensor(state["selector"]["columns"][name]["w_var"])
                w_vars.append([w_var[columns] for columns in (layer.plan.pruned, layer.plan.keep_P, layer.plan.lent)])
        return w_vars

    layers = run_ranks(train, 2)[1]
    assert layers
    for pruned, kept, lent in layers:
        assert lent.numel() and pruned.numel()
        assert pruned.max() <= kept.min() and kept.max() <= lent.min()

"""The whole way from measured times, or from a pin, to pruned products."""

import pytest
import torch
from helpers.virtual_training import FEATURES, Run

pytestmark = [pytest.mark.same_ranks, pytest.mark.versions]


def test_a_straggler_is_found_relieved_and_let_go_and_all_ranks_agree(run_ranks):
    def train(rank, group):
        run = Run(group)
        trace = run.updates(3)
        run.time.chi = 4.0 if rank == 1 else 1.0
        trace += run.updates(6)
        busy = {key: run.balancer.metrics()[f"balance/{key}"] for key in ("busy_s", "pruned_share", "is_straggler")}
        run.time.chi = 1.0
        return trace + run.updates(4), busy

    (trace, _), *others = results = run_ranks(train, 3)
    assert all(other == trace for other, _ in others)
    normal = [ratios for update in trace for rank, ratios in enumerate(update) if rank != 1]
    assert set(normal) == {0.0}
    straggler = [update[1] for update in trace]
    assert straggler[:3] == [0.0] * 3
    settled = straggler[5:9]
    assert min(settled) > 0.5 and max(settled) - min(settled) <= 0.05
    assert straggler[11:] == [0.0, 0.0], "let go within three updates after it recovers"
    assert results[1][1]["pruned_share"] == pytest.approx(settled[-1], abs=1 / FEATURES)
    assert results[1][1]["is_straggler"] == 1.0 and results[0][1]["is_straggler"] == 0.0
    assert results[1][1]["busy_s"] > 2 * results[0][1]["busy_s"], "full-work time, though it prunes"


def test_forced_ratio_is_in_force_from_the_first_iteration_and_the_lineage_tells_it(run_ranks):
    def train(rank, group):
        run = Run(group, ratio=0.5, ranks=[1])
        before_first = run.pruned()
        weight = run.model.up.weight.detach().clone()
        run.steps(1)
        run.model(run.x).sum().backward()
        zero_columns = (run.model.up.weight.grad == 0).all(dim=0).nonzero().squeeze(1)
        return before_first, zero_columns, weight.shape

    plain, forced = run_ranks(train, 2)
    assert plain[0] == {"up": None, "down": None} and plain[1].numel() == 0
    assert forced[0]["up"].numel() == FEATURES // 2
    assert torch.equal(forced[0]["up"], forced[1])


def test_metrics_are_flat_numbers_with_the_documented_names(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.updates(2)
        return run.balancer.metrics()

    decided = ["ratio", *(f"{name}_share" for name in ("pruned", "lent", "borrowed", "owned")), "relieved"]
    decided += ["group_pruned", "is_straggler", "predicted_step_s", "bound_s", "products_bound_s", "moving_rest"]
    names = [*decided, "busy_s", "gemm_s", "least_busy_s", "balancing_s", "statistic_bytes", "migration_bytes"]
    for metrics in run_ranks(train, 2):
        assert sorted(metrics) == sorted(f"balance/{name}" for name in names)
        assert all(isinstance(value, float) for value in metrics.values())

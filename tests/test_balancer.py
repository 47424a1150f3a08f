"""The whole way from measured times to pruned products, on real ranks with a clock that counts multiplications."""

import types

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import RankFailure
from torch import nn

import zeroresize as zr
from zeroresize import pretest, timing
from zeroresize.probe import Probe

FEATURES = 48


class VirtualTime(Probe):
    """A clock that only products move: χ × FLOPs a multiplication, and a little for what surrounds it."""

    def __init__(self):
        self.now, self.chi = 0.0, 1.0

    def perf_counter(self):
        return self.now

    def gemm_ends(self, operands):
        one, other = operands[:2]
        outputs = other.shape[0] if one.shape[-1] == other.shape[-1] else other.shape[-1]
        self.now += self.chi * one.numel() * outputs * 1e-6

    def product_ends(self):
        self.now += 0.001


class Pair(nn.Module):
    """Column-parallel, GELU, row-parallel: what a transformer's feed-forward part is."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        up, down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
        self.up = zr.ColumnParallelLinear.from_linear(up, process_group=group)
        self.down = zr.RowParallelLinear.from_linear(down, process_group=group)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Run:
    """A model in training whose time is virtual."""

    def __init__(self, group, **config):
        self.config = zr.BalanceConfig(**{"mode": "zero-rd", "update_every": 3, **config})
        self.time = VirtualTime()
        for module in (timing, pretest):
            module.time = types.SimpleNamespace(perf_counter=self.time.perf_counter)
        self.model = zr.convert(Pair(group), process_group=group, config=self.config)
        for layer in (self.model.up, self.model.down):
            layer.probes.add_innermost(self.time)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.balancer = zr.Balancer(self.model, self.optimizer, process_group=group, config=self.config)
        self.x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1))

    def steps(self, number):
        for _ in range(number):
            self.time.now += 0.01  # what is not a product
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.balancer.step()

    def updates(self, number):
        """γ of every rank after each update."""
        trace = []
        for _ in range(number):
            self.steps(self.config.update_every)
            trace.append([rank.ratio for rank in self.balancer.plan.ranks])
        return trace

    def pruned(self):
        return {name: self.balancer.lineage.pruned(name, "w") for name in ("up", "down")}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_straggler_is_found_relieved_and_let_go_and_all_ranks_agree(run_ranks, num_ranks):
    def train(rank, group):
        run = Run(group)
        trace = run.updates(3)
        run.time.chi = 4.0 if rank == 1 else 1.0
        trace += run.updates(6)
        busy = {key: run.balancer.metrics()[f"balance/{key}"] for key in ("busy_s", "pruned_share", "is_straggler")}
        run.time.chi = 1.0
        return trace + run.updates(4), busy

    (trace, _), *others = results = run_ranks(train, num_ranks)
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


def test_off_measures_and_computes_in_full(run_ranks):
    def train(rank, group):
        run = Run(group, mode="off")
        run.time.chi = 4.0 if rank == 1 else 1.0
        trace = run.updates(4)
        return trace, run.pruned(), run.balancer.metrics()

    for rank, (trace, pruned, metrics) in enumerate(run_ranks(train, 2)):
        assert trace == [[0.0, 0.0]] * 4
        assert pruned == {"up": None, "down": None}
        assert metrics["balance/is_straggler"] == rank
        assert metrics["balance/busy_s"] > 0.01


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


def test_plan_changes_only_in_step(run_ranks):
    def train(rank, group):
        run = Run(group, update_every=1)
        run.time.chi = 4.0 if rank == 1 else 1.0
        plans = []
        for _ in range(4):
            before = run.model.up.plan
            loss = run.model(run.x).square().mean() + run.model(run.x).square().mean()
            after_forward = run.model.up.plan
            loss.backward()
            run.optimizer.step()
            plans.append((before is after_forward) and (after_forward is run.model.up.plan))
            run.balancer.step()
        return all(plans) and run.model.up.plan is not None if rank == 1 else all(plans)

    assert run_ranks(train, 2) == [True, True]


def test_columns_are_drawn_once_an_epoch_and_more_of_them_are_a_superset(run_ranks):
    def train(rank, group):
        run = Run(group, iters_per_epoch=2)
        sets = []
        for ratio in (0.25, 0.5):
            run.balancer.pin(1, ratio)
            sets.append(set(run.pruned()["up"].tolist()) if rank == 1 else set())
        run.steps(1)
        sets.append(set(run.pruned()["up"].tolist()) if rank == 1 else set())
        run.steps(1)
        sets.append(set(run.pruned()["up"].tolist()) if rank == 1 else set())
        return sets

    few, many, same_epoch, next_epoch = run_ranks(train, 2)[1]
    assert few < many and len(many) == FEATURES // 2
    assert same_epoch == many
    assert next_epoch != many and len(next_epoch) == len(many)


def test_pin_holds_against_measurements_until_released(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.balancer.pin(0, 0.5)
        run.updates(3)
        pinned = run.balancer.metrics()["balance/ratio"]
        run.balancer.release()
        with pytest.raises(ValueError, match="rank=2 is outside"):
            run.balancer.pin(2, 0.5)
        with pytest.raises(ValueError, match=r"ratio=1.0"):
            run.balancer.pin(0, 1.0)
        with pytest.raises(ValueError, match="mode"):
            Run(group, mode="off").balancer.pin(0, 0.5)
        return pinned, run.balancer.metrics()["balance/ratio"]

    assert run_ranks(train, 2) == [(0.5, 0.0), (0.0, 0.0)]


def test_a_saved_balancer_goes_on_with_the_same_plans(run_ranks, tmp_path):
    def train(rank, group):
        def slow_run():
            run = Run(group)
            run.time.chi = 4.0 if rank == 1 else 1.0
            return run

        whole = slow_run()
        expected = whole.updates(6)
        first = slow_run()
        first.updates(3)
        dcp.save({"balancer": first.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        resumed = slow_run()
        dcp.load({"balancer": resumed.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        plan_at_once = [p.ratio for p in resumed.balancer.plan.ranks]
        return expected, plan_at_once, resumed.updates(3)

    for expected, plan_at_once, resumed in run_ranks(train, 2):
        assert plan_at_once == expected[2]
        assert np.array(resumed) == pytest.approx(np.array(expected[3:]), abs=0.02)


def test_state_of_other_layers_is_refused(run_ranks):
    def load(rank, group):
        run = Run(group)
        state = run.balancer.state_dict()
        with pytest.raises(ValueError, match="another model"):
            run.balancer.load_state_dict({**state, "layers": {"up": 7}})

    run_ranks(load, 2)


def test_a_model_that_was_not_converted_is_refused(run_ranks):
    def build(rank, group):
        model = Pair(group)
        with pytest.raises(ValueError, match="no converted layers"):
            zr.Balancer(model, None, process_group=group, config=zr.BalanceConfig())
        with pytest.raises(ValueError, match="process_group=None"):
            zr.Balancer(model, None, process_group=None, config=zr.BalanceConfig())

    run_ranks(build, 2)


def test_one_rank_has_nothing_to_balance(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.steps(7)
        return run.balancer.metrics()["balance/ratio"]

    assert run_ranks(train, 1) == [0.0]


def test_closed_balancer_leaves_layers_as_they_were(run_ranks):
    def train(rank, group):
        run = Run(group, ratio=0.5, ranks="all")
        run.balancer.close()
        return run.pruned(), run.model.up.plan

    assert run_ranks(train, 2) == [({"up": None, "down": None}, None)] * 2


def test_metrics_are_flat_numbers_with_the_documented_names(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.updates(2)
        return run.balancer.metrics()

    shares = ["ratio", "pruned_share", "lent_share", "borrowed_share", "is_straggler"]
    names = [*shares, "busy_s", "products_s", "least_busy_s", "overhead_s"]
    for metrics in run_ranks(train, 2):
        assert sorted(metrics) == sorted(f"balance/{name}" for name in names)
        assert all(isinstance(value, float) for value in metrics.values())


def test_a_rank_that_dies_in_training_ends_the_others(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.updates(2)
        if rank == 1:
            raise KeyError("dies in the middle of an epoch")
        run.updates(2)

    with pytest.raises(RankFailure, match="dies in the middle of an epoch"):
        run_ranks(train, 2, timeout_s=30)

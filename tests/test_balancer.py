"""The whole way from measured times to pruned products, on real ranks with a clock that counts multiplications."""

import time
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import RankFailure
from torch import nn

import zeroresize as zr
from zeroresize import pretest, timing
from zeroresize.collectives import NumbersGroup
from zeroresize.probe import Probe

FEATURES = 48


class VirtualTime(Probe):
    """A clock that only products move: χ × FLOPs a multiplication, and ``gather_s`` where columns are gathered."""

    def __init__(self, gather_s):
        self.now, self.chi, self.gather_s = 0.0, 1.0, gather_s
        self._is_resized = False

    def perf_counter(self):
        return self.now

    def gemm_ends(self, operands):
        one, other = operands[:2]
        self._is_resized = {one.shape[-1], other.shape[-1]}.isdisjoint({FEATURES, 2 * FEATURES, 4 * FEATURES})
        outputs = other.shape[0] if one.shape[-1] == other.shape[-1] else other.shape[-1]
        self.now += self.chi * one.numel() * outputs * 1e-6

    def product_ends(self):
        self.now += self.gather_s if self._is_resized else 0.0


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

    def __init__(self, group, gather_s=0.001, **config):
        self.config = zr.BalanceConfig(**{"mode": "zero-rd", "update_every": 3, **config})
        self.time = VirtualTime(gather_s)
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


@pytest.mark.parametrize("steps_before", [9, 8])  # at an update, and just before one
def test_a_saved_balancer_goes_on_with_the_same_plans(run_ranks, tmp_path, steps_before):
    """Also where gathering is dear: what pruning costs is measured again in the new process."""

    def train(rank, group):
        def slow_run():
            run = Run(group, gather_s=0.02)
            run.time.chi = 4.0 if rank == 1 else 1.0
            return run

        first = slow_run()
        first.steps(steps_before)
        saved = [p.ratio for p in first.balancer.plan.ranks]
        dcp.save({"balancer": first.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        first.steps(9)  # before another run takes the clock
        resumed = slow_run()
        dcp.load({"balancer": resumed.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        at_once = [p.ratio for p in resumed.balancer.plan.ranks]
        resumed.steps(9)
        later = [[p.ratio for p in run.balancer.plan.ranks] for run in (first, resumed)]
        return saved, at_once, *later

    for saved, at_once, uninterrupted, resumed in run_ranks(train, 2):
        assert at_once == saved and saved[1] > 0.5
        assert np.array(resumed) == pytest.approx(np.array(uninterrupted), abs=0.02)


def test_pins_are_saved_and_a_mode_that_does_not_prune_ignores_them(run_ranks, tmp_path):
    def train(rank, group):
        run = Run(group)
        run.balancer.pin(1, 0.25)
        dcp.save({"balancer": run.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        ratios = []
        for mode in ("zero-rd", "off"):
            resumed = Run(group, mode=mode)
            dcp.load({"balancer": resumed.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
            ratios.append(resumed.balancer.metrics()["balance/ratio"])
        return ratios

    assert run_ranks(train, 2) == [[0.0, 0.0], [0.25, 0.0]]


def test_two_tensor_parallel_groups_balance_and_save_apart(run_ranks, tmp_path):
    """DP × TP: ranks 0, 1 and 2, 3; only rank 3 is slow. Rank 0 knows a group more than the others, as loggers do."""

    def train(rank, group):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        own = groups[rank // 2]
        run = Run(own)
        run.time.chi = 4.0 if rank == 3 else 1.0
        trace = run.updates(4)
        dcp.save({"balancer": run.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        resumed = Run(own)
        dcp.load({"balancer": resumed.balancer}, checkpoint_id=str(tmp_path / "checkpoint"))
        return trace[-1], [p.ratio for p in resumed.balancer.plan.ranks]

    for rank, (ratios, resumed) in enumerate(run_ranks(train, 4)):
        assert resumed == ratios
        assert (ratios[1] > 0.5) == (rank >= 2) and ratios[0] == 0.0


def test_a_balancer_can_be_closed_and_made_anew_but_not_twice_at_once(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.updates(2)
        make = lambda: zr.Balancer(run.model, run.optimizer, process_group=group, config=run.config)  # noqa: E731
        with pytest.raises(ValueError, match=r"close\(\) that one first"):
            make()
        run.balancer.close()
        if rank == 1:
            time.sleep(0.5)  # nobody waits for the others between two balancers
        run.balancer = make()
        run.time.chi = 4.0 if rank == 1 else 1.0
        return run.updates(3)[-1][1] > 0.5

    assert run_ranks(train, 2, timeout_s=20) == [True, True]


def test_ranks_that_do_not_agree_are_all_told_what_differs(run_ranks):
    def build(rank, group):
        with pytest.raises(ValueError, match="do not agree on update_every: rank 0: 3; rank 1: 4"):
            Run(group, update_every=3 + rank)

    run_ranks(build, 2, timeout_s=20)


def test_a_rank_that_never_comes_is_named(run_ranks, monkeypatch):
    monkeypatch.setattr(NumbersGroup, "MEETING_S", 0.5)

    def build(rank, group):
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"ranks \[1\] of the group did not come"):
                Run(group)

    run_ranks(build, 2, timeout_s=20)


def test_another_group_than_the_layers_is_refused(run_ranks):
    def build(rank, group):
        pair = dist.new_group([0, 1])
        if rank < 2:
            config = zr.BalanceConfig()
            model = zr.convert(Pair(pair), process_group=pair, config=config)
            with pytest.raises(ValueError, match="layer up belongs to another process group"):
                zr.Balancer(model, None, process_group=group, config=config)

    run_ranks(build, 3)


def test_steps_are_measured_under_the_plan_that_a_pin_put_in_force(run_ranks):
    def full_work_products(rank, group):
        run = Run(group, update_every=1)
        run.steps(2)
        seen = []
        for ratio in (None, 0.75, 0.95, 0.0):
            if ratio is not None:
                run.balancer.pin(0, ratio)
            run.steps(1)
            seen.append(run.balancer.metrics()["balance/products_s"])
        return seen

    products_s = run_ranks(full_work_products, 2)[0]
    assert products_s == pytest.approx([products_s[0]] * 4, rel=0.05)


def test_one_rank_records_nothing(run_ranks):
    def train(rank, group):
        run = Run(group)
        for _ in range(3):
            dist.barrier()
            run.steps(1)
        return run.balancer._timer._step

    assert run_ranks(train, 1) == [None]


def test_state_of_other_layers_is_refused(run_ranks):
    def load(rank, group):
        run = Run(group)
        ((key, state),) = run.balancer.state_dict().items()
        with pytest.raises(ValueError, match="another model"):
            run.balancer.load_state_dict({key: {**state, "layers": {"up": 7}}})
        with pytest.raises(ValueError, match=r"no balancer state of 'group 0-1': there is \['group 2-3'\]"):
            run.balancer.load_state_dict({"group 2-3": state})

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

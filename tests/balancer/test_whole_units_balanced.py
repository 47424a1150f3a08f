"""Units that ranks do not divide, balanced: who has more at home is not slow, and who is slow is told from it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import caught_log_lines
from helpers.virtual_training import FEATURES, Run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import zeroresize as zr
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segments import shard_shape
from zeroresize.measure import timed_products

pytestmark = [pytest.mark.same_ranks, pytest.mark.usefixtures("lending_is_dear")]

UNIT = 64


def units(number, *, may_move=True):
    """A model of so many units, as ``Run`` takes it; a host that lets them stay says so."""

    class Units(nn.Module):
        def __init__(self, group):
            super().__init__()
            torch.manual_seed(0)
            up, down = nn.Linear(FEATURES, number * UNIT), nn.Linear(number * UNIT, FEATURES)
            self.up = zr.ColumnParallelLinear.from_linear(up, process_group=group, unit_size=UNIT)
            self.down = zr.RowParallelLinear.from_linear(down, process_group=group, unit_size=UNIT)
            if may_move:
                zr.convert(self, process_group=group, segments=[zr.Segment(["up"], "down", unit_size=UNIT)])

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(x)))

    return Units


def run_of(group, mode, number, **options):
    may_move = options.pop("may_move", True)
    return Run(group, gather_s=0.0, mode=mode, model=units(number, may_move=may_move), **{"update_every": 4} | options)


def step_s(run, group):
    began_s = run.time.now
    run.steps(1)
    return max(gathered(group, run.time.now - began_s))


def counts(run):
    return run.model.down.segment.owned.counts


def trained(run, group, rank, slow, number=8):
    run.time.chi = 2.0 if rank == slow else 1.0
    run.updates(number)
    return step_s(run, group)


@pytest.mark.slow
@on_ranks(2, [(mode, may_move) for mode in ("exact", "zero-rd", "mig", "semi", "off") for may_move in (True, False)])
def test_equally_fast_ranks_are_left_alone(rank, group, mode, may_move):
    with caught_log_lines() as lines:
        run = run_of(group, mode, 3, may_move=may_move)
        run.updates(6)
        took_s, metrics = step_s(run, group), run.balancer.metrics()
    plan = run.balancer.plan
    assert run.model.down.local_weight.shape == (FEATURES, (128, 64)[rank])
    assert not any(of_rank.is_straggler or of_rank.spared for of_rank in plan.ranks) and plan.owned == (1.0, 1.0)
    assert plan.predicted_step_s == pytest.approx(took_s, rel=1e-3)
    assert metrics["balance/owned_share"] == pytest.approx((4 / 3, 2 / 3)[rank])
    assert metrics["balance/busy_s"] == pytest.approx(gathered(group, metrics["balance/busy_s"])[0], rel=1e-3)
    assert metrics.get("watch/num_slow", 0.0) == 0.0 and not any("slower" in line for line in lines)


@on_ranks(2)
def test_a_unit_moves_from_a_slow_rank_that_has_more_and_comes_home(rank, group):
    run = run_of(group, "exact", 3)
    run.updates(2)
    home_s, slow_s = step_s(run, group), trained(run, group, rank, 0)
    assert counts(run) == (1, 2) and slow_s == pytest.approx(home_s)  # 1 unit at half the speed is 2 at the full one
    trained(run, group, rank, None)
    assert counts(run) == (2, 1) and run.balancer.plan.owned == (1.0, 1.0)
    assert trained(run, group, rank, 1) == pytest.approx(home_s) and counts(run) == (2, 1)


@on_ranks(3, [("exact",), ("zero-rd",), ("semi",)])
def test_a_slow_rank_that_has_fewer_is_found_and_spared_no_more_than_helps(rank, group, mode):
    run = run_of(group, mode, 7)
    run.updates(2)
    home_s = step_s(run, group)
    slow_s = trained(run, group, rank, 1, 12)
    plan = run.balancer.plan
    assert [of_rank.is_straggler for of_rank in plan.ranks] == [False, True, False]
    assert slow_s == pytest.approx(home_s, rel=2e-2)  # rank 0 has 3 units, whatever is done for rank 1
    assert counts(run)[1] == 1 if mode == "exact" else 0.2 < plan.ranks[1].spared < 0.35


@on_ranks(2)
def test_measured_shares_compare_products_of_one_shape(rank, group, *, monkeypatch):
    model, shapes = units(3, may_move=False)(group), []
    monkeypatch.setattr(timed_products, "product_seconds", lambda weight: shapes.append(tuple(weight.shape)) or 1.0)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BalancedLinear)}
    shares = timed_products.measure_wanted_shares("auto", layers, group, lambda *row: gathered(group, row))
    assert shares == (1.0, 1.0) and len(set(gathered(group, shapes[0]))) == 1
    assert [shard_shape(layers["down"], of_rank) for of_rank in (0, 1)] == [(FEATURES, 128), (FEATURES, 64)]


@on_ranks(4, [({"unit_size": UNIT},), ({"unit_size": UNIT // 2, "parts": (UNIT, 2 * UNIT)},)])
def test_what_fully_shard_divides_further_is_not_saved_wrongly(rank, group, options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(FEATURES, 3 * UNIT), nn.Linear(3 * UNIT, FEATURES))
    plan = {"0": zr.ColwiseParallel(**options), "1": zr.RowwiseParallel(**options)}
    model = fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    with pytest.raises(ValueError, match="fully_shard has divided it further"):
        dcp.save(zr.sharded_state_dict(model))

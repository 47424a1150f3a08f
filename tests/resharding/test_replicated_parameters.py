"""Parameters that serve all units keep them where they are once ranks hold different ones, whoever holds these."""

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.processes import caught_log_lines
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroresize as zr
from zeroresize.resharding.agreement import CannotMoveError

HEADS, SIZE, WIDTH = 8, 4, 16
WHY = r"norm\.weight, which serves all units, is not the same on all ranks"


class Heads(nn.Module):
    """Heads that one norm serves, between a column- and a row-parallel layer."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.column = zr.ColumnParallelLinear(WIDTH, HEADS * SIZE, process_group=group)
        self.norm = nn.RMSNorm(SIZE)
        self.row = zr.RowParallelLinear(HEADS * SIZE, WIDTH, process_group=group)

    def forward(self, x):
        return self.row(torch.tanh(self.norm(self.column(x).unflatten(-1, (-1, SIZE)))).flatten(-2))


def balanced(is_sharded, make_optimizer):
    """In training on two ranks, or two times two where ``fully_shard`` holds shards of it."""
    grid = init_device_mesh("cpu", (2, 2) if is_sharded else (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.ModuleDict({"heads": Heads(grid["tp"].get_group())})
    of_heads = zr.Segment(
        ["heads.column"],
        "heads.row",
        unit_size=SIZE,
        kind="heads",
        on_change=lambda units: None,
        replicated=[model["heads"].norm.weight],
    )
    zr.convert(model, segments=[of_heads])
    if is_sharded:
        fully_shard(model["heads"], mesh=grid["dp"])
    optimizer = make_optimizer(model.parameters())
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(start_checks=False), process_group=grid["tp"])
    return model, optimizer, balancer


def step(model, optimizer, balancer, *, sums):
    """A step of training that sums the norm's gradient over the heads of all ranks, or does not."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    model["heads"](x).square().mean().backward()
    if sums:
        gradient = model["heads"].norm.weight.grad
        local = getattr(gradient, "_local_tensor", gradient)
        torch.distributed.all_reduce(local, group=model["heads"].row.process_group)
    optimizer.step()
    optimizer.zero_grad()
    balancer.step()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_units_move_while_ranks_hold_the_same_and_stay_at_home_once_they_do_not(run_ranks, is_sharded):
    def check(rank, group):
        training = balanced(is_sharded, torch.optim.AdamW)
        model, _, balancer = training
        step(*training, sums=True)
        balancer.move((3, 1))
        step(*training, sums=True)
        with balancer.at_home():
            pass
        assert model["heads"].row.segment.owned.counts == (6, 2)
        step(*training, sums=False)
        with caught_log_lines() as lines, balancer.at_home():
            pass  # as who saves does
        assert model["heads"].row.segment.owned.counts == (4, 4)
        assert any("the units stay at home" in line and "norm.weight" in line for line in lines) or rank
        with pytest.raises(CannotMoveError, match=WHY):
            balancer.move((3, 1))
        balancer.close()

    run_ranks(check, 4 if is_sharded else 2)


@on_ranks(2)
def test_moments_that_differ_tell_before_weights_do(rank, group):
    """As in few bits, where small steps of a weight near 1 do not show."""
    model, optimizer, balancer = balanced(False, torch.optim.AdamW)
    step(model, optimizer, balancer, sums=True)
    optimizer.state[model["heads"].norm.weight]["exp_avg"][0] += 1e-6 * rank
    with pytest.raises(CannotMoveError, match=WHY):
        balancer.move((3, 1))
    balancer.close()


@on_ranks(2)
def test_a_parameter_of_another_model_is_an_error(rank, group):
    model = nn.ModuleDict({"heads": Heads(group)})
    other = zr.Segment(["heads.column"], "heads.row", unit_size=SIZE, replicated=[nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"replicated: the model has no such parameter, of shape \(3,\)"):
        zr.convert(model, segments=[other])

"""Mistakes in how training is set up, which train something, only not what was meant."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines, for_each
from helpers.virtual_training import FEATURES, Pair
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr

pytestmark = pytest.mark.same_ranks

CONFIG = zr.BalanceConfig(mode="zero-pri")


class Model(nn.Module):
    """Parallel layers between replicated ones."""

    def __init__(self, group):
        super().__init__()
        self.norm, self.pair, self.head = nn.LayerNorm(FEATURES), Pair(group), nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.head(self.pair(self.norm(x)))


class OwnEmbedding(nn.Module):
    """A parallel layer of somebody else's, which tells its group or marks its parameter as Megatron does."""

    def __init__(self, rank, group=None):
        super().__init__()
        self.group, self.weight = group, nn.Parameter(torch.full((4, 4), float(rank)))
        self.weight.tensor_model_parallel = group is None


X = torch.ones(2, FEATURES)


def balanced(model, group, config=CONFIG, wrapped=None, optimizer=None):
    zr.convert(model, process_group=group)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return zr.Balancer(wrapped or model, optimizer, process_group=group, config=config)


def change(model, rank, name="head.weight", by=1e-2):
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[0] += by * rank


def test_ranks_that_begin_with_different_weights_are_all_told_which_in_the_first_training_forward(run_ranks):
    @for_each([("head.weight",), ("norm.bias",), ("pair.down.bias",)])
    def train(rank, group, name):
        model = Model(group)
        change(model, rank, name)
        balancer = balanced(model, group)
        model.eval()(X)
        with pytest.raises(ValueError) as error:
            model.train()(X)
        balancer.close()
        message = str(error.value)
        assert message.startswith(
            "1 of 5 parameters that all ranks of the group should hold alike differ between the ranks: "
        )
        assert [f"rank {one}: sum " in message for one in range(3)] == [True] * 3  # no two agree, so none is to blame

    run_ranks(train, 3, timeout_s=20)


def test_what_is_loaded_later_may_be_a_shard_or_rounding_is_no_difference_and_checks_can_be_off(run_ranks):
    def train(rank, group):
        model = Model(group)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        change(model, rank)
        balancer = balanced(model, group)
        model.load_state_dict(state)
        model(X)
        change(model, rank)  # compared once
        model(X)
        balancer.close()

        model = Model(group)
        model.marked, model.grouped = OwnEmbedding(rank), OwnEmbedding(rank, group)
        model.uneven = nn.Parameter(torch.ones(3 + rank))
        model.tied = model.grouped.weight
        change(model, rank, by=1e-7)
        balancer = balanced(model, group)
        model(X)
        balancer.close()

        model = Model(group)
        change(model, rank)
        some = torch.optim.SGD(model.pair.up.parameters(), lr=0.1)
        with caught_log_lines() as lines:
            balancer = balanced(model, group, zr.BalanceConfig(mode="zero-pri", start_checks=False), optimizer=some)
        model(X)
        assert len([line for line in lines if "does not step the weights of pair.down" in line]) == 1

    run_ranks(train, 2, timeout_s=20)


def test_an_optimizer_of_some_layers_is_refused_unless_the_others_are_frozen(run_ranks):
    def build(rank, group):
        model = zr.convert(Pair(group), process_group=group)
        some = torch.optim.SGD(model.up.parameters(), lr=0.1)
        with pytest.raises(
            ValueError, match=r"does not step the weights of down, .*requires_grad_.*start_checks=False"
        ):
            zr.Balancer(model, some, process_group=group, config=CONFIG)
        model.down.requires_grad_(False)
        zr.Balancer(model, some, process_group=group, config=CONFIG).close()

    run_ranks(build, 2)


def test_ddp_over_the_tensor_parallel_group_is_refused(run_ranks):
    @for_each([(True,), (False,)])
    def build(rank, group, is_wrapped_first):
        model = Model(group)
        zr.convert(model, process_group=group)
        with pytest.raises(
            ValueError, match=r"averages gradients over ranks \[0, 1\] of the job, .* start_checks=False"
        ):
            if is_wrapped_first:
                balanced(model, group, wrapped=DistributedDataParallel(model))
            else:
                balancer = balanced(model, group)  # noqa: F841 - it lives
                DistributedDataParallel(model)(X)

    run_ranks(build, 2, timeout_s=20)


def test_ddp_over_replicas_and_ddp_that_leaves_the_shards_alone_are_taken(run_ranks):
    def build(rank, group):
        alone = [dist.new_group([own]) for own in range(2)][rank]
        model = Model(group)
        wrapped = DistributedDataParallel(model, process_group=alone)
        balanced(model, group, wrapped=wrapped).close()
        wrapped(X)
        shards = [f"pair.{name}" for name in ("up.weight", "up.bias", "down.weight")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, shards)
        balancer = balanced(model, group, wrapped=DistributedDataParallel(model))
        model(X)
        return balancer.metrics()["balance/ratio"]

    assert run_ranks(build, 2, timeout_s=20) == [0.0, 0.0]


def test_copies_that_drift_apart_are_warned_of_once_on_one_rank(run_ranks):
    """As by clipping by shards. What is clipped by the whole norm, or differs by rounding from the start, does not."""

    @for_each(
        [
            (25, nn.utils.clip_grad_norm_, {}),
            (25, zr.clip_grad_norm_, {}),
            (25, None, {"before": 1e-7, "change_at": 12}),
        ]
    )
    def train(rank, group, num_steps, clip, changes):
        torch.manual_seed(0)
        model = Model(group)
        change(model, rank, by=changes.get("before", 0.0))
        config = zr.BalanceConfig(mode="off", update_every=5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        balancer = balanced(model, group, config, optimizer=optimizer)
        with caught_log_lines() as lines:
            for step in range(num_steps):
                x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(step))
                ((1 + step % 3) * model(x).square().mean()).backward()
                if clip is not None:
                    clip(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                if step == changes.get("change_at"):
                    change(model, rank)
                if step == 7:
                    balancer.move([1, 3])
                balancer.step()
        balancer.close()
        return [line for line in lines if "drifted apart" in line]

    (clipped, whole, later), others = run_ranks(train, 2)
    assert (len(clipped), whole, len(later)) == (1, [], 1) and others == [[]] * 3
    assert "of 5 parameters that all ranks of the group hold alike have drifted apart" in clipped[0]
    assert "head.weight (rank 0: sum " in clipped[0] and "zeroresize.clip_grad_norm_" in clipped[0]


class Noisy(nn.Module):
    """Two pairs of parallel layers, and dropout between them."""

    def __init__(self, group, dropout):
        super().__init__()
        self.first, self.dropout, self.second = Pair(group), dropout, Pair(group)

    def forward(self, x):
        return self.second(self.dropout(self.first(x)))


def stepped(model, group, seed, config):
    """A balancer after three steps in which ``seed`` draws what is dropped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    balancer = balanced(model, group, config, optimizer=optimizer)
    torch.manual_seed(seed)
    for _ in range(3):
        model(torch.ones(8, FEATURES)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
    return balancer


def test_no_unit_leaves_home_where_replicated_activations_differ(run_ranks):
    """As where a host draws otherwise on each rank what it drops behind a row-parallel layer."""

    @for_each([(True,), (False,)])
    def train(rank, group, differs):
        model = Noisy(group, nn.Dropout(0.1))
        with caught_log_lines() as lines:
            balancer = stepped(model, group, rank if differs else 0, zr.BalanceConfig(mode="off"))
            with (
                pytest.raises(RuntimeError, match=r"nothing has moved or changed: ranks \[0, 1\] of the group failed")
                if differs
                else contextlib.nullcontext() as error
            ):
                balancer.move([1.0, 3.0])
            with balancer.at_home():
                pass  # to save is always allowed
            balancer.close(at_home=True)
        if differs:
            assert "activations that all ranks of the group should have alike differ" in str(error.value)
            assert "the input of second.up" in str(error.value)
        assert len([line for line in lines if "No unit leaves its home" in line]) == (differs and rank == 0)

    run_ranks(train, 2, timeout_s=30)

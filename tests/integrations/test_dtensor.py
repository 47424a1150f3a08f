"""Models that torch's parallelize_module has split into DTensors: the same as the host's, and units that move."""

import copy
from math import inf

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.dtensor_comparisons import assert_same
from helpers.dtensor_models import (
    ATTENTION,
    HIDDEN,
    WIDTH,
    adamw,
    batch,
    mesh_of,
    split,
    train,
    train_while_units_move,
    whole_model,
)
from helpers.on_ranks import on_ranks
from helpers.processes import for_each
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.local_parts import local_of

pytestmark = [pytest.mark.versions, pytest.mark.same_ranks]


@on_ranks(2, [(False, True), (True, False)])
def test_converted_layers_are_the_hosts_bit_for_bit(rank, group, bias, sequence):
    mesh = mesh_of()
    host, model = (split(whole_model(bias), mesh, sequence=sequence) for _ in range(2))
    names = [name for name, _ in host.named_parameters()]
    zr.convert(model, segments=ATTENTION)
    assert len(balanced_layers(model)) == 14
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(one, DTensor) for one in model.parameters())
    assert train(model, adamw(model), 3) == train(host, adamw(host), 3)
    assert_same(list(model.parameters()), list(host.parameters()), "weights after training")


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("foreach", [False, True], ids=["for loop", "foreach"])
def test_moves_away_and_home_leave_losses_and_norms_those_of_one_process(run_ranks, foreach, sequence):
    whole = whole_model()
    expected = train(whole, adamw(whole, foreach=foreach), 8)

    def check(rank, group):
        model = split(whole_model(), mesh_of(), sequence=sequence)
        zr.convert(model, segments=ATTENTION)
        shares = {1: (3, 1), 3: (1, 3), 5: (1, 1)}
        values, sizes = train_while_units_move(model, shares, 8, foreach=foreach)
        mine = ((36, 12), (12, 36))[rank]
        half = (WIDTH, HIDDEN // 2)
        assert sizes == [half, *[(WIDTH, mine[0])] * 2, *[(WIDTH, mine[1])] * 2, half, half, half]
        assert values == pytest.approx(expected, abs=1e-8)  # torch 2.7 clips in another order
        for name, parameter in whole.named_parameters():
            ours = dict(model.named_parameters())[name].full_tensor()
            assert torch.allclose(ours, parameter, atol=1e-8), name

    run_ranks(check, 2)


def moved(mesh, shares=(3, 1), num_steps=2):
    """A model of DTensors after some steps, and its units away."""
    model = split(whole_model(), mesh)
    zr.convert(model, segments=ATTENTION)
    optimizer = adamw(model)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
    train(model, optimizer, num_steps, lambda step: balancer.step())
    balancer.move(shares)
    return model, optimizer, balancer


@on_ranks(2)
def test_no_way_of_saving_or_gathering_uneven_parts_goes_through(rank, group, *, tmp_path):
    model, optimizer, balancer = moved(mesh_of())
    weight = model.blocks[0].mlp.up.weight
    moment = optimizer.state[weight]["exp_avg"]
    ways = {
        "state_dict": model.state_dict,
        "optimizer.state_dict": optimizer.state_dict,
        "get_state_dict": lambda: get_state_dict(model, optimizer),
        "full_tensor": weight.full_tensor,
        "of a moment": moment.full_tensor,
        "redistribute": lambda: weight.redistribute(placements=[Replicate()]),
        "dcp.save": lambda: dcp.save({"weight": weight}, checkpoint_id=tmp_path / "uneven"),
    }
    for way, call in ways.items():
        with pytest.raises((RuntimeError, CheckpointException), match=r"at_home\(\)") as caught:
            call()
        assert "sharded_state_dict" in str(caught.value), way
    with balancer.at_home():
        assert weight.full_tensor().shape == (HIDDEN, WIDTH)
        assert optimizer.state[weight]["exp_avg"].full_tensor().shape == (HIDDEN, WIDTH)
        model.state_dict(), optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"at_home\(\)"):
        weight.full_tensor()
    with pytest.raises(RuntimeError, match="have them at home"):
        model.blocks[0].mlp.up.reset_parameters()
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="is a copy of an unevenly divided layer"):
        copied.state_dict()
    del copied
    loss = functional.cross_entropy(model(batch(0)).flatten(0, 1), batch(100).flatten())
    balancer.move((1, 1))
    with pytest.raises(RuntimeError, match="units have moved since this forward"):
        loss.backward()
    assert weight.full_tensor().shape == (HIDDEN, WIDTH)
    balancer.move((3, 1))
    optimizer.state.clear()
    train(model, optimizer, 1, lambda step: balancer.step())
    with pytest.raises(RuntimeError, match=r"at_home\(\)"):  # made while units were away
        optimizer.state[weight]["exp_avg"].full_tensor()


@pytest.mark.slow
def test_a_checkpoint_saved_away_loads_in_plain_torch_and_in_the_host(run_ranks, tmp_path):
    def save(rank, group):
        mesh = mesh_of()
        model, optimizer, balancer = moved(mesh)
        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path)
        host = split(whole_model(), mesh)
        state = host.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        balancer.move((1, 1))
        for name, ours in model.named_parameters():
            assert torch.equal(ours.full_tensor(), state[name].full_tensor()), name
        other, other_optimizer, other_balancer = moved(mesh, (1, 3))
        dcp.load(zr.sharded_state_dict(other, other_optimizer), checkpoint_id=tmp_path)
        other_balancer.move((1, 1))
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs.full_tensor())
            for key, value in optimizer.state[ours].items():
                assert torch.equal(local_of(value), local_of(other_optimizer.state[theirs][key]))
        return {name: one.full_tensor().detach().clone() for name, one in model.named_parameters()}

    values, _ = run_ranks(save, 2)
    whole = whole_model()
    state = whole.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, values[name]), name


def test_clipping_of_ours_and_of_torch_give_the_true_norm_while_units_are_away(run_ranks):
    """Every rank keeps a unit, so that the largest element clips, too."""
    whole = whole_model()
    functional.cross_entropy(whole(batch(0)).flatten(0, 1), batch(100).flatten()).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])

    @for_each([(zr.clip_grad_norm_, 2.0), (torch.nn.utils.clip_grad_norm_, 2.0), (torch.nn.utils.clip_grad_norm_, inf)])
    def check(rank, group, clip, norm_type):
        model = split(whole_model(), mesh_of())
        zr.convert(model, segments=ATTENTION)
        balancer = zr.Balancer(model, adamw(model), zr.BalanceConfig(mode="exact"))
        balancer.move((3, 1) if norm_type == 2.0 else (1, 0))
        functional.cross_entropy(model(batch(0)).flatten(0, 1), batch(100).flatten()).backward()
        norm = clip(model.parameters(), 0.1, norm_type=norm_type)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert norm.item() == pytest.approx(gradients.norm(norm_type).item(), abs=1e-12)

    run_ranks(check, 2)


CONFIGURATIONS = {
    "zero-rd": {"mode": "zero-rd"},
    "zero-pri": {"mode": "zero-pri"},
    "zero-pridiff": {"mode": "zero-pridiff"},
    "by changes of weights": {"mode": "zero-pri", "priority": "variation"},
    "by ways of weights": {"mode": "zero-pri", "priority": "path_length"},
    "freezing": {"mode": "zero-rd", "pruned_update": "freeze"},
    "the same gradients": {"mode": "zero-rd", "paper": {"imputation": "same"}},
    "mig": {"mode": "mig"},
    "semi": {"mode": "semi"},
}


def of_plain_parameters(model, group):
    """The same model of this package's layers, whose parameters are plain shards."""
    for block in model.blocks:
        for holder, columns, row in ((block.attention, "qkv", "out"), (block.mlp, ("gate", "up"), "down")):
            for name in columns:
                layer = zr.ColumnParallelLinear.from_linear(getattr(holder, name), process_group=group)
                setattr(holder, name, layer)
            setattr(holder, row, zr.RowParallelLinear.from_linear(getattr(holder, row), process_group=group))
    return model


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@on_ranks(2)
def test_every_configuration_computes_what_it_does_with_plain_parameters(rank, group, *, name, sequence):
    mesh = mesh_of()
    forced = {"ratio": 0.5, "ranks": [1]} if name != "semi" else {}
    config = zr.BalanceConfig(**CONFIGURATIONS[name], update_every=1, iters_per_epoch=2, **forced)
    results = []
    for is_dtensor in (True, False):
        whole = whole_model()
        model = split(whole, mesh, sequence=sequence) if is_dtensor else of_plain_parameters(whole, group)
        zr.convert(model, segments=ATTENTION)
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, config)
        if name == "semi":
            balancer.move((3, 1))
        losses = []
        for step in range(5):
            loss = functional.cross_entropy(model(batch(step)).flatten(0, 1), batch(step + 100).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
            losses.append(loss.item())
        plans = [layer.plan is not None for layer in balanced_layers(model).values()]
        results.append((losses, plans))
        balancer.close()
    (ours, plans), (plain, plans_of_plain) = results
    assert ours == pytest.approx(plain, abs=1e-10)
    assert plans == plans_of_plain and (rank == 0 or name == "semi" or any(plans))

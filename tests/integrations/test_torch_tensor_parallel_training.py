"""What people do with a model that torch has split, after it was converted, with moves of units in the middle."""

import copy

import pytest
import torch
from helpers.dtensor_models import ATTENTION, HIDDEN, adamw, batch, mesh_of, split, train, whole_model
from torch.distributed.tensor import DTensor
from torch.nn import functional

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

EXACT = zr.BalanceConfig(mode="exact")
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "foreach AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True),
}


def converted(mesh, **options):
    model = split(whole_model(), mesh, **options)
    zr.convert(model, segments=ATTENTION)
    return model


def loss_of(model, step=0):
    return functional.cross_entropy(model(batch(step)).flatten(0, 1), batch(step + 100).flatten())


def mover(balancer, shares):
    """After these steps units move so."""

    def after(step):
        balancer.step()
        if step in shares:
            balancer.move(shares[step])

    return after


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_moved_units_as_one_process_does(run_ranks, name):
    whole = whole_model()
    expected = train(whole, OPTIMIZERS[name](whole.parameters()), 4)

    def check(rank, group):
        model = converted(mesh_of())
        optimizer = OPTIMIZERS[name](model.parameters())
        balancer = zr.Balancer(model, optimizer, EXACT)
        values = train(model, optimizer, 4, mover(balancer, {0: (3, 1), 2: (1, 1)}))
        assert values == pytest.approx(expected, abs=1e-9)
        balancer.close()

    run_ranks(check, 2)


def test_optimizers_that_see_whole_matrices_are_refused_by_name(run_ranks):
    def check(rank, group):
        model = converted(mesh_of())
        matrices = [one for one in model.parameters() if one.dim() == 2]
        for optimizer in (torch.optim.Adafactor(model.parameters()), torch.optim.Muon(matrices)):
            balancer = zr.Balancer(model, optimizer, EXACT)
            name = f"torch.optim.{type(optimizer).__name__}"
            with pytest.raises(ValueError, match=f"no unit can change hands: the optimizer {name} is not element-wise"):
                balancer.move((3, 1))
            balancer.close()

    run_ranks(check, 2)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["None", "zeros"])
def test_units_move_between_accumulated_gradients_and_take_them_along(run_ranks, set_to_none):
    def accumulated(model, optimizer, between=lambda: None):
        for step in range(2):
            for micro in range(3):
                (loss_of(model, 3 * step + micro) / 3).backward()
                between() if micro == 1 else None
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss_of(model, 9).item()

    whole = whole_model()
    expected = accumulated(whole, adamw(whole))

    def check(rank, group):
        model = converted(mesh_of())
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, EXACT)
        shares = iter([(3, 1), (1, 3)])
        loss = accumulated(model, optimizer, lambda: balancer.move(next(shares)))
        assert loss == pytest.approx(expected, abs=1e-9)
        assert local_of(model.blocks[0].mlp.up.weight).shape[0] == (HIDDEN // 4, 3 * HIDDEN // 4)[rank]
        if not set_to_none:
            gradient = model.blocks[0].mlp.up.weight.grad
            assert isinstance(gradient, DTensor) and not local_of(gradient).any()
        balancer.close(at_home=True)

    run_ranks(check, 2)


def test_layers_that_are_frozen_and_thawed_are_the_hosts_and_move(run_ranks):
    frozen = ("blocks.0.mlp.up", "blocks.0.attention.out", "blocks.1.norm1", "blocks.1.mlp.down.weight")

    def prepared(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return model

    whole = prepared(whole_model())
    expected = train(whole, adamw(whole), 4)

    def check(rank, group):
        host, even, model = prepared(split(whole_model(), mesh_of())), *(prepared(converted(mesh_of())) for _ in "ab")
        assert train(even, adamw(even), 4) == train(host, adamw(host), 4)
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, EXACT)
        values = train(model, optimizer, 4, mover(balancer, {0: (3, 1), 1: (1, 3)}))
        assert values == pytest.approx(expected, abs=1e-9)
        model.requires_grad_(True)
        balancer.move((3, 1))
        assert all(one.requires_grad for one in model.parameters())
        loss_of(model, 5).backward()
        assert all(one.grad is not None for one in model.parameters())

    run_ranks(check, 2)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_autocast_is_the_hosts(run_ranks, sequence):
    def check(rank, group):
        host, model = (one.float() for one in (split(whole_model(), mesh_of(), sequence=sequence), whole_model()))
        model = split(model, mesh_of(), sequence=sequence)
        zr.convert(model, segments=ATTENTION)
        balancer = zr.Balancer(model, adamw(model), EXACT)
        results = []
        for module in (host, model):
            with torch.autocast("cpu", torch.bfloat16):
                logits = module(batch(0))
                assert logits.dtype == torch.bfloat16
            logits.float().square().mean().backward()
            results.append([logits, *(local_of(parameter.grad) for parameter in module.parameters())])
        assert all(map(torch.equal, *results))
        assert {one.grad.dtype for one in model.parameters()} == {torch.float32}
        balancer.move((3, 1))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(batch(0)), logits, atol=0.05, rtol=0.05)

    run_ranks(check, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_another_dtype_at_home_is_the_hosts_and_away_stays_what_it_was(run_ranks, dtype):
    def check(rank, group):
        host, model = split(whole_model(), mesh_of()).to(dtype), converted(mesh_of()).to(dtype)
        assert all(isinstance(one, DTensor) and one.dtype == dtype for one in model.parameters())
        expected = host(batch(0))
        assert torch.equal(model(batch(0)), expected)
        balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), EXACT)
        balancer.move((3, 1))
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3}[dtype]
        torch.testing.assert_close(model(batch(0)), expected, atol=tolerance, rtol=tolerance)
        balancer.move((1, 1))
        assert torch.equal(model(batch(0)), expected)
        balancer.close()

    run_ranks(check, 2)


def test_a_cast_while_units_are_away_leaves_them_there_and_their_guards(run_ranks):
    def check(rank, group):
        model = converted(mesh_of())
        expected = model(batch(0)).detach()
        balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), EXACT)
        balancer.move((3, 1))
        model.float()
        torch.testing.assert_close(model(batch(0)).double(), expected, atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError, match=r"at_home\(\)"):
            model.blocks[0].mlp.up.weight.full_tensor()
        with pytest.raises(RuntimeError, match=r"at_home\(\)"):
            model.state_dict()
        balancer.move((1, 1))
        torch.testing.assert_close(model(batch(0)).double(), expected, atol=1e-5, rtol=1e-5)

    run_ranks(check, 2)


@pytest.mark.parametrize("shares", [None, (3, 1)], ids=["home", "away"])
def test_a_copy_computes_the_same_and_lives_by_itself(run_ranks, shares):
    def check(rank, group):
        model = converted(mesh_of())
        balancer = zr.Balancer(model, adamw(model), EXACT)
        if shares:
            balancer.move(shares)
        other = copy.deepcopy(model)
        assert torch.equal(other(batch(0)), model(batch(0)))
        with torch.no_grad():
            local_of(other.blocks[0].mlp.up.weight).zero_()
        assert not torch.equal(other(batch(0)), model(batch(0)))
        if shares:
            with pytest.raises(RuntimeError, match=r"at_home\(\)"):
                other.blocks[0].mlp.up.weight.full_tensor()
            with pytest.raises(RuntimeError, match=r"at_home\(\)"):
                other.state_dict()
        else:
            other.state_dict(), other.blocks[0].mlp.up.weight.full_tensor()

    run_ranks(check, 2)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_a_compiled_model_trains_as_the_hosts_over_a_move(run_ranks, sequence):
    def check(rank, group):
        host, model = (split(whole_model(), mesh_of(), sequence=sequence) for _ in range(2))
        expected = train(host, adamw(host), 3)
        optimizer = adamw(model)
        zr.convert(model, segments=ATTENTION)
        balancer = zr.Balancer(model, optimizer, EXACT)
        compiled = torch.compile(model, backend="aot_eager")
        values = train(compiled, optimizer, 3, mover(balancer, {0: (3, 1), 1: (1, 1)}))
        assert values == pytest.approx(expected, abs=1e-9)
        assert model.blocks[0].mlp.up.is_compiled

    run_ranks(check, 2, timeout_s=110)

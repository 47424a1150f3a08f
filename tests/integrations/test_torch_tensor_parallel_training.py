"""What people do with a model that torch has split, after it was converted, with moves of units in the middle."""

import pytest
import torch
from helpers.dtensor_models import ATTENTION, HIDDEN, adamw, batch, mesh_of, split, train, whole_model
from helpers.processes import for_each
from torch.distributed.tensor import DTensor
from torch.nn import functional

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

EXACT = zr.BalanceConfig(mode="exact")
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True, fused=True),
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


def test_optimizers_step_moved_units_as_one_process_does(run_ranks):
    wholes = {name: whole_model() for name in OPTIMIZERS}
    expected = {name: train(whole, OPTIMIZERS[name](whole.parameters()), 4) for name, whole in wholes.items()}

    @for_each([(name,) for name in OPTIMIZERS])
    def check(rank, group, name):
        model = converted(mesh_of())
        optimizer = OPTIMIZERS[name](model.parameters())
        balancer = zr.Balancer(model, optimizer, EXACT)
        values = train(model, optimizer, 4, mover(balancer, {0: (3, 1), 2: (1, 1)}))
        assert values == pytest.approx(expected[name], abs=1e-9)
        balancer.close()

    run_ranks(check, 2)


def test_units_move_between_accumulated_gradients_and_take_them_along(run_ranks):
    def accumulated(model, optimizer, set_to_none=True, between=lambda: None):
        for step in range(2):
            for micro in range(3):
                (loss_of(model, 3 * step + micro) / 3).backward()
                between() if micro == 1 else None
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss_of(model, 9).item()

    whole = whole_model()
    expected = accumulated(whole, adamw(whole))

    @for_each([(True,), (False,)])
    def check(rank, group, set_to_none):
        model = converted(mesh_of())
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, EXACT)
        shares = iter([(3, 1), (1, 3)])
        loss = accumulated(model, optimizer, set_to_none, lambda: balancer.move(next(shares)))
        assert loss == pytest.approx(expected, abs=1e-9)
        assert local_of(model.blocks[0].mlp.up.weight).shape[0] == (HIDDEN // 4, 3 * HIDDEN // 4)[rank]
        if not set_to_none:
            gradient = model.blocks[0].mlp.up.weight.grad
            assert isinstance(gradient, DTensor) and not local_of(gradient).any()
        balancer.close(at_home=True)

    run_ranks(check, 2)

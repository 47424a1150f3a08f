"""Layers whose parameters are DTensors in compiled graphs: the losses of the layers as they are, also while away."""

import pytest
import torch
from helpers.compiled import batch as tokens
from helpers.compiled import compiled
from helpers.dtensor_models import (
    ATTENTION,
    WIDTH,
    adamw,
    feed_forward,
    mesh_of,
    split,
    train,
    train_while_units_move,
    whole_model,
)
from helpers.on_ranks import gathered, on_ranks
from helpers.parallel_layers import equal_loans, lend
from torch.distributed.tensor import DTensor, Replicate, Shard

import zeroresize as zr
from zeroresize.conversion import balanced_layers

pytestmark = pytest.mark.same_ranks


def one_block():
    """As a graph is compiled in seconds."""
    model = whole_model()
    model.blocks = model.blocks[:1]
    return model


@pytest.mark.parametrize(
    ("is_cast", "whole"),
    [
        pytest.param(False, Replicate(), marks=pytest.mark.slow),
        (True, Replicate()),
        pytest.param(False, Shard(1), marks=pytest.mark.slow),
    ],
)
@on_ranks(2, timeout_s=110)
def test_loans_that_begin_and_end_compile_nothing_and_leave_losses_and_gradients(rank, group, *, is_cast, whole):
    """Also where DTensors sum dx, as where they scatter it, or in the dtype from which autocast has cast x."""

    torch._dynamo.reset()
    outcomes = []
    for compiles in (False, True):
        model = feed_forward(mesh_of(), whole=whole)
        model = model.float() if is_cast else model
        layers = balanced_layers(model)
        call, counter = compiled(model) if compiles else (model, None)
        optimizer, lender, values = adamw(model), None, []
        for step in range(6):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = call(tokens(width=WIDTH).to(model.up.weight.dtype)).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
            values += [loss.item(), norm.item()]
            optimizer.step()
            optimizer.zero_grad()
            if step in (0, 3):  # rank 0 lends, nobody, rank 1, nobody
                lender = lend(layers, group, equal_loans({step // 3: 0.5}, 2), "broadcast-reduce", step, lender)
            if step in (2, 4):
                lender.take_back()
                for layer in layers.values():
                    layer.plan = None
            if step == 1:
                lender.send_weights()
        outcomes.append(values)
    for (expected, values), num_compilations in gathered(group, (outcomes, counter.frame_count)):
        assert values == expected and len(set(values)) == 12
        assert num_compilations == 1


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_decoder_whose_units_move_trains_in_one_graph_as_in_one_process(run_ranks, sequence):
    shares = {1: (3, 1), 3: (1, 3), 4: (1, 1)}
    whole = one_block()
    expected = train(whole, adamw(whole), 6)

    def check(rank, group):
        torch._dynamo.reset()
        model = split(one_block(), mesh_of(), sequence=sequence)
        zr.convert(model, segments=ATTENTION[:1])
        call, counter = compiled(model)
        call.parameters = model.parameters
        values, shapes = train_while_units_move(model, shares, 6, call)
        assert values == pytest.approx(expected, abs=1e-10)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for name, parameter in whole.named_parameters():
            assert torch.allclose(dict(model.named_parameters())[name].full_tensor(), parameter, atol=1e-10), name
        return [num_units for _, num_units in shapes], counter.frame_count

    (first, num_compilations), (second, _) = run_ranks(check, 2, timeout_s=110)
    assert first == [24, 36, 36, 12, 24, 24] and second == [24, 12, 12, 36, 24, 24]
    assert num_compilations <= 4

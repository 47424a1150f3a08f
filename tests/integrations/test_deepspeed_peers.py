"""What DeepSpeed's own tests of AutoTP's training assert, wherever units are: docs/hosts/README.md names them."""

import pytest
import torch
from helpers.deepspeed_models import engine_of, llama, part_at_home, words
from helpers.on_ranks import on_ranks
from torch.testing import assert_close

import zeroresize as zr

pytest.importorskip("deepspeed")

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

EXACT = zr.BalanceConfig(mode="exact", update_every=100, start_checks=False)
DIVISIONS = (3, 1), (1, 3), (1, 1)
BIASES = {"attention_bias": True, "mlp_bias": True}


def results_of(model):
    """Logits and loss of a batch; gradients are in the weights."""
    output = model(input_ids=words(0), labels=words(0))
    output.loss.backward()
    return output.logits.detach(), output.loss.detach()


@on_ranks(2)
def test_layers_have_the_outputs_and_gradients_of_the_undivided_ones(rank, group):
    whole, engine = llama(**BIASES), engine_of(llama(**BIASES), rank)
    expected, gradients = results_of(whole), {name: each.grad for name, each in whole.named_parameters()}
    balancer = zr.Balancer(engine, engine.optimizer, EXACT)
    for shares in DIVISIONS:
        balancer.move(shares)
        engine.module.zero_grad()
        assert_close(results_of(engine.module), expected, rtol=0.0, atol=1e-6)
        balancer.move((1, 1))  # gradients come home with their units
        for name, weight in engine.module.named_parameters():
            part = part_at_home(name, gradients[name], engine.module, rank)
            assert_close(weight.grad, part, rtol=0.0, atol=1e-6, msg=f"{name} at {shares}")
    balancer.close()


def clipped_step(model, optimizer):
    """The norm of an undivided model's gradients before they are clipped and stepped."""
    results_of(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


@on_ranks(2, [(0,), (1,), (2,)])
def test_norms_by_which_gradients_are_clipped_are_the_undivided_models(rank, group, stage):
    whole, model = llama(), llama()
    of_whole, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model))
    engine = engine_of(model, rank, stage=stage, micro_batches=1, optimizer=optimizer)
    balancer = zr.Balancer(engine, engine.optimizer, EXACT)
    for shares in DIVISIONS:
        balancer.move(shares)
        engine.backward(engine(input_ids=words(0), labels=words(0)).loss)
        engine.step()
        norm = clipped_step(whole, of_whole)
        assert stage == 0 or engine.get_global_grad_norm() == pytest.approx(norm, abs=1e-5)  # ZeRO-0 tells none
        balancer.step()
        with balancer.at_home():
            for name, weight in engine.module.named_parameters():
                part = part_at_home(name, whole.get_parameter(name), engine.module, rank)
                assert_close(weight, part, rtol=0.0, atol=1e-6, msg=f"{name} after {shares}")
    balancer.close()


@on_ranks(2, [(0,), (2,)])
def test_whole_weights_are_the_undivided_models_or_refused(rank, group, stage):
    whole, engine = llama(), engine_of(llama(), rank, stage=stage)
    balancer = zr.Balancer(engine, engine.optimizer, EXACT)
    balancer.move((3, 1))
    with pytest.raises(RuntimeError, match=r"DeepSpeed gathers model\.layers\.0\..*, whose units are away"):
        engine._consolidated_16bit_state_dict()  # which save_16bit_model writes
    with balancer.at_home():
        state = engine._consolidated_16bit_state_dict()
    assert (state is None) == (rank != 0)
    for name, weight in whole.state_dict().items() if rank == 0 else ():
        assert torch.equal(state[name], weight), name
    balancer.close(at_home=True)

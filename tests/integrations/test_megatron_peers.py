"""What Megatron-LM's own tests assert of layers, vocabularies and optimizers, wherever units are.

Which of them: docs/hosts/README.md.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.megatron_models import (
    BATCH,
    LENGTH,
    WIDTH,
    batch_of,
    config_of,
    divide,
    gpt,
    learner,
    megatron_on_cpu,
    sum_partial_gradients,
    update,
    whole_of,
)
from helpers.on_ranks import on_ranks
from torch.testing import assert_close

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

pytest.importorskip("megatron.core.tensor_parallel.layers")

from megatron.core import dist_checkpointing, parallel_state

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

EXACT = zr.BalanceConfig(mode="exact", update_every=100, start_checks=False)
DIVISIONS = (3, 1), (1, 3), (1, 1)
#: How the optimizers save: such as the page says.
SAVED = {"distrib_optim_sharding_type": "fully_reshardable"}


@on_ranks(2, [(False,), (True,)])
def test_column_and_row_parallel_layers_have_the_gradients_of_undivided_ones(rank, group, is_frozen):
    plain = {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True}
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(num_layers=1, **plain), torch.float64)
        name, mlp = "decoder.layers.0.mlp", model.decoder.layers[0].mlp
        for bias in (mlp.linear_fc1.bias, mlp.linear_fc2.bias):
            torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(rank if bias.shape[0] == 24 else 2))
        whole = {key: each.requires_grad_() for key, each in whole_of(model, tensor_parallel).items() if name in key}
        draw = torch.Generator().manual_seed(1)
        x, weight_of_loss = (torch.randn(LENGTH, BATCH, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
        if is_frozen:
            mlp.requires_grad_(False)
        balancer = zr.Balancer(model, torch.optim.AdamW(model.parameters()), EXACT)
        (segment,) = (each for each in owned_segments(balanced_layers(model)) if each.kind == "neurons")

        undivided = x.clone().requires_grad_()
        of_fc1, of_fc2 = (
            (whole[f"{name}.{fc}.weight"], whole[f"{name}.{fc}.bias"]) for fc in ("linear_fc1", "linear_fc2")
        )
        expected = F.linear(F.gelu(F.linear(undivided, *of_fc1)), *of_fc2)
        (expected * weight_of_loss).sum().backward()
        for shares in DIVISIONS:
            balancer.move(shares)
            model.zero_grad()
            here = x.clone().requires_grad_()
            y, bias = mlp(here)
            ((y + bias) * weight_of_loss).sum().backward()
            units = torch.as_tensor(segment.owned.units_of(rank))
            assert len(units) == 48 * shares[rank] // sum(shares)
            pairs = {"y": (y + bias, expected), "dx": (here.grad, undivided.grad)}
            if is_frozen:
                assert all(weight.grad is None for weight in mlp.parameters())
            else:
                pairs["dw of columns"] = mlp.linear_fc1.weight.grad, of_fc1[0].grad[units]
                pairs["db of columns"] = mlp.linear_fc1.bias.grad, of_fc1[1].grad[units]
                pairs["dw of rows"] = mlp.linear_fc2.weight.grad, of_fc2[0].grad[:, units]
                pairs["db of rows"] = mlp.linear_fc2.bias.grad, of_fc2[1].grad
            for what, (seen, wanted) in pairs.items():
                assert_close(seen, wanted, rtol=0.0, atol=1e-12, msg=f"{what} at {shares}")
        balancer.close()


def losses_and_gradients(model, group, *, moves_home=lambda: None):
    """Losses of tokens, by the vocabulary's cross entropy, and whole gradients of all weights."""
    words, positions, mask, labels = batch_of(0)
    model.zero_grad()
    losses = model(words, positions, mask, labels=labels)
    losses.mean().backward()
    moves_home()
    sum_partial_gradients(model, group)
    return losses.detach(), whole_of(model, group, lambda weight: weight.grad)


@on_ranks(2, [({}, {}), ({"sequence_parallel": True}, {"share_embeddings_and_output_weights": True})])
def test_a_divided_vocabulary_beside_moved_units_gives_losses_and_gradients_of_the_undivided_model(
    rank, group, of_config, of_model
):
    with megatron_on_cpu(1) as alone:
        undivided = gpt(config_of(), torch.float64, **of_model)
        whole = whole_of(undivided, alone)
        expected, gradients = losses_and_gradients(undivided, alone)
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(**of_config), torch.float64, **of_model)
        divide(whole, model, tensor_parallel)
        balancer = zr.Balancer(model, torch.optim.AdamW(model.parameters()), EXACT)
        for shares in DIVISIONS:
            balancer.move(shares)
            losses, seen = losses_and_gradients(model, tensor_parallel, moves_home=lambda: balancer.move((1, 1)))
            assert_close(losses, expected, rtol=0.0, atol=1e-6)  # whose cross entropy is of float32
            assert seen.keys() == gradients.keys() and any("word_embeddings" in name for name in seen)
            for name, gradient in gradients.items():
                assert_close(seen[name], gradient, rtol=0.0, atol=1e-6, msg=f"{name} at {shares}")
        balancer.close()


def stepped_of(optimizer):
    """What the inner optimizer steps, with what it keeps of each."""
    inner = optimizer.chained_optimizers[0].optimizer
    return [(each, inner.state[each]) for of_group in inner.param_groups for each in of_group["params"]]


def trained(model, group, steps, **options):
    replicas = parallel_state.get_data_parallel_group()
    wrapped, optimizer = learner(model, **options)
    balancer = zr.Balancer(wrapped, optimizer, EXACT, process_group=group)
    for step in range(steps):
        update(wrapped, optimizer, step, replicas.rank(), replicas.size())
        balancer.step()
    return wrapped, optimizer, balancer


@on_ranks(4, [(False,), (True,)], timeout_s=200)
def test_masters_are_reloaded_from_weights_wherever_units_are(rank, group, is_divided):
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(num_layers=1, bf16=True), torch.bfloat16)
        _, optimizer, balancer = trained(model, tensor_parallel, 1, is_divided=is_divided)
        balancer.move((3, 1))
        for weight in model.parameters():
            weight.data.fill_(2.0)
        assert all(each.dtype == torch.float32 and not (each == 2.0).any() for each, _ in stepped_of(optimizer))
        optimizer.reload_model_params()
        assert all((each == 2.0).all() for each, _ in stepped_of(optimizer))
        balancer.close(at_home=True)
        assert all((each == 2.0).all() for each, _ in stepped_of(optimizer))


@on_ranks(4, [(False,), (True,)], timeout_s=200)
def test_state_that_is_no_tensor_comes_along(rank, group, is_divided):
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(num_layers=1))
        _, optimizer, balancer = trained(model, tensor_parallel, 1, is_divided=is_divided)
        for _, state in stepped_of(optimizer):
            state |= {"found_inf": False, "count": 42}
        before = [(each.detach().clone(), state["exp_avg"].clone()) for each, state in stepped_of(optimizer)]
        for shares in DIVISIONS:
            balancer.move(shares)
            assert all(state["found_inf"] is False and state["count"] == 42 for _, state in stepped_of(optimizer))
        for (each, state), (weight, average) in zip(stepped_of(optimizer), before, strict=True):
            assert torch.equal(each, weight) and torch.equal(state["exp_avg"], average)
        balancer.close()


def state_of(wrapped, optimizer, *, is_loading=False):
    model = wrapped.module.sharded_state_dict(metadata={**SAVED, "dp_cp_group": wrapped.dp_cp_group})
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=SAVED)}


@on_ranks(
    4, [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32), (True, torch.bfloat16)], timeout_s=200
)
def test_a_checkpoint_saved_away_is_divided_anew_by_the_host_over_any_ranks(
    rank, group, is_divided, dtype, *, tmp_path
):
    options, config = (
        {"is_divided": is_divided, "decoupled_lr": None},
        {"num_layers": 1, "bf16": dtype == torch.bfloat16},
    )
    folders = {ranks: tmp_path / f"{is_divided} {dtype} {ranks}" for ranks in (2, 1, 4)}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(**config), dtype)
        wrapped, optimizer, balancer = trained(model, tensor_parallel, 2, **options)
        balancer.move((3, 1))
        dist_checkpointing.save(state_of(wrapped, optimizer), str(folders[2]))
        update(wrapped, optimizer, 2, 0, 1)
        balancer.close(at_home=True)
        next_update = whole_of(model, tensor_parallel)
    for ranks in (1, 4):
        with megatron_on_cpu(ranks, seed=1) as tensor_parallel:
            model = gpt(config_of(**config), dtype)
            wrapped, optimizer = learner(model, **options)
            update(wrapped, optimizer, 0, 0, 1)  # without state the host itself cannot load
            loaded = dist_checkpointing.load(state_of(wrapped, optimizer, is_loading=True), str(folders[2]))
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            for _, state in stepped_of(optimizer):
                state["step"] = state["step"].clone()  # which it has loaded as one for all, counted by each
            dist_checkpointing.save(state_of(wrapped, optimizer), str(folders[ranks]))
            update(wrapped, optimizer, 2, 0, 1)
            for name, weight in whole_of(model, tensor_parallel).items():
                tolerance = 1e-6 if dtype == torch.float32 else 1e-2
                assert_close(weight, next_update[name], rtol=0.0, atol=tolerance, msg=f"{name} on {ranks}")
            first, again = (dist_checkpointing.load_plain_tensors(str(folders[each])) for each in (2, ranks))
            assert first.keys() == again.keys()
            assert all(torch.equal(value, again[key]) for key, value in first.items() if torch.is_tensor(value))

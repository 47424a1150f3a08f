"""Megatron-Core's layers, balanced: bit for bit its own at home, and the undivided model's wherever units are."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.megatron_models import (
    BATCH,
    LENGTH,
    WIDTH,
    config_of,
    divide,
    gpt,
    hybrid,
    loss_of,
    megatron_on_cpu,
    sum_partial_gradients,
    whole_of,
)
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import equal_loans, lend
from helpers.processes import caught_log_lines
from torch import nn
from torch.testing import assert_close

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments
from zeroresize.resharding.agreement import CannotMoveError

pytest.importorskip("megatron.core.tensor_parallel.layers")
megatron = pytest.importorskip("zeroresize.integrations.megatron")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

#: What is told of a model besides the usual, of its configuration and of itself.
CASES = {
    "gated": ({}, {}),
    "plain with biases": (
        {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True, "num_query_groups": 8},
        {},
    ),
    "fused": ({"bias_activation_fusion": True, "add_qkv_bias": True}, {}),
    "a sequence in parts": ({"sequence_parallel": True, "add_bias_linear": True}, {}),
    "tied words": ({}, {"share_embeddings_and_output_weights": True}),
    "recomputed": ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, {}),
    "attention recomputed": ({"recompute_granularity": "selective"}, {}),
    "gated attention": ({"attention_output_gate": True}, {}),
}


def gradients(model, step=0):
    model.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@on_ranks(2, [(case,) for case in CASES])
def test_a_converted_model_is_the_hosts_bit_for_bit(rank, group, case):
    of_config, of_model = CASES[case]
    with megatron_on_cpu(2):
        model = gpt(config_of(**of_config), **of_model)
        loss, expected = gradients(model)
        parameters = list(map(id, model.parameters()))
        zr.convert(model)
        kinds = {segment.kind for segment in owned_segments(balanced_layers(model))}
        assert len(balanced_layers(model)) == 8 and len(owned_segments(balanced_layers(model))) == 4
        assert kinds == {"heads" if of_config.get("num_query_groups") == 8 else "KV groups", "neurons"}
        assert list(map(id, model.parameters())) == parameters
        again, converted = gradients(model)
        assert torch.equal(loss, again)
        for name, gradient in expected.items():
            assert torch.equal(gradient, converted[name]), name


def trained(model, group, steps, moves, dtype=torch.float64):
    """Its losses and whole weights after so many steps of AdamW, with units moved before some of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = None
    if moves:
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact", update_every=100))
    losses = []
    for step in range(steps):
        if step in moves:
            balancer.move(moves[step])
        for micro_batch in range(2):
            loss = loss_of(model, 2 * step + micro_batch)
            loss.backward()
            losses.append(loss.item())
        if dist.get_world_size(group) > 1:
            sum_partial_gradients(model, group)
        optimizer.step()
        optimizer.zero_grad()
        if balancer is not None:
            balancer.step()
    if balancer is not None:
        balancer.close(at_home=True)
    return losses, whole_of(model, group)


def require_alike(losses, expected, moved, weights):
    """Losses and weights are those of the undivided model."""
    assert losses == pytest.approx(expected, abs=1e-9)
    for name, weight in weights.items():
        assert_close(moved[name], weight, rtol=0.0, atol=1e-9, msg=name)


@on_ranks(2, [(case,) for case in CASES])
def test_units_that_move_leave_losses_and_weights_those_of_the_undivided_model(rank, group, case):
    of_config, of_model = CASES[case]
    with megatron_on_cpu(1) as alone:
        undivided = gpt(
            config_of(**of_config | {"sequence_parallel": False}), torch.float64, parallel_output=False, **of_model
        )
        whole = whole_of(undivided, alone)
        expected, weights = trained(undivided, alone, 4, {})
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(**of_config), torch.float64, parallel_output=False, **of_model)
        divide(whole, model, tensor_parallel)
        losses, moved = trained(model, tensor_parallel, 4, {1: (3, 1), 2: (1, 3), 3: (1, 1)})
    require_alike(losses, expected, moved, weights)


@on_ranks(2, [(False,), (True,)])
def test_a_hybrid_model_is_its_own_bit_for_bit_and_moves_leave_it_the_undivided_model(rank, group, is_divided):
    of_config = {"num_layers": 4}
    with megatron_on_cpu(1) as alone:
        undivided = hybrid(config_of(**of_config), torch.float64, parallel_output=False)
        whole = whole_of(undivided, alone)
        expected, weights = trained(undivided, alone, 4, {})
    with megatron_on_cpu(2) as tensor_parallel:
        model = hybrid(config_of(sequence_parallel=is_divided, **of_config), torch.float64, parallel_output=False)
        divide(whole, model, tensor_parallel)
        loss, of_host = gradients(model)
        zr.convert(model)
        again, converted = gradients(model)
        assert torch.equal(loss, again) and len(owned_segments(balanced_layers(model))) == 4
        assert all(torch.equal(converted[name], gradient) for name, gradient in of_host.items())
        model.zero_grad()
        losses, moved = trained(model, tensor_parallel, 4, {1: (3, 1), 2: (1, 3), 3: (1, 1)})
    require_alike(losses, expected, moved, weights)


@on_ranks(2, [(False,), (True,)])
def test_columns_are_lent_also_while_a_sequence_is_divided(rank, group, is_divided):
    with megatron_on_cpu(2) as tensor_parallel:
        config = config_of(num_layers=1, sequence_parallel=is_divided, add_bias_linear=True)
        model = gpt(config, torch.float64, parallel_output=False)
        loss, expected = gradients(model)
        zr.convert(model)
        lend(balanced_layers(model), tensor_parallel, equal_loans({1: 0.5}, 2), "broadcast-reduce")
        again, lent = gradients(model)
    assert_close(again, loss, rtol=0.0, atol=1e-12)
    for name, gradient in expected.items():
        assert_close(lent[name], gradient, rtol=0.0, atol=1e-12, msg=name)


#: What layers, or their model, are given, and what is said of them.
LEFT_ALONE = {
    "an expert's": (lambda layer: setattr(layer, "is_expert", True), "it is an expert's"),
    "a shared expert's": (
        lambda layer: setattr(layer, "explicit_expert_comm", True),
        "explicit_expert_comm=True leaves",
    ),
    "fused dw": (lambda layer: setattr(layer, "gradient_accumulation_fusion", True), "gradient_accumulation_fusion"),
    "shards of its weight": (lambda layer: setattr(layer, "gtp_remat_size", 2), "gtp_remat_size=2"),
    "TransformerEngine": (
        lambda layer: setattr(
            layer,
            "__class__",
            type("TEColumnParallelLinear", (nn.Module,), {"__module__": megatron._TRANSFORMER_ENGINE}),
        ),
        "TransformerEngine computes a TEColumnParallelLinear",
    ),
}


@on_ranks(2, [(case,) for case in LEFT_ALONE])
def test_what_is_not_balanced_is_named_and_its_partner_stays_even(rank, group, case):
    change, reason = LEFT_ALONE[case]
    with megatron_on_cpu(2):
        model = gpt(config_of(num_layers=1))
        change(model.decoder.layers[0].mlp.linear_fc1)
        with caught_log_lines() as lines:
            zr.convert(model)
        assert [segment.name for segment in owned_segments(balanced_layers(model))] == [
            "decoder.layers.0.self_attention.linear_proj"
        ]
        said = " ".join(map(str, lines))
        assert f"linear_fc1 is left alone: {reason}" in said
        assert rank or "layer output_layer is left alone: it is a vocabulary head" in said


@on_ranks(2)
def test_heads_stay_once_ranks_hold_different_norms_of_them(rank, group):
    with megatron_on_cpu(2):
        model = gpt(config_of(num_layers=1, qk_layernorm=True))
        optimizer = torch.optim.AdamW(model.parameters())
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(start_checks=False))
        balancer.move((3, 1))
        loss_of(model, 0).backward()
        optimizer.step()  # without what sums gradients of norms
        balancer.step()
        balancer.move((1, 1))  # home is right of what was wrong before
        with pytest.raises(CannotMoveError, match=r"layernorm.weight, which serves all units, is not the same"):
            balancer.move((3, 1))
        balancer.close(at_home=True)


@on_ranks(2)
def test_calls_of_the_host_give_what_they_gave_and_are_refused_while_units_are_away(rank, group):
    with megatron_on_cpu(2):
        model = gpt(config_of(num_layers=1))
        column = model.decoder.layers[0].mlp.linear_fc1
        x = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
        calls = (x, column.weight.detach() * 2), (x, None, True)
        expected = [column(*call)[0] for call in calls]
        balancer = zr.Balancer(model, torch.optim.AdamW(model.parameters()), zr.BalanceConfig(start_checks=False))
        assert all(torch.equal(column(*call)[0], y) for call, y in zip(calls, expected, strict=True))
        balancer.move((3, 1))
        for call in calls:
            with pytest.raises(
                RuntimeError, match=r"a forward with weight= or .* of decoder.*fc1, whose units are away"
            ):
                column(*call)
        balancer.close(at_home=True)


@on_ranks(2)
def test_layers_of_another_version_are_left_alone_by_name(rank, group, *, monkeypatch):
    with megatron_on_cpu(2):
        model = gpt(config_of(num_layers=1))
        for layer in filter(megatron.is_parallel_linear, model.modules()):
            del layer.tp_group
        monkeypatch.setattr(megatron.megatron_core, "__version__", "0.14.2")
        with pytest.raises(ValueError, match=r"linear_proj: it is of Megatron-Core 0\.14\.2; 0\.19 is known"):
            zr.convert(model)


@on_ranks(2)
def test_experts_of_another_group_are_left_alone_and_what_ranks_call_alike_is_not_saved(rank, group):
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with megatron_on_cpu(2, **sizes):
        config = config_of(num_layers=1, num_moe_experts=2, sequence_parallel=True, **sizes)
        model = gpt(config_of(num_layers=1))
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        tp_group = parallel_state.get_expert_tensor_parallel_group()
        model.expert = MLP(config, layers, is_expert=True, ffn_hidden_size=48, tp_group=tp_group)
        assert len(balanced_layers(zr.convert(model))) == 4
        with pytest.raises(ValueError, match=r"expert\..*weight is of Megatron-Core's experts, which 2 ranks divide"):
            zr.sharded_state_dict(model)
    with megatron_on_cpu(1, pipeline_model_parallel_size=2):
        config = config_of(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
        model = gpt(config, pre_process=rank == 0, post_process=rank == 1)
        with pytest.raises(
            ValueError, match=r"each of the 2 stages .* layers\.0 and so on.*Allowed are pipeline_model_"
        ):
            zr.sharded_state_dict(model)


@on_ranks(2)
def test_an_activation_that_mixes_neurons_and_groups_that_ranks_share_stay_even(rank, group):
    with megatron_on_cpu(2):
        mixing = config_of(num_layers=1, gated_linear_unit=False, activation_func=lambda x: x.softmax(-1))
        shared = config_of(num_layers=1, num_query_groups=1)
        for config, kinds, reason in (
            (mixing, ["KV groups"], "its activation, computed with numbers: MixesUnitsError"),
            (shared, ["neurons"], "its 1 groups of keys and values are fewer than the ranks"),
        ):
            model = gpt(config)
            zr.convert(model)
            assert [segment.kind for segment in owned_segments(balanced_layers(model))] == kinds
            reasons = [layer.stays_even or "" for layer in balanced_layers(model).values()]
            assert sum(reason in each for each in reasons) == 2


@on_ranks(2)
def test_a_checkpoint_saved_away_is_the_undivided_models(rank, group, *, tmp_path):
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(num_layers=1))
        expected = whole_of(model, tensor_parallel)
        balancer = zr.Balancer(model, torch.optim.AdamW(model.parameters()), zr.BalanceConfig(start_checks=False))
        balancer.move((3, 1))
        dcp.save(zr.sharded_state_dict(model), checkpoint_id=tmp_path / "saved")
        balancer.close(at_home=True)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name

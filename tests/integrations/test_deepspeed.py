"""DeepSpeed's AutoTP, balanced: bit for bit its own at home, and the undivided model's wherever units are."""

import pytest
import torch
import torch.distributed as dist
from helpers.deepspeed_models import engine_of, llama, part_at_home, undivided_run, update, words
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import equal_loans, lend
from helpers.processes import caught_log_lines
from torch.testing import assert_close

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments
from zeroresize.resharding.agreement import CannotMoveError

pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24, "intermediate_size": 53}
CASES = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "three KV heads and 53 neurons": UNEVEN,
    "Qwen2": {"kind": transformers.Qwen2Config},
}


def gradients(engine):
    engine.zero_grad()
    for parameter in engine.module.parameters():
        parameter.grad = None
    loss = engine.module(input_ids=words(0), labels=words(0)).loss
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in engine.module.named_parameters()}


@on_ranks(2, [(case,) for case in CASES])
def test_a_converted_model_is_the_hosts_bit_for_bit(rank, group, case):
    engine = engine_of(llama(**CASES[case]), rank)
    loss, expected = gradients(engine)
    parameters = list(map(id, engine.module.parameters()))
    zr.convert(engine.module)
    segments = owned_segments(balanced_layers(engine.module))
    assert [segment.kind for segment in segments] == ["heads", "neurons"] * 2
    if "three" in case:
        assert [segment.counts for segment in segments][:2] == [(4, 2), (27, 26)]
    assert list(map(id, engine.module.parameters())) == parameters
    again, converted = gradients(engine)
    assert torch.equal(loss, again)
    for name, gradient in expected.items():
        assert torch.equal(gradient, converted[name]), name


def states_of(engine):
    """Weights, and what this replica steps and keeps of them."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    stepped = [each for group in inner.param_groups for each in group["params"]]
    kept = [value for each in stepped for value in inner.state.get(each, {}).values()]
    assert kept
    return [torch.as_tensor(each).detach().clone() for each in (*engine.module.parameters(), *stepped, *kept)]


def balanced(engine):
    zr.convert(engine)
    config = zr.BalanceConfig(mode="exact", update_every=100, start_checks=False)
    return zr.Balancer(engine, engine.optimizer, config)


@pytest.mark.slow
@on_ranks(4, [(0, "three KV heads and 53 neurons"), (1, "biases"), (2, "three KV heads and 53 neurons")])
def test_units_that_move_leave_losses_and_weights_those_of_the_undivided_model(rank, group, stage, case):
    steps, replica = 5, rank // 2
    losses, weights = undivided_run(llama(**CASES[case]), steps, 2)
    of_zero = {"stage": stage, "overlap_comm": True}
    engine = engine_of(llama(**CASES[case]), rank, zero_optimization=of_zero)
    balancer, seen = balanced(engine), []
    parameters = list(map(id, engine.module.parameters()))
    for step in range(steps):
        seen += update(engine, step, replica, 2)
        balancer.step()
        if (shares := {0: (3, 1), 1: (1, 3), 2: (2, 1), 3: (1, 1)}.get(step)) is not None:
            balancer.move(shares)
    assert list(map(id, engine.module.parameters())) == parameters
    assert seen == pytest.approx(losses[replica::2], abs=1e-6)
    for name, weight in engine.module.named_parameters():
        assert_close(weight, part_at_home(name, weights[name], engine.module, rank), rtol=0, atol=1e-6, msg=name)
    balancer.close()


def in_groups(model):
    """One of a single element, which is padding alone on a replica."""
    model.scale = torch.nn.Parameter(torch.ones(1))
    model.model.norm.register_forward_hook(lambda norm, given, y: y * model.scale)
    others = [parameter for parameter in model.parameters() if parameter is not model.scale]
    return torch.optim.AdamW([{"params": others}, {"params": [model.scale], "weight_decay": 0.0}], lr=1e-3)


def partly_frozen(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


#: The stage, what DeepSpeed is told besides, what makes the optimizer, and what computes gradients.
AWAY = {
    "ZeRO-0": (0, {}, None, None),
    "ZeRO-1, a group of one element": (1, {}, in_groups, None),
    "ZeRO-1, Adagrad, torch's own backward": (
        1,
        {},
        lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-3),
        torch.Tensor.backward,
    ),
    "ZeRO-2, frozen weights": (2, {}, partly_frozen, torch.Tensor.backward),
    "ZeRO-2, bfloat16": (2, {"bf16": {"enabled": True}}, None, None),
}


@on_ranks(4, [(case,) for case in AWAY], timeout_s=120)
def test_units_that_were_away_are_what_they_were_bit_for_bit(rank, group, case):
    stage, config, optimizer_of, backward = AWAY[case]
    of_engine = []
    for _ in range(2):
        model = llama()
        optimizer = optimizer_of(model) if optimizer_of else None
        of_engine.append(engine_of(model, rank, stage=stage, optimizer=optimizer, **config))
    engine, stayed = of_engine
    balancer = balanced(engine)
    for each in of_engine:
        update(each, 0, rank // 2, 2, backward)
    balancer.step()  # which asks what moves cost
    before = states_of(engine)
    for shares in ((3, 1), (1, 3), (1, 1)):
        balancer.move(shares)
        assert balancer.plan.owned == shares_of_mean_one(shares)
    after = states_of(engine)
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    balancer.close()
    for each in of_engine:
        update(each, 1, rank // 2, 2, backward)
    assert all(map(torch.equal, states_of(engine), states_of(stayed)))


def shares_of_mean_one(shares):
    return tuple(share * len(shares) / sum(shares) for share in shares)


@on_ranks(2, [(0,), (1,), (2,)])
def test_columns_are_lent(rank, group, stage):
    engine = engine_of(llama(), rank, stage=stage)
    loss = engine.module(input_ids=words(0), labels=words(0)).loss
    zr.convert(engine.module)
    lend(balanced_layers(engine.module), group, equal_loans({1: 0.5}, 2), "broadcast-reduce")
    assert_close(engine.module(input_ids=words(0), labels=words(0)).loss, loss, rtol=0.0, atol=1e-6)
    expected, lent = engine_of(llama(), rank, stage=stage), engine
    for each in (expected, lent):
        update(each, 0)
    for name, weight in expected.module.named_parameters():
        assert_close(lent.module.get_parameter(name), weight, rtol=0.0, atol=1e-6, msg=name)


@on_ranks(2)
def test_a_division_that_leaves_a_rank_nothing_is_told_and_its_partner_stays(rank, group):
    engine = engine_of(llama(num_key_value_heads=2, intermediate_size=1), rank)
    with caught_log_lines() as lines:
        zr.convert(engine.module)
    kinds = [segment.kind for segment in owned_segments(balanced_layers(engine.module))]
    assert kinds == ["heads"] * 2
    assert rank or "down_proj is left alone: AutoTP leaves ranks [1] of the group nothing of it" in " ".join(
        map(str, lines)
    )


@on_ranks(2)
def test_what_cannot_move_is_named_on_all_ranks(rank, group):
    engine = engine_of(llama(), rank, stage=3)
    with pytest.raises(ValueError, match="DeepSpeed's ZeRO-3 shards its weight"):
        zr.convert(engine.module)
    engine = engine_of(llama(), rank, stage=2)
    update(engine, 0)
    balancer = balanced(engine)
    engine.backward(engine(input_ids=words(0), labels=words(0)).loss)  # the first of two micro-batches
    engine.step()
    with pytest.raises(CannotMoveError, match="gradients of a step under way"):
        balancer.move((3, 1))
    engine.backward(engine(input_ids=words(1), labels=words(1)).loss)
    engine.step()
    balancer.move((3, 1))
    with pytest.raises(RuntimeError, match="divided unevenly"):
        engine.module.state_dict()
    balancer.close(at_home=True)
    dist.barrier()

"""Colossal-AI's low-level ZeRO beside tensor parallelism: units move with what each replica steps of them."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers.colossalai_models import (
    adamw,
    backward,
    boosted,
    end_update,
    llama,
    part_at_home,
    stand_in_for_a_gpu,
    states_of,
    undivided_run,
    update,
)
from helpers.hosts import Host
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import equal_loans, lend
from torch.testing import assert_close

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments
from zeroresize.resharding.agreement import CannotMoveError

pytestmark = [pytest.mark.usefixtures("colossalai_module"), pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

EXACT = zr.BalanceConfig(mode="exact", update_every=100, start_checks=False)
#: The stage, and what the plugin is told besides.
LEARNERS = {
    "ZeRO-1": (1, {}),
    "ZeRO-1, overlapped": (1, {"overlap_communication": True}),
    "ZeRO-2": (2, {}),
    "ZeRO-2, overlapped": (2, {"overlap_communication": True}),
}


def balanced(run):
    return zr.Balancer(run.model, run.optimizer, EXACT)


def counts_of(run):
    return {segment.counts for segment in owned_segments(balanced_layers(run.model))}


def assert_undivided(run, weights, atol=1e-6):
    for name, weight in run.model.unwrap().named_parameters():
        expected = part_at_home(weights[name], weight, run.plugin.tp_group.rank())
        assert_close(weight, expected, rtol=0.0, atol=atol, msg=name)


@on_ranks(4, [(kind,) for kind in LEARNERS], timeout_s=200)
def test_units_that_move_leave_losses_and_weights_those_of_the_undivided_model(rank, group, kind):
    stage, options = LEARNERS[kind]
    losses, weights = undivided_run(llama(), 5, 2)
    run = boosted(group, llama(), stage=stage, **options)
    balancer, seen = balanced(run), []
    parameters = list(map(id, run.model.parameters()))
    for step in range(5):
        seen += update(run, step)
        balancer.step()
        if (shares := {0: (3, 1), 1: (1, 3), 2: (3, 1), 3: (1, 1)}.get(step)) is not None:
            balancer.move(shares)
            assert counts_of(run) == {tuple(size * share // sum(shares) for share in shares) for size in (8, 64)}
    assert list(map(id, run.model.parameters())) == parameters
    assert seen == pytest.approx(losses[run.plugin.dp_group.rank() :: 2], abs=1e-6)
    assert_undivided(run, weights)
    balancer.close()


@on_ranks(4, [(kind,) for kind in LEARNERS], timeout_s=200)
def test_a_model_whose_units_never_moved_trains_as_the_hosts_bit_for_bit(rank, group, kind):
    stage, options = LEARNERS[kind]
    host, run = (boosted(group, llama(), stage=stage, **options) for _ in range(2))
    balancer = balanced(run)
    assert len(owned_segments(balanced_layers(run.model))) == 4
    for step in range(3):
        assert update(host, step) == update(run, step)
        balancer.step()
    assert all(map(torch.equal, states_of(host), states_of(run)))
    balancer.close()


def in_groups(model):
    """Of other settings, one of a single element, of which a replica steps nothing."""
    model.scale = torch.nn.Parameter(torch.ones(1))
    model.model.norm.register_forward_hook(lambda norm, given, y: y * model.scale)
    others = [parameter for parameter in model.parameters() if parameter is not model.scale]
    return torch.optim.NAdam([{"params": others}, {"params": [model.scale], "lr": 0.1}], lr=1e-3)


def partly_frozen(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.requires_grad_(False)
    return adamw(model)


#: The stage, the precision, what makes the optimizer, and what the model is told.
AWAY = {
    "a group of one element": (1, "fp32", in_groups, {}),
    "shards that are filled up": (2, "fp32", adamw, {"intermediate_size": 62, "mlp_bias": True}),
    "frozen weights": (2, "fp32", partly_frozen, {}),
    "bfloat16": (1, "bf16", adamw, {}),
    "bfloat16, ZeRO-2": (2, "bf16", adamw, {}),
    "float16": (1, "fp16", adamw, {}),
}


def bits(tensor):
    """Zeros of another sign are others."""
    return tensor.contiguous().flatten().view(torch.uint8)


@on_ranks(4, [(case, num) for case in AWAY for num in (0, 1)], timeout_s=200)
def test_units_that_were_away_are_what_they_were_bit_for_bit(rank, group, case, num_updates):
    """Also with gradients of a step that is under way, which move along."""
    stage, precision, make_optimizer, changes = AWAY[case]
    run, stayed = (
        boosted(group, llama(**changes), stage=stage, precision=precision, make_optimizer=make_optimizer)
        for _ in range(2)
    )
    group_of_replicas = None if case != "frozen weights" else run.plugin.dp_group
    balancer = zr.Balancer(run.model, run.optimizer, EXACT, data_parallel_group=group_of_replicas)
    for each in (run, stayed):
        for step in range(num_updates):
            update(each, step)
        backward(each, 2 * num_updates)
    groups = [dict(each, params=()) for each in run.optimizer.param_groups]
    same, before = list(run.optimizer.param_groups), states_of(run)
    for shares in ((3, 1), (1, 3), (1, 1)):
        balancer.move(shares)
        assert counts_of(run) != {(4, 4), (32, 32)} or shares == (1, 1)
    after = states_of(run)
    assert len(before) == len(after) and all(map(torch.equal, map(bits, before), map(bits, after)))
    assert all(each is now for each, now in zip(same, run.optimizer.param_groups, strict=True))
    assert groups == [dict(each, params=()) for each in run.optimizer.param_groups]
    balancer.close()
    for each in (run, stayed):
        backward(each, 2 * num_updates + 1)
        end_update(each)
        update(each, num_updates + 1)
    assert all(map(torch.equal, states_of(run), states_of(stayed)))


@on_ranks(4, [(1, "fp32"), (2, "fp32"), (1, "bf16")], timeout_s=200)
def test_gradients_move_along_with_a_step_under_way(rank, group, stage, precision):
    runs = [boosted(group, llama(), stage=stage, precision=precision) for _ in range(2)]
    balancer = balanced(runs[0])
    for run in runs:
        update(run, 0)
        backward(run, 2)
    balancer.move((3, 1))
    for run in runs:
        backward(run, 3)
        run.optimizer.step()  # whose gradients stay until they are set to zero
    balancer.move((1, 1))
    atol = 1e-6 if precision == "fp32" else 1e-2
    for run in runs:
        run.optimizer.zero_grad()
        update(run, 2)
    for moved, stayed in zip(*map(states_of, runs), strict=True):
        assert_close(moved, stayed, rtol=0.0, atol=atol)
    balancer.close()


@on_ranks(4, [(1, "bf16", True), (2, "bf16", False), (1, "fp32", False)], timeout_s=200)
def test_checkpoints_are_the_hosts_at_home_and_refused_away(rank, group, stage, precision, is_sharded, *, tmp_path):
    folder = tmp_path / f"{stage} {precision} {is_sharded}"
    folder.mkdir(exist_ok=True)
    run, plain = (
        boosted(group, llama(initializer_range=spread), stage=stage, precision=precision) for spread in (0.02, 0.5)
    )
    balancer = balanced(run)
    update(run, 0)
    balancer.move((3, 1))
    update(run, 1)
    model_path, optimizer_path = str(folder / "model"), str(folder / "optimizer")
    begin = time.monotonic()
    for call in (
        lambda: run.booster.save_model(run.model, model_path, shard=is_sharded),
        lambda: run.booster.save_optimizer(run.optimizer, optimizer_path, shard=is_sharded),
        lambda: run.optimizer.state_dict(),
    ):
        with pytest.raises(RuntimeError, match=r"(of unevenly divided layers|divided unevenly).*at_home\(\)"):
            call()
    assert time.monotonic() - begin < 5
    dist.barrier()
    with balancer.at_home():
        run.booster.save_model(run.model, model_path, shard=is_sharded)
        run.booster.save_optimizer(run.optimizer, optimizer_path, shard=is_sharded)
    for call in (
        lambda: run.booster.load_model(run.model, model_path),
        lambda: run.booster.load_optimizer(run.optimizer, optimizer_path),
    ):
        with pytest.raises(RuntimeError, match=r"of unevenly divided layers.*at_home\(\)"):
            call()
    dist.barrier()
    balancer.close(at_home=True)
    plain.booster.load_model(plain.model, model_path)
    plain.booster.load_optimizer(plain.optimizer, optimizer_path)
    dtype = next(run.model.parameters()).dtype  # the host makes masters of weights that it loads
    for saved, loaded in zip(*map(states_of, (run, plain)), strict=True):
        assert torch.equal(saved.to(dtype), loaded.to(dtype))
    if dtype == torch.float32:
        assert update(run, 2) == update(plain, 2)
        assert all(map(torch.equal, states_of(run), states_of(plain)))


@on_ranks(4, [(1,), (2,)], timeout_s=120)
def test_columns_are_lent(rank, group, stage):
    host, run = (boosted(group, llama(), stage=stage) for _ in range(2))
    zr.convert(run.model)
    loans = equal_loans({1: 0.5}, 2)
    lender = lend(balanced_layers(run.model), run.plugin.tp_group, loans, "broadcast-reduce")
    for step in range(2):
        assert update(run, step) == pytest.approx(update(host, step), abs=1e-6)
        lender.send_weights()
    for lent, expected in zip(*map(states_of, (run, host)), strict=True):
        assert_close(lent, expected, rtol=0.0, atol=1e-6)


@on_ranks(4, timeout_s=120)
def test_no_rank_is_left_without_units_which_the_host_cannot_step(rank, group):
    run = boosted(group, llama(), stage=1)
    balancer = balanced(run)
    update(run, 0)
    balancer.move((1, 0))
    assert counts_of(run) == {(6, 2), (63, 1)}
    update(run, 1)
    balancer.close(at_home=True)


def gemini(group):
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.zero.gemini import gemini_optimizer

    gemini_optimizer._AVAIL_OPTIM_LIST.add(torch.optim.AdamW)  # the others want a compiler
    plugin = GeminiPlugin(tp_size=2, precision="bf16", pin_memory=False, enable_async_reduce=False, min_chunk_size_m=1)
    model = llama()
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, adamw(model))
    return model, optimizer, plugin


@on_ranks(4)
def test_gemini_is_refused_by_name(rank, group):
    Host(group)
    stand_in_for_a_gpu()
    model, optimizer, _plugin = gemini(group)
    before, begin = [parameter.detach().clone() for parameter in model.parameters()], time.monotonic()
    with pytest.raises(ValueError, match=r"its weight is a ColoParameter, as Colossal-AI's GeminiPlugin \(in chunks\)"):
        zr.Balancer(model, optimizer, EXACT)
    assert time.monotonic() - begin < 5
    assert all(map(torch.equal, before, model.parameters()))
    dist.barrier()


@on_ranks(4, [(False,), (True,)])
def test_weights_that_are_gathered_during_a_forward_are_refused_by_name(rank, group, from_the_start):
    from colossalai.shardformer.policies.llama import LlamaForCausalLMPolicy

    from zeroresize.integrations.colossalai import balanced_policy

    policy = {"custom_policy": balanced_policy(LlamaForCausalLMPolicy)()} if from_the_start else {}
    run = boosted(group, llama(), stage=1, overlap_allgather=True, **policy)
    with pytest.raises(ValueError, match=r"its weight is a ColoParameter, as .* overlap_allgather=True"):
        balanced(run)
    dist.barrier()


@on_ranks(4)
def test_zero_that_knows_no_tensor_parallelism_is_refused_by_name(rank, group):
    """As LowLevelZeroPlugin has it, whose replicas are all ranks."""
    from colossalai.zero.low_level import LowLevelZeroOptimizer

    run = boosted(group, llama())
    optimizer = LowLevelZeroOptimizer(adamw(run.model))
    balancer = zr.Balancer(run.model, optimizer, EXACT)
    begin = time.monotonic()
    with pytest.raises((ValueError, CannotMoveError), match="LowLevelZeroOptimizer is not known beside"):
        balancer.move((3, 1))
    assert time.monotonic() - begin < 5
    balancer.close()

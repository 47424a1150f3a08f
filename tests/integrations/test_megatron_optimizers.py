"""Units move inside Megatron-Core's DistributedDataParallel, with its optimizers, whole and divided over replicas."""

import time
import types

import pytest
import torch
from helpers.megatron_models import (
    config_of,
    divide,
    gpt,
    learner,
    loss_of,
    megatron_on_cpu,
    undivided_run,
    update,
    whole_of,
)
from helpers.on_ranks import gathered, on_ranks
from torch.testing import assert_close

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments
from zeroresize.resharding.agreement import CannotMoveError

pytest.importorskip("megatron.core.tensor_parallel.layers")

from megatron.core import parallel_state

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

EXACT = zr.BalanceConfig(mode="exact", update_every=100, start_checks=False)
STEPS, MOVES = 6, {1: (3, 1), 3: (1, 3), 5: (1, 1)}
#: What is told of Megatron-Core's wrapper and optimizer.
LEARNERS = {
    "whole": {},
    "whole, overlapped": {"overlaps": True, "bucket_size": 3000},
    "in parts": {"is_divided": True},
    "in parts, overlapped": {"is_divided": True, "overlaps": True, "bucket_size": 3000},
}


def trained(model, group, moves, replicas, steps=STEPS, balances=True, **options):
    """Its losses, wrapper, optimizer and balancer after so many updates, with units moved before some of them."""
    wrapped, optimizer = learner(model, **options)
    balancer = zr.Balancer(wrapped, optimizer, EXACT, process_group=group) if balances else None
    losses = []
    for step in range(steps):
        if step in moves:
            balancer.move(moves[step])
            assert shares_of(model) == {
                tuple(num_units * share // sum(moves[step]) for share in moves[step]) for num_units in (48, 4)
            }
        losses += update(wrapped, optimizer, step, replicas.rank(), replicas.size())
        if balancer is not None:
            balancer.step()
    return losses, wrapped, optimizer, balancer


def shares_of(model):
    return {segment.owned.counts for segment in owned_segments(balanced_layers(model))}


#: With parameters that finalize_model_grads sums, and such as have no matrix.
DIVIDED = {"sequence_parallel": True, "add_bias_linear": True, "add_qkv_bias": True}
WITH_NORMS = {"qk_layernorm": True}
CASES = [(kind, {}) for kind in LEARNERS]
CASES += [("in parts, overlapped", DIVIDED), ("whole", WITH_NORMS), ("in parts, overlapped", WITH_NORMS)]


@on_ranks(4, CASES, timeout_s=300)
def test_weights_are_the_undivided_models_wherever_units_were(rank, group, kind, of_config):
    with megatron_on_cpu(1):
        undivided = config_of(**of_config | {"sequence_parallel": False})
        whole, expected, losses = undivided_run(undivided, STEPS, num_replicas=2)
    with megatron_on_cpu(2) as tensor_parallel:
        replicas = parallel_state.get_data_parallel_group()
        model = gpt(config_of(**of_config), parallel_output=False)
        divide(whole, model, tensor_parallel)
        seen, *_, balancer = trained(model, tensor_parallel, MOVES, replicas, **LEARNERS[kind])
        balancer.close(at_home=True)
        assert seen == pytest.approx(losses[replicas.rank() :: 2], abs=2e-6)
        for name, weight in whole_of(model, tensor_parallel).items():
            assert_close(weight, expected[name], rtol=0.0, atol=1e-6, msg=name)
            for other in gathered(replicas, weight):
                assert torch.equal(other, weight), name


def held_of(wrapped, optimizer):
    """What this rank holds: weights, and of all that is stepped the copies and the optimizer's state, in order."""
    inner = optimizer.chained_optimizers[0].optimizer
    held = {name: weight.detach().clone() for name, weight in wrapped.module.named_parameters()}
    for number, stepped in enumerate(tensor for group in inner.param_groups for tensor in group["params"]):
        held[f"stepped {number}"] = stepped.detach().clone()
        held |= {f"{key} {number}": torch.as_tensor(value).clone() for key, value in inner.state[stepped].items()}
    return held


def bits(tensor):
    """Zeros of another sign are others."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


#: With masters, too; and what is there before the first step.
ROUNDS = [(kind, dtype, steps) for kind in LEARNERS for dtype in (torch.float32, torch.bfloat16) for steps in (0, 2)]


@on_ranks(4, ROUNDS, timeout_s=200)
def test_there_and_back_leaves_every_bit(rank, group, kind, dtype, steps):
    with megatron_on_cpu(2) as tensor_parallel:
        replicas = parallel_state.get_data_parallel_group()
        model = gpt(config_of(bf16=dtype == torch.bfloat16), dtype)
        _, wrapped, optimizer, balancer = trained(model, tensor_parallel, {}, replicas, steps, **LEARNERS[kind])
        for state in optimizer.chained_optimizers[0].optimizer.state.values():
            state["exp_avg"].view(-1)[0] = -0.0
        before, groups = held_of(wrapped, optimizer), [dict(group) for group in optimizer.param_groups]
        same, gradients = [*optimizer.param_groups], [buffer.grad_data for buffer in wrapped.buffers]
        balancer.move((3, 1))
        assert balancer.plan.owned == (1.5, 0.5) and (12, 36) not in shares_of(model)
        assert all(of_buffer.untyped_storage().size() == 0 for of_buffer in gradients)
        freed = {of_buffer.untyped_storage().data_ptr() for of_buffer in gradients}
        leaves = [each for of_group in optimizer.param_groups for each in of_group["params"] if each.is_leaf]
        for each in (*model.parameters(), *leaves):
            assert each.grad is None or each.grad.untyped_storage().data_ptr() not in freed
        balancer.move((1, 1))
        assert all(group is now for group, now in zip(same, optimizer.param_groups, strict=True))
        after = held_of(wrapped, optimizer)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(bits(tensor), bits(after[name])) and tensor.dtype == after[name].dtype, name
        for group, now in zip(groups, optimizer.param_groups, strict=True):
            assert {key: value for key, value in group.items() if key != "params"} == {
                key: value for key, value in now.items() if key != "params"
            }
        balancer.close()


@on_ranks(4, [(kind,) for kind in LEARNERS], timeout_s=200)
def test_a_model_whose_units_never_moved_trains_as_the_hosts_bit_for_bit(rank, group, kind):
    with megatron_on_cpu(2) as tensor_parallel:
        replicas, runs = parallel_state.get_data_parallel_group(), []
        for balances in (False, True):
            model = gpt(config_of())
            options = {"steps": 3, "balances": balances, **LEARNERS[kind]}
            losses, wrapped, optimizer, _ = trained(model, tensor_parallel, {}, replicas, **options)
            runs.append((losses, held_of(wrapped, optimizer)))
        assert len(balanced_layers(model)) == 8 and len(owned_segments(balanced_layers(model))) == 4
        assert runs[0][0] == runs[1][0]
        assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


@on_ranks(4, [("whole",), ("in parts",)], timeout_s=200)
def test_half_precision_follows_its_masters_wherever_units_were(rank, group, kind):
    with megatron_on_cpu(2) as tensor_parallel:
        replicas, runs = parallel_state.get_data_parallel_group(), []
        for moves in ({}, MOVES):
            model = gpt(config_of(bf16=True), torch.bfloat16)
            _, _, optimizer, balancer = trained(model, tensor_parallel, moves, replicas, **LEARNERS[kind])
            balancer.close(at_home=True)
            inner = optimizer.chained_optimizers[0].optimizer
            runs.append([each.detach().clone() for group in inner.param_groups for each in group["params"]])
        assert all(each.dtype == torch.float32 for each in runs[0])
        for stayed, moved in zip(*runs, strict=True):
            assert_close(moved, stayed, rtol=0.0, atol=1e-3)


class AdamByGroups(torch.optim.Optimizer):
    """Counts steps as TransformerEngine's and Apex's Adam do: of each group that has anything here."""

    def __init__(self, params, lr, betas, eps, weight_decay, **_):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for stepped in group["params"]:
                state = self.state[stepped]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(stepped), "exp_avg_sq": torch.zeros_like(stepped)}
                state["exp_avg"].lerp_(stepped.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(stepped.grad.square(), 1 - group["betas"][1])
                first, second = (1 - beta ** group["step"] for beta in group["betas"])
                stepped.mul_(1 - group["lr"] * group["weight_decay"])
                size = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
                stepped.addcdiv_(state["exp_avg"], size, value=-group["lr"] / first)


@on_ranks(4, [(kind,) for kind in ("whole", "in parts")], timeout_s=200)
def test_steps_that_are_counted_by_groups_are_those_of_all_ranks(rank, group, kind, *, monkeypatch):
    import megatron.core.optimizer as of_megatron

    monkeypatch.setattr(of_megatron, "Adam", AdamByGroups)
    monkeypatch.setattr(of_megatron, "USING_PYTORCH_OPTIMIZER", False)
    with megatron_on_cpu(1):
        whole, expected, _ = undivided_run(config_of(), STEPS, num_replicas=2)
    with megatron_on_cpu(2) as tensor_parallel:
        replicas = parallel_state.get_data_parallel_group()
        model = gpt(config_of(), parallel_output=False)
        divide(whole, model, tensor_parallel)
        *_, optimizer, balancer = trained(model, tensor_parallel, MOVES, replicas, **LEARNERS[kind])
        if kind == "in parts" and replicas.rank() == 0:
            optimizer.param_groups[1]["step"] = 0  # as if no part of it had been here
        balancer.move((3, 1))
        assert {of_weights["step"] for of_weights in optimizer.param_groups} == {STEPS}
        balancer.close(at_home=True)
        for name, weight in whole_of(model, tensor_parallel).items():
            assert_close(weight, expected[name], rtol=0.0, atol=1e-6, msg=name)


#: How the optimizers save: such as the page says.
SAVED = {"distrib_optim_sharding_type": "fully_reshardable"}


def state_of(wrapped, optimizer, *, is_loading=False):
    model = wrapped.module.sharded_state_dict(metadata={**SAVED, "dp_cp_group": wrapped.dp_cp_group})
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=SAVED)}


CHECKPOINTS = [(kind, dtype) for kind in ("whole", "in parts") for dtype in (torch.float32, torch.bfloat16)]


@on_ranks(4, CHECKPOINTS, timeout_s=200)
def test_what_is_saved_away_is_loaded_by_the_host_itself(rank, group, kind, dtype, *, tmp_path):
    from megatron.core import dist_checkpointing

    folder = tmp_path / f"{kind} {dtype}"
    folder.mkdir(exist_ok=True)
    with megatron_on_cpu(2) as tensor_parallel:
        replicas, config = parallel_state.get_data_parallel_group(), config_of(bf16=dtype == torch.bfloat16)
        model = gpt(config, dtype)
        options = {"decoupled_lr": None, **LEARNERS[kind]}  # with it the host itself loads groups in another order
        _, wrapped, optimizer, balancer = trained(model, tensor_parallel, {1: (3, 1)}, replicas, 2, **options)
        dist_checkpointing.save(state_of(wrapped, optimizer), str(folder))
        with pytest.raises(RuntimeError, match=r"optimizer\.state_dict\(\): its state is of unevenly divided layers"):
            optimizer.state_dict()
        if kind == "in parts":  # by places in buffers, which are others at home
            with pytest.raises(RuntimeError, match="of unevenly divided layers"):
                optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
        with pytest.raises(RuntimeError, match="has units away: load with all units at home"):
            dist_checkpointing.load({"model": state_of(wrapped, optimizer)["model"]}, str(folder))
        balancer.close(at_home=True)
        saved = held_of(wrapped, optimizer)

        torch.manual_seed(1)
        plain = gpt(config, dtype)
        for weight in plain.parameters():
            weight.data.normal_()
        wrapped, optimizer = learner(plain, **options)
        update(wrapped, optimizer, 0, replicas.rank(), replicas.size())  # without state the host itself cannot load
        loaded = dist_checkpointing.load(state_of(wrapped, optimizer, is_loading=True), str(folder))
        plain.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        held = held_of(wrapped, optimizer)
    assert saved.keys() == held.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, held[name]), name


def set_in(part, name, value=True):
    return lambda wrapped, inner: setattr({"wrapper": wrapped.ddp_config, "optimizer": inner.config}[part], name, value)


#: What is set or there, and what is said of it.
REFUSED = {
    "buffers of NCCL": ("whole", set_in("wrapper", "nccl_ub"), "nccl_ub=True"),
    "weights in FP8": ("in parts", set_in("wrapper", "fp8_param_gather"), "fp8_param_gather=True"),
    "fetched late": ("in parts", set_in("wrapper", "overlap_param_gather"), "overlap_param_gather=True"),
    "instances": ("in parts", set_in("wrapper", "num_distributed_optimizer_instances", 2), "instances is above 1"),
    "moments in FP8": (
        "in parts",
        set_in("optimizer", "use_precision_aware_optimizer"),
        "use_precision_aware_optimizer=True",
    ),
    "on the CPU": ("in parts", set_in("optimizer", "optimizer_cpu_offload"), "optimizer_cpu_offload=True"),
    "chunks": ("in parts", lambda wrapped, inner: inner.model_chunks.append(wrapped), "several chunks of a model"),
    "a subclass": (
        "whole",
        lambda wrapped, inner: setattr(wrapped, "__class__", type("Wrapper", (type(wrapped),), {})),
        "a Wrapper may keep more",
    ),
    "layers by optimizer": (
        "whole",
        lambda wrapped, inner: setattr(wrapped.params_with_grad[0], "is_managed_by_layer_wise_optimizer", True),
        "a LayerWiseDistributedOptimizer steps",
    ),
}


@on_ranks(4, [(case,) for case in REFUSED], timeout_s=200)
def test_what_does_not_move_is_named_on_all_ranks_at_once(rank, group, case):
    kind, change, reason = REFUSED[case]
    with megatron_on_cpu(2) as tensor_parallel:
        wrapped, optimizer = learner(gpt(config_of(num_layers=1)), **LEARNERS[kind])
        change(wrapped, optimizer.chained_optimizers[0])
        begin = time.monotonic()
        balancer = zr.Balancer(wrapped, optimizer, EXACT, process_group=tensor_parallel)
        with pytest.raises((ValueError, RuntimeError), match=reason):
            balancer.move((3, 1))
        assert time.monotonic() - begin < 5 and balancer.plan.owned == (1, 1)
        assert shares_of(wrapped.module) == {(2, 2), (24, 24)}
        balancer.close()


@on_ranks(4)
def test_weights_in_buffers_do_not_move_without_their_optimizer(rank, group):
    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(num_layers=1))
        wrapped, _ = learner(model, is_divided=True)
        balancer = zr.Balancer(wrapped, torch.optim.AdamW(model.parameters()), EXACT, process_group=tensor_parallel)
        with pytest.raises(RuntimeError, match=r"its DistributedOptimizer was not given"):
            balancer.move((3, 1))
        balancer.close()


def fails(*_):
    raise RuntimeError("for the test")


#: Where one rank fails, and what the others say.
FAILURES = {
    "before all is gathered": ("zeroresize.integrations.megatron_buffers.ShardedByMegatron.describe", fails),
    "for lack of memory": ("zeroresize.resharding.agreement.free_bytes", lambda device: 0),
    "once all is gathered": ("zeroresize.resharding.units.moving_units.UnitMove.make_tensors", fails),
}


@on_ranks(4, [(case,) for case in FAILURES], timeout_s=200)
def test_where_one_rank_fails_nothing_has_changed_on_any(rank, group, case, *, monkeypatch):
    where, does = FAILURES[case]
    with megatron_on_cpu(2) as tensor_parallel:
        replicas, model = parallel_state.get_data_parallel_group(), gpt(config_of(num_layers=1))
        _, wrapped, optimizer, balancer = trained(
            model, tensor_parallel, {}, replicas, 2, **LEARNERS["in parts, overlapped"]
        )
        before, begin = held_of(wrapped, optimizer), time.monotonic()
        with monkeypatch.context() as patched:
            if rank == 3:
                patched.setattr(where, does)
            with pytest.raises(RuntimeError, match="nothing has moved or changed"):
                balancer.move((3, 1))
        assert time.monotonic() - begin < 5
        assert all(torch.equal(tensor, before[name]) for name, tensor in held_of(wrapped, optimizer).items())
        balancer.move((3, 1))
        update(wrapped, optimizer, 2, replicas.rank(), replicas.size())
        assert (36, 12) in shares_of(model)
        balancer.close(at_home=True)


@on_ranks(2, [(False,), (True,)])
def test_gradients_that_no_step_has_used_keep_units_where_they_are(rank, group, is_divided):
    with megatron_on_cpu(2) as tensor_parallel:
        wrapped, optimizer = learner(gpt(config_of(num_layers=1), parallel_output=False), is_divided=is_divided)
        config = zr.BalanceConfig(update_every=100, start_checks=False)
        balancer = zr.Balancer(wrapped, optimizer, config, process_group=tensor_parallel)
        for _ in range(2):
            update(wrapped, optimizer, 0, 0, 1)
            balancer.step()
            balancer.move((3, 1))  # the buffers hold what the step has used
            wrapped.zero_grad_buffer()
            balancer.move((1, 1))
            with wrapped.no_sync():
                loss_of(wrapped.module, 0).backward()
            with pytest.raises(CannotMoveError, match="hold gradients that no step has used"):
                balancer.move((3, 1))
        balancer.close()


@on_ranks(2, [(False,), (True,)], timeout_s=100)
def test_a_watch_names_who_is_slow_in_the_hosts_own_training_loop(rank, group, is_divided):
    """By Megatron-Core's schedule of micro-batches, whose steps the watch hears by its optimizer."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with megatron_on_cpu(2) as tensor_parallel:
        model = gpt(config_of(finalize_model_grads_func=finalize_model_grads), parallel_output=False)
        wrapped, optimizer = learner(model, is_divided=is_divided)
        of_model = model.decoder.layers[0].mlp.linear_fc1
        of_model.register_forward_hook(lambda *_: time.sleep(0.1 if rank else 0.005))
        schedule = get_forward_backward_func()

        def forward_step(steps, model):
            return loss_of(model.module, next(steps)), lambda loss: (loss, {})

        with zr.watch(wrapped, optimizer, process_group=tensor_parallel, update_every=2) as watch:
            for step in range(10):
                wrapped.zero_grad_buffer()
                optimizer.zero_grad()
                schedule(
                    forward_step_func=forward_step,
                    data_iterator=iter((2 * step, 2 * step + 1)),
                    model=wrapped,
                    num_microbatches=2,
                    seq_length=8,
                    micro_batch_size=4,
                    forward_only=False,
                )
                assert optimizer.step()[0]
            (slow,) = watch.report().slow
        assert slow.rank == 1 and slow.times > 1.5


def test_an_optimizer_that_megatron_leaves_half_made_is_refused_by_name():
    from zeroresize.integrations.megatron_buffers import ShardedByMegatron

    half = types.SimpleNamespace(optimizer=None, model_chunks=[Chunk()])
    assert "use_megatron_fsdp" in ShardedByMegatron(half).why_not()


class Chunk:
    """Stands in for a wrapper of a part of a model, which is remembered weakly."""

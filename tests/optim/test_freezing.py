"""pruned_update="freeze": pruned columns of weights and optimizer state stay, bit for bit; all others step as ever."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.hosts import Host, batch, small_vit
from helpers.processes import for_each
from helpers.virtual_training import Run
from torch import nn

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.measure.column_statistics import PathLength
from zeroresize.optim.freezing import ColumnFreezer
from zeroresize.optim.optimizers import stepped_tensors, torch_optimizer, why_sharded
from zeroresize.plan.layer import LayerPlan

COLUMNS = 7
OPTIMIZERS = {
    "AdamW, foreach": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1, fused=True),
    "AMSGrad": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1, amsgrad=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
}
#: Pruned columns, step by step; the very first step makes the optimizer's state.
PLANS = [[0, 3], [0, 3], [3, 5, 6], None, [1]]


def plan_of(pruned):
    return None if pruned is None else LayerPlan.from_pruned(torch.tensor(pruned), COLUMNS)


def gradient(step, pruned):
    """As backward leaves it: nothing in pruned columns."""
    grad = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(step))
    grad[:, pruned or []] = 0.0
    return grad


def tensors_of(optimizer, weight):
    """Copies of a weight and of its state by name."""
    state = optimizer.state.get(weight, {})
    of_its_shape = {name: s for name, s in state.items() if isinstance(s, torch.Tensor) and s.shape == weight.shape}
    return {name: tensor.detach().clone() for name, tensor in {"weight": weight, **of_its_shape}.items()}


def step_of_unfrozen_copy(name, optimizer, weight, grad):
    """What the same optimizer makes of the same weight and state when nothing is frozen."""
    free_weight = nn.Parameter(weight.detach().clone())
    free = OPTIMIZERS[name]([free_weight])
    free.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    free_weight.grad = grad
    free.step()
    return tensors_of(free, free_weight)


def is_same(tensor, other, columns):
    return torch.equal(tensor[:, columns], other[:, columns])


def test_pruned_columns_of_weight_and_state_stay_and_the_others_step_as_ever(run_ranks):
    @for_each((name,) for name in OPTIMIZERS)
    def check(rank, group, name):
        torch.manual_seed(0)
        layer = zr.ColumnParallelLinear(COLUMNS, 4, process_group=group)
        optimizer = OPTIMIZERS[name]([layer.weight])
        freezer = ColumnFreezer({"layer": layer}, optimizer)
        moved_when_free = set()
        for step, pruned in enumerate(PLANS):
            layer.plan = plan_of(pruned)
            before = tensors_of(optimizer, layer.weight)
            free = step_of_unfrozen_copy(name, optimizer, layer.weight, gradient(step, pruned))
            layer.weight.grad = gradient(step, pruned)
            optimizer.step()
            after = tensors_of(optimizer, layer.weight)

            pruned = pruned or []
            kept = [column for column in range(COLUMNS) if column not in pruned]
            assert list(after) == list(free) and len(after) > 1
            for key in after:
                was = before.get(key, torch.zeros_like(after[key]))  # state that this step made
                assert is_same(after[key], was, pruned), (step, key)
                assert is_same(after[key], free[key], kept), (step, key)
                if not is_same(free[key], was, pruned):
                    moved_when_free.add(key)
        never_moved = {"max_exp_avg_sq"}  # a maximum cannot, without a gradient
        assert moved_when_free == set(after) - never_moved, "what freezing is for"
        freezer.close()

    run_ranks(check, 1)


# ---- wrapped optimizers ---------------------------------------------------------------------------------------------


def test_what_the_optimizer_is_given_later_is_frozen_too(run_ranks):
    """As layers are unfrozen one after the other."""

    def check(rank, group):
        layers = {name: zr.ColumnParallelLinear(COLUMNS, 4, process_group=group) for name in ("early", "late")}
        layers["late"].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([layers["early"].weight], lr=0.1, weight_decay=0.1)
        freezer = ColumnFreezer(layers, optimizer)
        layers["late"].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [layers["late"].weight]})
        for layer in layers.values():
            layer.plan = plan_of([2])
            layer.weight.grad = gradient(0, [2])
        before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
        optimizer.step()
        for name, layer in layers.items():
            assert is_same(before[name], layer.weight, [2]), name
            assert not is_same(before[name], layer.weight, [3]), name
        freezer.close()

    run_ranks(check, 1)


class WithMasters:
    """The part of Colossal-AI's wrappers that matters here, with master copies of any shape."""

    def __init__(self, masters):
        """``masters``: (working, master) pairs."""
        self.optim = torch.optim.SGD([master for _, master in masters], lr=0.1)
        self._map = {id(working): master for working, master in masters}

    def get_working_to_master_map(self):
        return self._map


def test_what_is_stepped_is_found_inside_wrappers_as_master_copies_or_refused():
    weight, frozen = (nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)) for _ in range(2))
    inner = torch.optim.SGD([weight], lr=0.1)
    assert torch_optimizer(SimpleNamespace(optim=SimpleNamespace(optim=inner))) is inner
    for wrong in (None, SimpleNamespace(), SimpleNamespace(optim=None)):
        with pytest.raises(ValueError, match=f"{type(wrong).__name__} is no torch.optim.Optimizer and has none"):
            stepped_tensors(wrong, {"layer": weight})
    master = torch.zeros(2, 3)
    stepped = stepped_tensors(WithMasters([(weight, master)]), {"layer": weight, "frozen": frozen})
    assert list(stepped) == ["layer"] and stepped["layer"] is master
    with pytest.raises(ValueError, match=r"^up: the optimizer keeps it as \(6,\) instead of \(2, 3\), as ZeRO's"):
        stepped_tensors(WithMasters([(weight, torch.zeros(6))]), {"up": weight})


def wrapper(name, **attributes):
    """An optimizer's wrapper of that name, ``package.class``, with these attributes."""
    package, _, kind = name.rpartition(".")
    return type(kind, (), {"__module__": f"{package}.optimizer", "zero_grad": None, **attributes})()


def test_wrappers_of_megatron_and_deepspeed_are_seen_through_and_several_optimizers_are_named():
    working, whole = (nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    of_packages = {
        "megatron": ("float16_groups", "fp32_from_float16_groups"),
        "deepspeed": ("fp16_groups", "fp32_groups"),
    }
    for package, names in of_packages.items():
        master = torch.zeros(2, 3)
        inner = torch.optim.SGD([master, whole], lr=0.1)
        groups = {names[0]: [[working]], names[1]: [[master]]}
        mixed = wrapper(f"{package}.Mixed", optimizer=inner, **groups)
        for optimizer in (mixed, wrapper("megatron.ChainedOptimizer", chained_optimizers=[mixed])):
            stepped = stepped_tensors(optimizer, {"half": working, "full": whole})
            assert torch_optimizer(optimizer) is inner
            assert stepped["half"] is master and stepped["full"] is whole
        with pytest.raises(ValueError, match=f"Mixed has 1 parameters in {names[0]} and 0 master copies in {names[1]}"):
            stepped_tensors(
                wrapper(f"{package}.Mixed", optimizer=inner, **groups | {names[1]: [[]]}), {"half": working}
            )
    several = wrapper("megatron.ChainedOptimizer", chained_optimizers=[mixed, mixed])
    for ask in (torch_optimizer, lambda optimizer: stepped_tensors(optimizer, {"half": working})):
        with pytest.raises(ValueError, match="ChainedOptimizer holds 2 optimizers"):
            ask(several)
    assert why_sharded(several).startswith("ChainedOptimizer holds 2")
    for name in ("DistributedOptimizer", "LayerWiseDistributedOptimizer"):
        chained = wrapper(
            "megatron.ChainedOptimizer", chained_optimizers=[wrapper(f"megatron.{name}", optimizer=inner)]
        )
        assert why_sharded(chained).startswith(f"the optimizer is a {name}, whose replicas keep different parts")
    assert why_sharded(mixed) is None and why_sharded(None) is None
    assert why_sharded(wrapper("elsewhere.DistributedOptimizer", optim=inner)) is None


def test_an_optimizer_that_something_else_than_a_wrapper_has_is_not_taken():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    of_deepspeed = type("WarmupLR", (), {"__module__": "deepspeed.runtime.lr_schedules", "optimizer": optimizer})()
    for wrong in (torch.optim.lr_scheduler.StepLR(optimizer, 1), of_deepspeed, SimpleNamespace(optimizer=optimizer)):
        with pytest.raises(ValueError, match=f"{type(wrong).__name__} is no torch.optim.Optimizer and has none"):
            torch_optimizer(wrong)


def test_freezing_and_ways_of_weights_refuse_optimizers_that_do_not_step_whole_weights(run_ranks):
    def check(rank, group):
        layers = {"up": zr.ColumnParallelLinear(COLUMNS, 4, process_group=group)}
        flat = torch.optim.SGD([torch.zeros(4 * COLUMNS)], lr=0.1)
        whole = torch.optim.SGD([layers["up"].weight], lr=0.1)
        for purpose, build in (("pruned_update='freeze'", ColumnFreezer), ("priority='path_length'", PathLength)):
            for optimizer, reason in (
                (wrapper("deepspeed.FP16_Optimizer", optimizer=flat), "FP16_Optimizer steps neither the weight of up"),
                (wrapper("deepspeed.DeepSpeedZeroOptimizer", optimizer=whole), "is a DeepSpeedZeroOptimizer, whose"),
            ):
                with pytest.raises(ValueError, match=f"^{purpose} needs an optimizer that steps whole.*{reason}"):
                    build(layers, optimizer)
            layers["up"].weight.requires_grad_(False)
            build(layers, flat).close()  # nothing of it is stepped, rightly
            layers["up"].weight.requires_grad_(True)

    run_ranks(check, 1)


def test_colossalais_masters_moments_and_working_weights_stay(run_ranks, colossalai_module):
    @for_each([("bf16", "freeze"), ("bf16", "optimizer")])
    def check(rank, group, precision, pruned_update):
        host = Host(group)
        booster = host.boost(small_vit(), precision=precision)
        forced = {"ratio": 0.5, "ranks": "all", "update_every": 100}
        config = zr.BalanceConfig(mode="zero-pri", pruned_update=pruned_update, **forced)
        zr.convert(booster.model, process_group=booster.group)
        balancer = zr.Balancer(booster.model, booster.optimizer, process_group=booster.group, config=config)
        layers = balanced_layers(booster.model)
        inner = torch_optimizer(booster.optimizer)
        masters = stepped_tensors(booster.optimizer, {name: layer.weight for name, layer in layers.items()})

        def snapshot():
            return {
                name: {**tensors_of(inner, masters[name]), "working": layer.weight.detach().clone()}
                for name, layer in layers.items()
            }

        images, labels = batch()
        stays = {"weight": set(), "exp_avg": set(), "exp_avg_sq": set(), "working": set()}
        for epoch in range(2):
            before = snapshot()
            for _ in range(2):
                loss = nn.functional.cross_entropy(booster.model(images).logits, labels)
                booster.booster.backward(loss, booster.optimizer)
                booster.optimizer.step()
                booster.optimizer.zero_grad()
                balancer.step()
            for name, tensors in snapshot().items():
                pruned = layers[name].plan.pruned
                assert masters[name].dtype == torch.float32
                for key, tensor in tensors.items():
                    was = before[name].get(key, torch.zeros_like(tensor))
                    assert not torch.equal(tensor, was), "the others step"
                    if epoch == 1:
                        stays[key].add(is_same(tensor, was, pruned))
            balancer.epoch_end()
        assert all(outcome == {pruned_update == "freeze"} for outcome in stays.values())

    run_ranks(check, 2, timeout_s=90)


def test_a_step_that_failed_leaves_nothing_behind():
    weight = nn.Parameter(torch.ones(4, COLUMNS))
    layer = SimpleNamespace(weight=weight, local_weight=weight, plan=plan_of([0, 3]), training=True, shared_rows=None)
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    freezer = ColumnFreezer({"layer": layer}, optimizer)

    def fails():
        raise RuntimeError("in the closure")

    with pytest.raises(RuntimeError, match="in the closure"):
        optimizer.step(fails)
    layer.plan = None
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.weight.detach(), torch.full((4, COLUMNS), 0.9))
    freezer.close()


def test_layers_that_share_their_weight_and_data_parallelism_are_refused(run_ranks):
    def check(rank, group):
        first, second = (zr.ColumnParallelLinear(4, 4, process_group=group) for _ in range(2))
        second.weight = first.weight
        with pytest.raises(ValueError, match="layers one and other share their weight"):
            ColumnFreezer({"one": first, "other": second}, torch.optim.SGD([first.weight], lr=0.1))
        groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        with pytest.raises(ValueError, match="needs a tensor-parallel group of all 4 ranks, this one has 2"):
            Run(groups[rank // 2], pruned_update="freeze")

    run_ranks(check, 4)

"""Weights and gradients after any chain of switches are those of the undivided model."""

import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from helpers.processes import for_each
from helpers.strategies import FOUR, assert_holds, layers_of, own_part, switchable, whole_tensors

from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.switching.switch import SwitchRoute
from zeroresize.utils.torch_private import known_groups

pytestmark = [pytest.mark.versions, pytest.mark.same_ranks]


@on_ranks(4)
def test_weights_are_those_of_the_whole_model_after_any_chain_of_switches(rank, group):
    model, wholes = switchable(group, FOUR)
    assert_holds(model, wholes)
    for before, after in itertools.permutations(FOUR, 2):
        model.switch_to(before, gradients=False)
        model.switch_to(after, gradients=False)
        assert_holds(model, wholes)


#: The optimizer's strategy, and on which node each rank is; one strategy has three replicas, and leaves out a rank.
HOMES = [
    (FOUR[1], (0, 0, 0, 0)),
    (FOUR[4], (0, 0, 1, 1)),
    (FOUR[2], (0, 1, 1, 0)),
    (Strategy(3, ranks=(3, 0, 1)), None),
]


@on_ranks(4, HOMES)
def test_gradients_of_all_strategies_are_added_under_that_of_the_optimizer(rank, group, optimizer_strategy, nodes):
    options = {"optimizer_strategy": optimizer_strategy, "initialize": fill, "nodes": nodes, "max_bytes": 3000}
    strategies = [*FOUR, Strategy(1, 3, ranks=(2, 3, 1)), Strategy(1, 4, shares=(3, 1, 2, 0))]
    model = SwitchableModel(layers_of(device="meta"), strategies=strategies, process_group=group, **options)
    assert_holds(model, {name: one.detach() for name, one in whole_tensors(layers_of()).items()})
    total = {name: torch.zeros_like(one) for name, one in whole_tensors(layers_of()).items()}
    for number, strategy in enumerate([*strategies, FOUR[0]]):
        model.switch_to(strategy)
        for replica in range(strategy.dp):
            torch.manual_seed(100 * number + replica)
            for name in total:
                whole = torch.randn_like(total[name])
                total[name] = total[name] + whole
                part = own_part(model, strategy, name, whole)
                if part is not None and model.position.replica == replica:
                    add(model, name, part)
    model.collect()
    assert model.current == optimizer_strategy
    gradients = {name: one.grad for name, one in model.named_parameters()}
    for name, whole in total.items():
        part = own_part(model, optimizer_strategy, name, whole)
        assert (part is None) == (name not in gradients)
        if part is not None:
            torch.testing.assert_close(gradients[name], part, rtol=0.0, atol=1e-10)


def fill(number, layer):
    known = layers_of()[number]
    for tensor, value in zip(
        (*layer.parameters(), *layer.buffers()), (*known.parameters(), *known.buffers()), strict=True
    ):
        tensor.data.copy_(value)


def add(model, name, gradient):
    _, number, own_name = name.split(".", 2)
    parameter = dict(model.stage_layers[int(number)].named_parameters())[own_name]
    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def test_ranks_that_hold_the_same_have_the_same_gradients_to_the_last_bit(run_ranks):
    """Partial gradients of four replicas reach each of three shards, in single precision."""

    @for_each([((0, 0, 0, 0),), ((0, 0, 1, 1),)])
    def check(rank, group, nodes):
        optimizer_strategy = Strategy(1, 3, shares=(1, 2, 3))
        model, _ = switchable(group, [optimizer_strategy, FOUR[0]], torch.float32, max_bytes=2000, nodes=nodes)
        for step in range(2):
            report = model.switch_to(FOUR[0])
            assert report.num_rounds > 2
            torch.manual_seed(10 * step + rank)
            for parameter in (one for layer in model.stage_layers.values() for one in layer.parameters()):
                parameter.grad = torch.randn_like(parameter)
            model.switch_to(optimizer_strategy)
        model.collect()
        divided = {one.name for one in model.tensors if one.division is not None}
        return {name: one.grad.tolist() for name, one in model.named_parameters() if name not in divided}

    first, second, third, _ = run_ranks(check, 4)
    assert [len(each) for each in first] == [11, 11] and first == second == third


@on_ranks(4, [(2000,), (2**28,)])
def test_replicas_of_a_node_are_summed_before_they_leave_it_also_where_some_have_no_gradients(rank, group, max_bytes):
    optimizer_strategy, whole_layers, rank_without = Strategy(1, 4, shares=(1, 1, 2, 2)), layers_of(), 2
    strategies, nodes = [optimizer_strategy, FOUR[0]], (0, 0, 1, 1)
    model, _ = switchable(group, strategies, max_bytes=max_bytes, nodes=nodes)
    model.switch_to(FOUR[0])
    torch.manual_seed(0)
    for name, whole in whole_tensors(whole_layers).items():
        gradients = torch.randn(4, *whole.shape, dtype=torch.float64)
        gradients[rank_without] = 0.0
        whole.grad = gradients.sum(dim=0)
        if rank != rank_without:
            add(model, name, gradients[rank])
    model.switch_to(optimizer_strategy)
    model.collect()
    for name, parameter in model.named_parameters():
        expected = own_part(model, optimizer_strategy, name, whole_tensors(whole_layers)[name].grad)
        torch.testing.assert_close(parameter.grad, expected, rtol=0.0, atol=1e-12)


@on_ranks(4)
def test_one_set_of_weights_is_held_between_switches(rank, group):
    gc.freeze()  # what is there already is not looked through
    model = SwitchableModel(layers_of(num_blocks=6), strategies=FOUR, process_group=group)
    # A weight that is away takes one element, a layer has a number, and each block has a buffer.
    slack = 8 * (2 * len(FOUR) * len(model.tensors) + 6)
    for strategy in [FOUR[3], FOUR[1], FOUR[4], FOUR[2], FOUR[0], FOUR[3]]:
        held = model.held_bytes
        report = model.switch_to(strategy, gradients=False)
        part_bytes = int(model.layout_of(strategy).rank_bytes(model.tensors)[rank])
        assert part_bytes <= model.held_bytes <= part_bytes + slack
        gc.collect()
        assert part_bytes <= memory() <= part_bytes + slack
        assert report.peak_bytes == held + report.new_bytes + report.buffer_bytes
        assert report.new_bytes <= part_bytes
    assert model.switch_to(FOUR[3]).new_bytes == 0


def memory():
    """Bytes of all tensors that were made since ``gc.freeze``."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not one.is_meta]
    memories = [one.untyped_storage() for tensor in tensors for one in (tensor, tensor.grad) if one is not None]
    return sum({one.data_ptr(): one.nbytes() for one in memories}.values())


@on_ranks(4)
def test_strategies_that_come_and_go_leave_nothing_behind(rank, group):
    model, wholes = switchable(group, [Strategy(4)])
    before = len(known_groups())
    for ranks in [*itertools.islice(itertools.permutations(range(4)), 1, 5), (1, 0, 2, 3), (1, 0, 2, 3)]:
        strategy = Strategy(1, 2, 2, ranks=ranks)
        model.add(strategy)
        model.switch_to(strategy, gradients=False)
        assert_holds(model, wholes)
        for kind in model.groups_of(strategy):
            dist.all_reduce(torch.ones(1), group=kind)
        if ranks == (0, 1, 3, 2):
            with pytest.raises(ValueError, match="in force"):
                model.forget(strategy)
        model.switch_to(model.optimizer_strategy, gradients=False)
        model.forget(strategy)
        assert len(known_groups()) == before
        gc.collect()
        routes = [kept for kept in gc.get_objects() if isinstance(kept, SwitchRoute)]
        assert len(routes) <= 1, "of the strategies that are forgotten nothing is kept"
    for strategy in (model.optimizer_strategy, Strategy(2, 2)):
        with pytest.raises(ValueError, match=r"the optimizer's, or in force|none of the model's"):
            model.forget(strategy)


@on_ranks(2)
def test_shares_that_come_to_the_same_units_are_one_strategy(rank, group):
    first, same, other = (Strategy(1, 2, shares=(share, 1.0)) for share in (2.0, 2.001, 5.0))
    model, wholes = switchable(group, [first])
    model.add(same)
    model.add(other)
    assert model.layout_of(same) is model.layout_of(first) is not model.layout_of(other)
    for strategy in (same, other, first):
        model.switch_to(strategy, gradients=False)
        assert_holds(model, wholes)
    model.move_optimizer(same, None)
    model.forget(first)
    assert_holds(model, wholes)
    assert model.strategies == [same, other]

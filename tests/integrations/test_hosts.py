"""The registry of hosts, and docs/adding_a_host.md: its example runs as it stands and does what it says."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import assert_any_owner_computes_the_same
from helpers.processes import caught_log_lines
from torch import nn

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.integrations import SwappedClasses, hosts, known_modules, register_host
from zeroresize.integrations.find_segments import find_segments
from zeroresize.layers.balanced_linear import BalancedLinear

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs/programs/own_products.py"
ADAPTER, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding_a_host.md").read_text(), re.DOTALL)


@pytest.fixture
def example(monkeypatch):
    """The names of the program in the docs; its host is forgotten again when the test ends."""
    monkeypatch.setattr(hosts, "_hosts", list(hosts._hosts))
    names = {"__name__": "own_products"}
    exec(compile(PROGRAM.read_text(), str(PROGRAM), "exec"), names)
    return names


def test_the_example_of_the_docs_trains_while_a_rank_prunes(run_ranks, example):
    (losses, plan), (losses_1, plan_1) = run_ranks(lambda rank, group: example["main"](group), 2)
    assert losses == losses_1 and plan == plan_1
    assert losses[-1] < losses[0]
    assert [rank.pruned for rank in plan.ranks] == [0.0, 0.5]


def test_the_registered_module_of_the_docs_has_heads_on_any_rank(run_ranks, monkeypatch):
    monkeypatch.setattr(known_modules, "_adapters", dict(known_modules._adapters))
    names = {"__name__": "adding_a_host"}
    exec(compile(ADAPTER, "docs/adding_a_host.md", "exec"), names)

    def check(rank, group):
        torch.manual_seed(0)
        model = names["Attention"](16, 4, group).double()
        zr.convert(model, process_group=group)
        segments, reasons = find_segments(model, balanced_layers(model), 2)
        assert reasons == {} and [(one.kind, one.layers) for one in segments] == [("heads", ("qkv", "out"))]
        x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert_any_owner_computes_the_same(model, segments, lambda model: model(x), group)

    run_ranks(check, 2)


@on_ranks(2)
def test_the_hosts_layers_are_swapped_in_place_and_compute_bitwise_alike(rank, group, *, example):
    torch.manual_seed(rank)
    model = nn.Sequential(example["HostColumn"](12, 24, group), nn.GELU(), example["HostRow"](24, 12, group))
    results, parameters = [], [id(one) for one in model.parameters()]
    for is_converted in (False, True):
        if is_converted:
            zr.convert(model, process_group=group)
        model.zero_grad()
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(one.grad.clone() for one in model.parameters())])
    assert [id(one) for one in model.parameters()] == parameters
    assert list(balanced_layers(model)) == ["0", "2"]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class GroupElsewhere(nn.Linear):
    """A layer of a host that calls the group otherwise and returns its bias beside the product."""

    def __init__(self, in_features, out_features, group):
        super().__init__(in_features, out_features)
        self.tp_group = group

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


class BalancedElsewhere(BalancedLinear, GroupElsewhere):
    is_column_parallel = True

    def forward(self, x):
        return self.column_products(x, None), self.bias


@on_ranks(2)
def test_a_host_says_where_its_layers_have_their_group_and_which_make_logits(rank, group, *, monkeypatch):
    monkeypatch.setattr(hosts, "_hosts", list(hosts._hosts))
    asked = lambda layer: "it is small" if layer.out_features == 4 else None  # noqa: E731
    host = SwappedClasses(
        {GroupElsewhere: BalancedElsewhere},
        asked,
        process_group_of=lambda layer: layer.tp_group,
        vocabulary_heads=["output_layer"],
    )
    register_host(host)
    sizes = {"up": 16, "output_layer": 32, "small": 4}
    model = nn.ModuleDict({name: GroupElsewhere(8, size, group) for name, size in sizes.items()})
    wrapped = nn.ModuleDict({"base_layer": GroupElsewhere(8, 32, group)})  # as by PEFT
    model["within"] = nn.ModuleDict({"output_layer": wrapped})
    model["small"].tp_group = [dist.new_group([each]) for each in range(2)][rank]  # of no matter, as it stays
    model["small"].register_parameter("weight", None)  # the host's own reason comes before any other
    with caught_log_lines() as lines:
        zr.convert(model)
    assert list(balanced_layers(model)) == ["up"] and model["up"].process_group is group
    assert type(model["output_layer"]) is type(model["small"]) is GroupElsewhere
    said = list(map(str, lines)) if rank == 0 else []
    assert rank or any("layer output_layer is left alone: it is a vocabulary head" in line for line in said)
    assert rank or any("layer small is left alone: it is small" in line for line in said)


class GroupReadOnly(nn.Linear):
    process_group = property(lambda layer: dist.group.WORLD)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class BalancedReadOnly(BalancedLinear, GroupReadOnly):
    is_column_parallel = True

    def forward(self, x):
        return self.column_products(x, self.bias)


@on_ranks(2)
def test_a_group_that_a_host_does_not_let_be_set_is_left_as_it_is(rank, group, *, monkeypatch):
    monkeypatch.setattr(hosts, "_hosts", list(hosts._hosts))
    register_host(SwappedClasses({GroupReadOnly: BalancedReadOnly}))
    assert list(balanced_layers(zr.convert(nn.Sequential(GroupReadOnly(8, 16))))) == ["0"]


@on_ranks(2)
def test_an_adapter_that_cannot_be_imported_is_named_and_layers_of_others_are_balanced(rank, group, *, monkeypatch):
    broken = hosts._OnceImported("json", "zeroresize.integrations.none", "Nobody's layers")
    monkeypatch.setattr(hosts, "_hosts", [broken, *hosts._hosts])
    model = nn.Sequential(zr.ColumnParallelLinear(8, 16, process_group=group), nn.GELU())
    with caught_log_lines() as lines:
        assert list(balanced_layers(zr.convert(model))) == ["0"]
    (line,) = [line for line in map(str, lines) if "Nobody" in line]
    assert "Nobody's layers are left alone, as their adapter cannot be imported: No module" in line


def test_the_shards_of_zero_3_are_refused_by_name(run_ranks, monkeypatch):
    def check(rank, group):
        monkeypatch.setattr(hosts, "_hosts", list(hosts._hosts))
        register_host(
            SwappedClasses({GroupElsewhere: BalancedElsewhere}, process_group_of=lambda layer: layer.tp_group)
        )
        model = nn.Sequential(GroupElsewhere(8, 16, group))
        model[0].weight = nn.Parameter(torch.empty(0))
        model[0].weight.ds_id = 0
        with pytest.raises(ValueError, match="left alone: 0: DeepSpeed's ZeRO-3 shards its weight"):
            zr.convert(model)

    run_ranks(check, 2)


class Careless:
    """Knows every plain linear layer, and swaps none."""

    kinds = "anything"

    def is_parallel_linear(self, module):
        return type(module) is nn.Linear

    def why_left_alone(self, module):
        return None

    def swap_layer(self, module):
        return module


def test_the_last_registered_host_is_asked_first_and_one_object_is_registered_once(monkeypatch):
    monkeypatch.setattr(hosts, "_hosts", list(hosts._hosts))
    first, second = Careless(), Careless()
    for adapter in (first, second, first):
        register_host(adapter)
    assert hosts.host_of(nn.Linear(2, 2)) is second
    assert hosts._hosts[:2] == [second, first]
    assert "anything" in hosts.known_kinds()


def test_what_is_no_adapter_and_no_class_of_the_host_is_told():
    class Half:
        kinds = "half of it"

        def is_parallel_linear(self, module):
            return False

    with pytest.raises(TypeError, match="Half is no host adapter, since it has no why_left_alone, swap_layer"):
        register_host(Half())
    for other in (nn.Linear, zr.ColumnParallelLinear):
        with pytest.raises(ValueError, match=rf"{other.__name__} must be a subclass of BalancedLinear and of Linear"):
            SwappedClasses({nn.Linear: other})

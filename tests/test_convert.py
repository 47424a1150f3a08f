"""convert(): which layers it takes, which it leaves alone and says so, and what is a mistake."""

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines
from torch import nn

from zeroresize import BalanceConfig, Balancer, ColumnParallelLinear, RowParallelLinear, convert
from zeroresize.conversion import balanced_layers

pytestmark = pytest.mark.same_ranks

CONFIG = BalanceConfig(mode="zero-pri")


def mlp(group):
    return nn.Sequential(
        ColumnParallelLinear(4, 8, process_group=group),
        nn.GELU(),
        RowParallelLinear(8, 4, process_group=group),
    )


def test_layers_are_taken_in_place_in_the_order_of_the_model(run_ranks):
    def check(rank, group):
        model = nn.ModuleDict({"late": nn.Identity(), "mlp": mlp(group), "head": nn.Linear(4, 2)})
        before = {name: id(tensor) for name, tensor in model.named_parameters()}

        assert convert(model, process_group=group) is model
        assert list(balanced_layers(model)) == ["mlp.0", "mlp.2"]
        assert {name: id(tensor) for name, tensor in model.named_parameters()} == before
        assert balanced_layers(model)["mlp.0"] is model["mlp"][0]

    run_ranks(check, 2)


def test_a_model_and_an_optimizer_in_the_wrong_order_are_an_error_that_tells_the_right_one(run_ranks):
    def check(rank, group):
        model = mlp(group)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="model=AdamW is not allowed: Module is needed"):
            Balancer(optimizer, model)
        Balancer(model, optimizer, process_group=group)

    run_ranks(check, 2)


def test_a_rank_that_is_given_nothing_is_named(run_ranks):
    def check(rank, group):
        for shares, is_said in (((1, 0), True), ((3, 1), False)):
            with caught_log_lines() as lines:
                convert(mlp(group), group, shares=shares)
            (line,) = [line for line in lines if line.startswith("units are divided by the shares")]
            assert line.endswith("; ranks [1] own none, and have no work in these layers") == is_said

    run_ranks(check, 2)


def test_an_input_that_does_not_fit_names_the_layer_and_what_to_look_at(run_ranks):
    def check(rank, group):
        model = convert(nn.Sequential(mlp(group)), process_group=group)
        column, row = balanced_layers(model).values()
        hint = r"^layer 0\.2: input \(3, 999\) does not fit .*\. Is the layer before it column-parallel\?$"
        with pytest.raises(ValueError, match=hint):
            row(torch.randn(3, 999))
        hint = r"^layer 0\.0: input \(3, 999\) does not fit .*\. Is the layer before it not split, or row-parallel\?$"
        with pytest.raises(ValueError, match=hint):
            column(torch.randn(3, 999))

    run_ranks(check, 2)


def test_layers_that_cannot_be_balanced_are_left_alone_each_with_one_log_line(run_ranks):
    def check(rank, group):
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        odd_layers = {
            "gathered": ColumnParallelLinear(4, 4, process_group=group, gather_output=True),
            "elsewhere": ColumnParallelLinear(4, 4, process_group=alone),
            "narrow": RowParallelLinear(2, 4, process_group=group),
        }
        model = nn.ModuleDict({"mlp": mlp(group), **odd_layers})

        with caught_log_lines() as lines:
            convert(model, process_group=group)

        assert list(balanced_layers(model)) == ["mlp.0", "mlp.2"]
        for name, reason in {
            "gathered": "gather_output=True",
            "elsewhere": "another process group",
            "narrow": "fewer than two input features",
        }.items():
            assert model[name] is odd_layers[name]
            (line,) = [line for line in lines if name in line]
            assert reason in line

    run_ranks(check, 2)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_a_model_with_nothing_to_convert_is_told_what_was_looked_for(run_ranks):
    def check(rank, group):
        wanted = r"no layer that can be balanced.*Linear1D_Col.*RowParallelLinear.*left alone: none"
        with pytest.raises(ValueError, match=wanted):
            convert(nn.Sequential(nn.Linear(4, 4)), process_group=group)

        with pytest.raises(ValueError, match=r"no layer that can be balanced.*module_filter_fn left out 0, 2"):
            convert(mlp(group), process_group=group, module_filter_fn=lambda module, name: False)
        gathered = nn.Sequential(ColumnParallelLinear(4, 4, process_group=group, gather_output=True))
        with pytest.raises(ValueError, match=r"found but left alone: 0: gather_output=True"):
            convert(gathered, process_group=group)

    run_ranks(check, 2)


# ---- module_filter_fn -----------------------------------------------------------------------------------------------


def blocks(group):
    return nn.ModuleDict({"first": mlp(group), "norm": nn.LayerNorm(4), "last": mlp(group)})


def not_last(module, name):
    return not name.startswith("last")


def test_a_filter_is_asked_of_every_parallel_layer_with_its_name_and_of_nothing_else(run_ranks):
    def check(rank, group):
        model, asked = blocks(group), []

        def choose(module, name):
            asked.append((name, module))
            return name != "last.0"

        with caught_log_lines() as lines:
            assert convert(model, process_group=group, module_filter_fn=choose) is model
        assert asked == [(name, model.get_submodule(name)) for name in ("first.0", "first.2", "last.0", "last.2")]
        assert list(balanced_layers(model)) == ["first.0", "first.2", "last.2"]
        assert not model["last"][0].is_converted and not model["last"][0].is_searched
        if rank == 0:
            (line,) = lines
            assert "3 layers can be balanced, 1 were left out by module_filter_fn" in line
            assert "units of 1 segments can move (1 of neurons), and 1 layers stay evenly divided (level DEBUG" in line
        else:
            assert lines == []

    run_ranks(check, 2)


def test_converting_again_keeps_the_choice_and_refuses_another_one(run_ranks):
    def check(rank, group):
        model = blocks(group)
        model["gathered"] = ColumnParallelLinear(4, 4, process_group=group, gather_output=True)
        convert(model, process_group=group, module_filter_fn=not_last)
        # The same choice, or none at all.
        convert(model, process_group=group, module_filter_fn=not_last)
        convert(model, process_group=group)
        kept = balanced_layers(model)
        assert list(kept) == ["first.0", "first.2"]
        with pytest.raises(ValueError, match=r"chooses other layers: it differs in last\.0, last\.2\. Convert"):
            convert(model, process_group=group, module_filter_fn=lambda module, name: True)
        with pytest.raises(ValueError, match=r"chooses other layers: it differs in first\.2, last\.0\. "):
            convert(model, process_group=group, module_filter_fn=lambda module, name: name.endswith("0"))
        assert balanced_layers(model) == kept

    run_ranks(check, 2)


def test_ranks_that_filter_differently_find_out_before_training(run_ranks):
    def check(rank, group):
        def choose(module, name):
            return rank == 0 or not_last(module, name)

        model = convert(blocks(group), process_group=group, module_filter_fn=choose)
        with pytest.raises(ValueError, match="converted layers"):
            Balancer(model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group, config=CONFIG)

    run_ranks(check, 2)

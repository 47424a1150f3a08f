"""Colossal-AI's sequence parallelism: what its layers gather and scatter balanced ones do, and which heads stay."""

import logging

import pytest
import torch
import torch.distributed as dist
from helpers.colossalai_models import (
    VOCABULARY,
    boosted,
    end_update,
    llama,
    part_at_home,
    states_of,
    undivided_run,
    update,
    words,
)
from helpers.hosts import DEPTH, HEADS, build
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import equal_loans, lend
from helpers.processes import caught_log_lines
from torch.testing import assert_close

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

pytestmark = [pytest.mark.usefixtures("colossalai_module"), pytest.mark.filterwarnings("ignore")]

EXACT = zr.BalanceConfig(mode="exact", update_every=100, start_checks=False)


@on_ranks(2)
def test_a_converted_model_is_the_hosts_bit_for_bit(rank, group):
    host, run = (boosted(group, llama(attention_bias=True, mlp_bias=True), sequence="split_gather") for _ in range(2))
    zr.convert(run.model)
    segments = owned_segments(balanced_layers(run.model))
    assert [segment.kind for segment in segments] == ["heads", "neurons"] * 2
    for step in range(3):
        assert update(host, step) == update(run, step)
    assert all(map(torch.equal, states_of(host), states_of(run)))


@pytest.mark.slow
@on_ranks(4, [(0,), (1,)], timeout_s=200)
def test_units_that_move_leave_losses_and_weights_those_of_the_undivided_model(rank, group, stage):
    losses, weights = undivided_run(llama(), 5, 2)
    run = boosted(group, llama(), stage=stage, sequence="split_gather")
    balancer, seen = zr.Balancer(run.model, run.optimizer, EXACT), []
    for step in range(5):
        seen += update(run, step)
        balancer.step()
        if (shares := {0: (3, 1), 1: (1, 3), 2: (3, 1), 3: (1, 1)}.get(step)) is not None:
            balancer.move(shares)
    assert seen == pytest.approx(losses[run.plugin.dp_group.rank() :: 2], abs=1e-6)
    for name, weight in run.model.unwrap().named_parameters():
        expected = part_at_home(weights[name], weight, run.plugin.tp_group.rank())
        assert_close(weight, expected, rtol=0.0, atol=1e-6, msg=name)
    balancer.close()


KINDS = {"Llama": {"num_key_value_heads": HEADS}, "Bert": {}, "GPT2": {}}


@pytest.mark.slow
@on_ranks(2, [(kind,) for kind in KINDS])
def test_moves_leave_float64_the_hosts(rank, group, kind):
    """To rounding; what the host makes of LLaMA differs from the undivided model by that of its float32 norms."""
    settings = {"vocab_size": VOCABULARY, **KINDS[kind]}
    options = {"sequence": "split_gather", "find_unused_parameters": True}  # BERT's pooler
    host, run = (boosted(group, build(kind, "eager", **settings), **options) for _ in range(2))
    balancer = zr.Balancer(run.model, run.optimizer, EXACT)
    assert [segment.kind for segment in owned_segments(balanced_layers(run.model))] == ["heads", "neurons"] * DEPTH
    given = {name: words(0)[name] for name in ("input_ids", "attention_mask")}
    for step in range(4):
        losses = []
        for each in (host, run):
            y = each.model(**given)[0]
            losses.append((y * torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view_as(y)).sum())
            each.booster.backward(losses[-1], each.optimizer)
            end_update(each)
        assert_close(*losses, rtol=1e-10, atol=0.0)
        balancer.move({0: (3, 1), 1: (1, 3), 2: (3, 1), 3: (1, 1)}[step])
    assert_close([*run.model.parameters()], [*host.model.parameters()], rtol=0.0, atol=1e-10)
    balancer.close()


@on_ranks(2)
def test_columns_are_lent_while_a_sequence_is_divided(rank, group):
    host, run = (boosted(group, llama(), sequence="split_gather") for _ in range(2))
    zr.convert(run.model)
    lend(balanced_layers(run.model), run.plugin.tp_group, equal_loans({1: 0.5}, 2), "broadcast-reduce")
    assert update(run, 0) == pytest.approx(update(host, 0), abs=1e-6)
    assert_close([*run.model.parameters()], [*host.model.parameters()], rtol=0.0, atol=1e-6)


@on_ranks(2)
def test_a_ring_keeps_its_layers(rank, group):
    run = boosted(group, llama(), sequence="ring")
    with pytest.raises(ValueError, match="seq_parallel_mode='ring' multiplies a slice of the sequence while"):
        zr.convert(run.model)
    assert run.model(**words(0)).loss.isfinite()
    dist.barrier()


@pytest.mark.slow
@on_ranks(4)
def test_units_stay_by_name_where_attention_exchanges_heads_and_columns_are_lent(rank, group):
    host, run = (boosted(group, llama(), sequence="all_to_all", sp_size=2) for _ in range(2))
    with caught_log_lines(logging.DEBUG) as lines:
        zr.convert(run.model)
    assert rank or any("q_proj has seq_parallel_mode='all_to_all'" in line for line in lines)
    assert len(balanced_layers(run.model)) == 14 and not owned_segments(balanced_layers(run.model))
    assert update(host, 0) == update(run, 0)
    assert all(map(torch.equal, states_of(host), states_of(run)))
    lend(balanced_layers(run.model), run.plugin.tp_group, equal_loans({1: 0.5}, 2), "broadcast-reduce")
    assert update(run, 1) == pytest.approx(update(host, 1), abs=1e-6)
    assert_close([*run.model.parameters()], [*host.model.parameters()], rtol=0.0, atol=1e-6)

"""Layers follow the work while a pipeline is trained, on real processes whose layers take known seconds."""

import json
import os
import types
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import sleeping_layers
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import caught_log_lines, told_by_survivors
from helpers.sleeping_layers import MICRO, Pace, Training, layers_of, undivided_losses
from helpers.states import values_of
from torch import nn

from zeroresize.pipeline import (
    LayerProfiler,
    Pipeline,
    PipelineBalancer,
    layer_move,
    measuring,
    moving_layers,
    pipeline_balancer,
)
from zeroresize.pipeline.layer_move import LayerMoveDuringBackward
from zeroresize.pipeline.measuring import Measuring
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.resharding import agreement
from zeroresize.resharding.agreement import NotEnoughMemoryError

pytestmark = pytest.mark.same_ranks


def require_alike(by_rank):
    """What ranks have decided, and what they know, is the same."""
    assert all(one == by_rank[0] for one in by_rank[1:])
    return by_rank[0]


def require_undivided(losses, num_layers):
    assert losses == pytest.approx(undivided_losses(num_layers, len(losses)), rel=1e-10, abs=0.0)


@on_ranks(2)
def test_moves_have_the_price_that_the_links_tell_and_learned_prices_are_kept(rank, group, *, monkeypatch):
    monkeypatch.setattr(pipeline_balancer, "measure_move_cost", lambda *_: MoveCost(3e-10, 0.052))
    training = Training(group, 8)
    measured = values_of(training.balancer.state_dict())["rebalancing"]["cost_of_move"]
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    training.train(12)
    learned = training.balancer.state_dict()
    resumed = Training(group, 8)
    resumed.balancer.load_state_dict(learned)
    measured, learned, resumed = require_alike(
        gathered(
            group,
            (
                measured,
                values_of(learned)["rebalancing"]["cost_of_move"],
                values_of(resumed.balancer.state_dict())["rebalancing"]["cost_of_move"],
            ),
        )
    )
    assert list(measured.values()) == pytest.approx([3e-10, 0.052, 0.0])
    assert resumed == learned != measured


@on_ranks(2)
def test_a_straggling_stage_gets_fewer_layers_and_gets_them_back(rank, group):
    training = Training(group, 8)
    assert training.balancer.what_if() is None
    boundaries = [training.train(6)]
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    with caught_log_lines() as messages:
        boundaries.append(training.train(14))
        status = training.balancer.status()
        training.pace.of_rank = 1.0
        boundaries.append(training.train(14))
    assert status.kind == "layers" and [each.share for each in status.ranks] == [1.5, 0.5]
    assert [each.speed for each in status.ranks] == pytest.approx([1.0, 1.0 / 3.0], rel=0.05)
    assert status.ranks[1].busy_s == pytest.approx(3.0 * status.ranks[0].busy_s, rel=0.05) and str(status)
    proposal = training.balancer.what_if()
    assert proposal.before == training.pipeline.boundaries and len(proposal.stage_s) == 2
    (*first, messages, _), (*second, silent, losses) = gathered(
        group, (boundaries, training.records, training.balancer.state_dict(), messages, training.losses)
    )
    boundaries, records, _ = require_alike([first, second])
    require_undivided(losses, 8)
    assert boundaries == [(0, 4, 8), (0, 6, 8), (0, 4, 8)]
    assert 6 < records[0].step < 20 and records[0].before == (0, 4, 8) and records[0].moved_bytes > 0
    assert records[0].speeds[1] == pytest.approx(records[0].speeds[0] / 3.0)
    assert records[0].expected_step_s < records[0].step_s
    assert "from stage 1 to 0" in messages[0] and messages[0].endswith(records[0].reason)
    assert records[0].reason.startswith("staying has cost as much as the change")
    assert len(messages) == len(records) and silent == []


@on_ranks(2)
def test_a_move_that_must_be_repeated_and_does_not_fit_then_leaves_layers_where_they_are(rank, group, *, monkeypatch):
    training = Training(group, 8, profile_every=1, move_during_backward=True)
    refused = []

    def refuse(*_, **__):
        refused.append(training.step)
        monkeypatch.undo()
        raise NotEnoughMemoryError("too little")

    # Something has always changed after it was sent, as far as the first move knows.
    monkeypatch.setattr(LayerMoveDuringBackward, "is_outdated", True)
    monkeypatch.setattr(moving_layers, "move_layers", refuse)
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    while not refused:
        training.train(1)
    stayed = training.pipeline.boundaries
    assert [record.is_made for record in training.records] == [False]
    while training.pipeline.boundaries == stayed:
        training.train(1)
    stayed, refused, moved = require_alike(gathered(group, (stayed, refused, training.pipeline.boundaries)))
    assert stayed == (0, 4, 8) and moved[1] > 4 and len(refused) == 1


@pytest.mark.parametrize("has_room_after", [True, False])
@on_ranks(2)
def test_a_move_that_does_not_fit_beside_a_step_is_made_after_it(rank, group, *, monkeypatch, has_room_after):
    """A step takes much more than there is between two steps."""

    training = Training(group, 8, profile_every=1, move_during_backward=True)
    began, stayed = [], []
    early = pipeline_balancer.moving_during_backward

    @contextmanager
    def moving(*arguments, **options):
        began.append(training.step)
        with early(*arguments, **options):
            raise AssertionError("there is no room for it")
        yield

    monkeypatch.setattr(pipeline_balancer, "moving_during_backward", moving)
    monkeypatch.setattr(training.balancer._rebalancing, "refuse", lambda: stayed.append(training.step))
    monkeypatch.setattr(layer_move, "bytes_up_to_peak", lambda device: 2**60)
    if not has_room_after:
        monkeypatch.setattr(agreement, "free_bytes", lambda device: 0)
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    while not began:
        training.train(1)
    assert training.pipeline.boundaries[1] > 4 if has_room_after else training.pipeline.boundaries == (0, 4, 8)
    began, stayed, is_made = require_alike(
        gathered(group, (began, stayed, [record.is_made for record in training.records]))
    )
    assert (stayed, is_made) == (([], [True]) if has_room_after else (began, [False]))


@pytest.mark.few(2)
@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("profile_every", [1, 4])
@on_ranks(2)
def test_layers_move_during_backward_or_between_steps(rank, group, *, monkeypatch, profile_every, during):
    """In a step of two batches, of which the balancer is told nothing."""

    training = Training(group, 8, profile_every=profile_every, move_during_backward=during)
    repeated, early = [], pipeline_balancer.moving_during_backward

    @contextmanager
    def moving(*arguments, **options):
        with early(*arguments, **options) as move:
            yield move
        repeated.append(move.was_repeated)

    monkeypatch.setattr(pipeline_balancer, "moving_during_backward", moving)
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    x, target = sleeping_layers.batch(0)
    for _ in range(24):
        training.optimizer.zero_grad()
        with training.balancer.step():
            training.pipeline.step(x, target=target)
            training.pipeline.step(x, target=target)
        training.optimizer.step()
    boundaries, records, repeated = require_alike(
        gathered(group, (training.pipeline.boundaries, training.records, repeated))
    )
    assert boundaries == (0, 6, 8)
    assert repeated == [False] * len(records) * during and records


@on_ranks(2)
def test_what_was_decided_for_other_work_is_not_carried_out(rank, group):
    training = Training(group, 8)
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    training.train(5)  # measured in the second and the fourth; from the fifth on it is known what to move
    assert training.balancer._wanted is not None
    training.pace.of_rank = 1.0
    training.balancer.profile_next()
    assert (training.train(6), training.records) == ((0, 4, 8), [])


@on_ranks(2)
def test_layers_follow_a_told_change_within_four_steps(rank, group, *, monkeypatch):
    """Two steps measure it, in the next one the second figures travel, and layers move in the fourth."""

    monkeypatch.setattr(pipeline_balancer, "measure_move_cost", lambda *_: MoveCost(0.0, 1e-6))
    measured, enter = [], LayerProfiler.__enter__
    training = Training(group, 8, profile_every=30)
    training.train(4)
    monkeypatch.setattr(LayerProfiler, "__enter__", lambda own: measured.append(training.step) or enter(own))
    training.pace.of_layers = dict.fromkeys(range(4, 8), 3.0)
    training.balancer.profile_next()
    before, after, later, measured = require_alike(
        gathered(group, (training.train(3), training.train(1), training.train(2), measured))
    )
    assert before == (0, 4, 8) and after == later == (0, 5, 8)
    assert measured == [4, 5, 9]  # and once behind the move


@on_ranks(2)
def test_nothing_moves_and_nothing_is_measured_but_in_due_steps(rank, group, *, monkeypatch):
    measured = []
    enter = LayerProfiler.__enter__
    training = Training(group, 4, profile_every=5)
    monkeypatch.setattr(LayerProfiler, "__enter__", lambda own: measured.append(training.step) or enter(own))
    training.train(13)
    first, second = gathered(
        group, ((measured, training.records, training.balancer.what_if().saving_s), training.losses)
    )
    measured, records, saving_s = require_alike([first[0], second[0]])
    require_undivided(second[1], 4)
    assert measured == [1, 6, 11] and records == [] and saving_s == 0.0


@pytest.mark.slow
def test_a_rank_whose_profile_does_not_come_is_named(tmp_path):
    def check(rank, group):
        training = Training(dist.new_group([0, 1, 2], timeout=timedelta(seconds=5)), 6)
        training.train(1)
        if rank == 1:
            Measuring.exchange = lambda measuring, _: None if measuring._measured else os._exit(0)
        training.train(1)
        with pytest.raises(RuntimeError) as caught:
            training.train(1)
        return str(caught.value)

    texts = told_by_survivors(check, 3, tmp_path)
    assert sorted(texts) == [0, 2]
    assert all(
        text.startswith("ranks [1] of the group did not come to balancer.step(), call 2") for text in texts.values()
    )


@on_ranks(2)
def test_memory_limits_are_kept(rank, group):
    training = Training(group, 8)
    training.train(2)
    with LayerProfiler(training.pipeline, training.optimizer) as profiler:
        training.train(1)
    layer_bytes = max(
        layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes + MICRO * layer.activation_bytes
        for layer in profiler.gather().layers
    )
    training = Training(group, 8, memory_limits=[5.5 * layer_bytes, 8.5 * layer_bytes])
    training.pace.of_rank = 4.0 if rank == 1 else 1.0
    boundaries = training.train(10)
    training = Training(group, 8, memory_limits=[layer_bytes, layer_bytes])
    with caught_log_lines() as lines:
        assert training.train(12) == (0, 4, 8)
    (boundaries, first), (also, second) = gathered(
        group, (boundaries, [line for line in lines if "no partition of 8 layers over 2 stages fits" in line])
    )
    assert boundaries == also == (0, 5, 8)
    assert len(first) == 1 and not second  # said once: training goes on


@on_ranks(2)
def test_a_resumed_pipeline_with_other_boundaries_goes_on(rank, group):
    training = Training(group, 6)
    training.train(3)
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    before = training.train(14)
    state = json.loads(json.dumps(training.balancer.state_dict()))
    resumed = Training(group, 6, boundaries=(0, 3, 6))
    resumed.balancer.load_state_dict(state)
    resumed.pace.of_rank = training.pace.of_rank
    speeds = values_of(state)["rebalancing"]["costs"]["speeds"]
    with pytest.raises(ValueError, match=r"state\.format: 1 is needed"):
        resumed.balancer.load_state_dict({})
    before, after, speeds, steps = require_alike(
        gathered(group, (before, resumed.train(6), speeds, resumed.balancer.steps))
    )
    assert before == after == (0, 5, 6) and steps == 3 + 14 + 6
    assert speeds[0] == pytest.approx(3.0 * speeds[1])


@on_ranks(2)
def test_options_must_be_allowed_and_alike(rank, group):
    training = Training(group, 4)
    make = PipelineBalancer
    for options, message in (
        ({"profile_every": 0}, "profile_every=0 is not allowed"),
        ({"profile_every": "often"}, "profile_every='often' is not allowed"),
        ({"max_measuring": 0.0}, "max_measuring=0.0 is not allowed"),
        ({"count_work": "rows"}, "count_work='rows' is not allowed"),
        ({"by": "layers"}, "by='layers' is not allowed"),
        ({"min_saving": -0.1}, "min_saving=-0.1 is not allowed"),
        ({"units": types.SimpleNamespace(num_ranks=2)}, "units of 2 ranks need these ranks as replicas="),
        ({"memory_limits": 1000}, "memory_limits=1000 is not allowed: a list"),
        ({"memory_limits": [1.0]}, "memory_limits are 1, not one of each of 2 stages"),
    ):
        with pytest.raises(ValueError, match=message):
            make(training.pipeline, None, **options)
    for of_ranks in (
        ({"profile_every": 10}, {"profile_every": 11}),
        ({"measure_links": True}, {}),
        ({"count_work": "tokens"}, {}),
        ({"max_measuring": 0.01}, {"max_measuring": 0.02}),
    ):
        with pytest.raises(RuntimeError, match=r"the options of PipelineBalancer.*\[\[0\], \[1\]\]"):
            make(training.pipeline, None, **of_ranks[rank])
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[1].referred = [layers[0].weight]
    referring = Pipeline(layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=group)
    with pytest.raises(ValueError, match="layers cannot be moved one by one"):
        make(referring, None)


@on_ranks(2)
def test_a_step_that_fails_leaves_nothing_behind(rank, group):
    training = Training(group, 4)
    training.train(1)
    with pytest.raises(ArithmeticError), training.balancer.step():
        raise ArithmeticError
    assert training.balancer.steps == 1
    assert not training.pipeline.module.watchers.everyone
    training.train(4)
    require_undivided(gathered(group, training.losses)[1], 4)


@on_ranks(2, timeout_s=30)
def test_optimizers_with_which_layers_cannot_move_are_refused_when_the_balancer_is_made(rank, group):
    pipeline = Pipeline(layers_of(4, Pace()), nn.functional.mse_loss, num_microbatches=MICRO, process_group=group)
    everything = list(pipeline.parameters())
    present = [one for number in pipeline.present for one in pipeline.layers[number].parameters()]
    wrapper = types.SimpleNamespace(optim=torch.optim.SGD(everything), param_groups=[])
    for optimizer, reason in (
        (torch.optim.SGD(present), "does not step .* of the model's parameters that want gradients"),
        (torch.optim.LBFGS(everything), "LBFGS is not known to treat tensors parameter by parameter"),
        (wrapper, "optimizer=SimpleNamespace is not allowed: Optimizer or None is needed"),
    ):
        with pytest.raises(ValueError, match=reason):
            PipelineBalancer(pipeline, optimizer)
    groups = [{"params": everything[: 1 + rank]}, {"params": everything[1 + rank :]}]
    with pytest.raises(RuntimeError, match=r"differ in .* the parameter groups of the optimizer.*\[\[0\], \[1\]\]"):
        PipelineBalancer(pipeline, torch.optim.SGD(groups))
    with pytest.raises(ValueError if rank else RuntimeError, match="LBFGS" if rank else r"ranks \[1\] of the group"):
        PipelineBalancer(pipeline, (torch.optim.SGD, torch.optim.LBFGS)[rank](everything))
    for kind in (torch.optim.SGD, torch.optim.Adafactor):
        PipelineBalancer(pipeline, kind(everything))


@pytest.mark.parametrize(
    ("caller", "counts"), [(0, "rank 0: 1 times; rank 1: 0 times"), (1, "rank 0: 0 times; rank 1: 1 times")]
)
def test_a_change_that_a_single_rank_announces_is_named(run_ranks, caller, counts):
    def check(rank, group):
        training = Training(group, 4)
        training.train(1)
        if rank == caller:
            training.balancer.profile_next()
        with pytest.raises(RuntimeError) as caught:
            training.train(12)
        return str(caught.value)

    wanted = f"profile_next() or load_state_dict() was called on some ranks only, or unequally often: {counts};"
    assert all(wanted in text for text in run_ranks(check, 2))


def slow_before_the_last(*_, **__):
    """A message between the last two stages takes as long as three and a half layers, as all ranks know."""
    return MoveCost(0.0, 0.0), MoveCost(0.0, 0.025)


def test_layers_leave_the_stages_beside_a_slow_link(run_ranks, monkeypatch):
    monkeypatch.setattr(measuring, "measure_neighbour_links", slow_before_the_last)

    def check(rank, group):
        stayed = Training(group, 12, (0, 4, 8, 12), "1f1b").train(10)
        training = Training(group, 12, (0, 4, 8, 12), "1f1b", measure_links=True)
        return stayed, training.train(20), training.losses

    *_, (stayed, moved, losses) = run_ranks(check, 3)
    assert stayed == (0, 4, 8, 12)
    assert moved[1] > 4 and moved[2] > 8
    require_undivided(losses, 12)

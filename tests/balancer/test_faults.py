"""What goes wrong while work migrates ends in an error on every rank, or in a correct step: never in a hang."""

import contextlib
import datetime
import os
import re
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from helpers.processes import for_each, instances_of, told_by_survivors
from helpers.virtual_training import Run

from zeroresize.comm import words
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.layers import functional
from zeroresize.measure.step_timer import LayerTimer
from zeroresize.policy.tensor.controller import Controller

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def reports_are_not_waited_for(monkeypatch):
    """Ranks that die here tell nothing."""
    monkeypatch.setattr(words, "WAIT_S", 0.2)


def what_the_others_are_told(folder, num_ranks, dying, die, num_steps, **config):
    """By rank, when rank ``dying`` calls ``die(run)`` after so many steps: texts with the dying rank's number."""

    def train(rank, world):
        group = dist.new_group(list(range(num_ranks)), timeout=datetime.timedelta(seconds=5))
        run = Run(group, chi={0: 4.0}, update_every=5, **config)
        run.steps(num_steps)
        assert any(own.lent or own.pruned for own in run.balancer.plan.ranks)
        if rank == dying:
            die(run)
        with pytest.raises(RuntimeError) as caught:
            run.steps(20)
        assert isinstance(caught.value.__cause__, RuntimeError), "what the library said of it is there too"
        assert run.balancer.state_dict()  # who is left can save what is known
        with contextlib.suppress(RuntimeError):
            run.balancer.close()
        run.balancer.close()
        for layer in (run.model.up, run.model.down):
            assert layer.loans is None and not layer.probes.holds(LayerTimer)
        return str(caught.value)

    messages = told_by_survivors(train, num_ranks, folder)
    assert sorted(messages) == [rank for rank in range(num_ranks) if rank != dying]
    for text in messages.values():
        assert re.search(
            r"ranks \[.*\] of the group .*(failed.*: one of them may have died|closed.* may have died)", text
        ), text
    return messages


@pytest.mark.parametrize("failing", [0, 1], ids=["owner", "receiver"])
def test_a_rank_that_fails_alone_closes_at_once_and_its_mistake_is_seen(tmp_path, failing):
    """In mid-backward; it closes its balancer as a ``finally`` does, and ends."""

    def fail(*_):
        raise ArithmeticError("a mistake of this rank's own")

    def train(rank, world):
        run = Run(world, chi={0: 4.0}, update_every=5, mode="mig", ratio=0.5, ranks=[0])
        run.steps(20)
        if rank == failing:
            run.model.up.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
        began = time.monotonic()
        with pytest.raises(ArithmeticError if rank == failing else RuntimeError):
            try:
                run.steps(20)
            finally:
                run.balancer.close()
        if rank == failing:
            (tmp_path / "failed").touch()
            os._exit(0)
        assert time.monotonic() - began < 30  # far from the time limit
        return "its mistake"

    assert told_by_survivors(train, 2, tmp_path) == {1 - failing: "its mistake"}
    assert (tmp_path / "failed").exists()


def exit_now(*_, **__):
    time.sleep(0.5)  # what it sent before arrives
    os._exit(3)


@pytest.mark.parametrize(("num_ranks", "dying", "mode"), [(2, 1, "mig"), (3, 1, "semi"), (3, 0, "mig")])
def test_when_a_receiver_or_an_owner_dies_every_other_rank_ends_with_an_error(tmp_path, num_ranks, dying, mode):
    config = {"ratio": 0.5, "ranks": [0]} if mode == "mig" else {"budget": 0.0}
    what_the_others_are_told(tmp_path, num_ranks, dying, exit_now, 20, mode=mode, **config)


def exit_with_the_gradient_of(module):
    """Between the forward and the backward of ``module``."""
    module.register_forward_hook(lambda module, inputs, output: output.register_hook(exit_now) and None)


@pytest.mark.parametrize(
    ("config", "failed"),
    [
        ({"mode": "semi", "budget": 0.0}, "ranks [1] of the group did not come to balancer.step(), call 25"),
        ({"mode": "zero-rd"}, "an all-reduce"),  # nothing in an update waits for the numbers that it sends
    ],
    ids=["semi", "zero-rd"],
)
def test_when_a_rank_dies_before_an_update_the_others_can_save_and_close(tmp_path, config, failed):
    """Their numbers are under way then, and never come together."""

    def die(run):
        run.balancer.step = exit_now

    messages = what_the_others_are_told(tmp_path, 3, 1, die, 24, **config)
    assert all(failed in text for text in messages.values()), messages


#: Within a step: how a rank dies, and in which layer an owner, or a receiver, then waits for it. (In the backward
#: of the row-parallel ``down`` receivers wait for nothing.)
MOMENTS = {
    "before y of the last layer is summed": (lambda run: setattr(functional, "all_reduce", exit_now), "down", "down"),
    "before the last layer's backward": (lambda run: exit_with_the_gradient_of(run.model), "down", "up"),
    "before dw of the first layer is there": (lambda run: exit_with_the_gradient_of(run.model.up), "up", "up"),
    "when its gradient is whole": (lambda run: run.model.up.weight.register_hook(exit_now), "(up|down)", "(up|down)"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
@pytest.mark.parametrize(("num_ranks", "dying"), [(2, 1), (2, 0), (3, 1)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_when_a_rank_dies_within_a_step_the_others_are_told_what_they_waited_for(
    tmp_path, migration_transport, num_ranks, dying, moment
):
    die, layer_of_owner, layer_of_receivers = MOMENTS[moment]
    layer = layer_of_receivers if dying == 0 else layer_of_owner
    config = {"mode": "mig", "migration_transport": migration_transport, "ratio": 0.5, "ranks": [0]}
    messages = what_the_others_are_told(tmp_path, num_ranks, dying, die, 2, **config)
    named = re.compile(rf"ranks \[[^]]*\b{dying}\b[^]]*\] of the group .* failed, in layer {layer}: ")
    assert any(named.search(text) for text in messages.values()), messages


def test_a_balancer_whose_loans_cannot_be_taken_back_closes_all_the_same(run_ranks):
    def train(rank, group):
        run = Run(group, mode="mig", ratio=0.5, ranks=[0])
        run.steps(2)

        def fail():
            raise RuntimeError("sending failed")

        real = run.model.up.loans.finish_sending
        run.model.up.loans.finish_sending = fail
        with pytest.raises(RuntimeError, match="sending failed"):
            run.balancer.close()
        real()
        attached = [probe for layer in (run.model.up, run.model.down) for probe in layer.probes._probes]
        run.balancer.close()
        return [run.model.up.loans, run.model.down.loans], len(attached), run.balancer.metrics()

    for loans, num_probes, metrics in run_ranks(train, 2):
        assert loans == [None, None]
        assert num_probes == 2  # the clocks of this test; no timer
        assert metrics["balance/migration_bytes"] == 0


def test_ranks_that_hold_different_loans_are_told_so(run_ranks):
    @for_each([("mig",), ("semi",)])
    def train(rank, group, mode):
        with instances_of(Controller) as controllers:
            run = Run(group, chi={1: 4.0}, mode=mode, update_every=5)
        run.updates(6)
        run.time.chi = 2.0 if rank == 1 else 1.0  # the loans of the next plan are others
        if rank == 0:
            controllers[0]._division = replace(
                controllers[0]._division, lent=(0.0, 0.0)
            )  # as a bit that flipped would have it
        try:
            run.steps(20)
        except RuntimeError as error:
            return str(error)
        return "went on"

    for texts in run_ranks(train, 2, timeout_s=30):
        assert all("hold different plans" in text for text in texts)


def test_losses_stay_those_of_full_work_when_loans_follow_another_slow_rank_in_the_middle_of_an_epoch(run_ranks):
    def train(rank, group):
        losses, owners = [], []
        for mode in ("off", "mig", "semi"):
            run = Run(group, mode=mode, update_every=5)
            losses_of_mode = []
            for slow in (1, 0, None):
                run.time.chi = 4.0 if rank == slow else 1.0
                losses_of_mode += run.steps(25)
                owners.append([loan.owner for loan in run.balancer.plan.loans])
            losses.append(losses_of_mode)
        assert owners[3:] == [[1], [0], []] * 2
        return losses[:2]

    for expected, actual in run_ranks(train, 3):
        assert actual == pytest.approx(expected, rel=1e-4)

"""Mode "exact" on real ranks: units change hands, nothing else changes, and nothing travels afterwards."""

import copy
import io
import logging
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines, for_each, told_by_survivors
from helpers.virtual_training import Pair, Run
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from zeroresize.resharding import agreement
from zeroresize.resharding.agreement import NotEnoughMemoryError
from zeroresize.resharding.units import owned_units
from zeroresize.resharding.units.moving_units import UnitMove

pytestmark = [pytest.mark.same_ranks, pytest.mark.usefixtures("lending_is_dear")]

HOME, AWAY = (96, 96), (144, 48)


def exact_run(group, **config):
    return Run(group, gather_s=0.0, **{"mode": "exact", "update_every": 4, **config})


def counts(run):
    """How many neurons every rank owns."""
    return run.model.down.segment.owned.counts


def in_turn(*checks):
    """Of ranks: one check after the other, none of whose balancers is left."""

    @for_each([(check,) for check in checks])
    def run(rank, group, check):
        try:
            check(rank, group)
        finally:
            dist.barrier()

    return run


def test_units_move_away_from_a_straggler_and_come_home_after_it_recovers(run_ranks):
    def train(rank, group):
        run = exact_run(group)
        run.updates(2)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.updates(12)
        began_s = run.time.now
        run.steps(1)
        busy_s, away = run.time.now - began_s, counts(run)
        run.time.chi = 1.0
        run.updates(12)
        return busy_s, away, counts(run), run.balancer.metrics()["balance/owned_share"]

    results = run_ranks(train, 3)
    times = [busy_s for busy_s, *_ in results]
    assert max(times) <= 1.1 * min(times)
    for _, away, after, owned in results:
        assert away == results[0][1] and away[1] < away[0] / 2
        assert after == (64, 64, 64) and owned == 1.0


def test_units_stay_while_a_deep_copy_is_held_that_could_not_follow(run_ranks):
    def train(rank, group):
        run = exact_run(group)
        run.updates(2)
        average = AveragedModel(run.model) if rank == 0 else None
        again = copy.deepcopy(average)
        run.time.chi = 4.0 if rank == 1 else 1.0
        with caught_log_lines() as lines:
            run.updates(6)
        held, balancer = counts(run), run.balancer
        for _ in range(2):  # the copy, then what was copied of it
            if average is not None:
                average.update_parameters(run.model)
            with pytest.raises(RuntimeError, match=r"holds a deep copy of up.*AveragedModel.*moves: false"):
                balancer.move((3, 1))
            average, again = again, None
        average = None
        balancer.move((3, 1))
        copied = copy.deepcopy(run.model) if rank == 1 else None
        with balancer.at_home():
            at_home = counts(run)
        with pytest.raises(RuntimeError, match="holds a deep copy of up"):
            balancer.move((1, 1))
        del copied
        balancer.close(at_home=True)
        return held, at_home, counts(run), sum("holds a deep copy of up" in line for line in lines)

    for rank, (held, at_home, closed, num_lines) in enumerate(run_ranks(train, 2)):
        assert held == at_home == closed == HOME
        assert bool(num_lines) == (rank == 0)


def tensors_of(run):
    tensors = dict(run.model.state_dict())
    for number, state_of_parameter in run.optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in state_of_parameter.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def there_and_home_again_all_is_bitwise_as_it_was(rank, group):
    run = exact_run(group, mode="off")
    run.steps(3)
    before, parameters = tensors_of(run), [id(parameter) for parameter in run.model.parameters()]
    run.balancer.move((3, 1))
    with run.balancer.at_home():
        at_home = tensors_of(run)
    assert counts(run) == AWAY
    run.balancer.move((1, 1))
    after = tensors_of(run)
    assert all(torch.equal(one[name], before[name]) for one in (at_home, after) for name in before)
    assert parameters == [id(parameter) for parameter in run.model.parameters()]


def a_settled_step_sends_no_byte_more_than_an_undisturbed_one(rank, group):
    sent, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    run = exact_run(group, update_every=100)
    run.steps(2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", counting)
        run.steps(2)
        undisturbed = list(sent)
        run.balancer.move((1, 3))
        sent.clear()
        run.steps(2)
    assert sent == undisturbed and undisturbed and run.balancer.bytes_migrated == 0


def uneven_shards_get_into_no_file(rank, group):
    run = exact_run(group)
    run.steps(1)
    even = {part: copy.deepcopy(part.state_dict()) for part in (run.model, run.optimizer)}
    run.balancer.move((2, 1))
    for part in (run.model, run.optimizer):
        with pytest.raises(RuntimeError, match="at_home"):
            part.state_dict()
        with pytest.raises(RuntimeError, match="at_home"):
            part.load_state_dict(even[part])
    copied = copy.deepcopy(run.model)
    with pytest.raises(RuntimeError, match="is a copy of an unevenly divided layer"):
        copied.state_dict()
    with run.balancer.at_home():
        assert run.model.state_dict()["down.weight"].shape == (48, 96)
        run.optimizer.state_dict()
        with pytest.raises(RuntimeError, match="at_home"):
            run.balancer.step()
        with pytest.raises(RuntimeError, match="within at_home"):
            run.balancer.move((1, 1))
    with pytest.raises(OSError, match="disk"), run.balancer.at_home():
        raise OSError("disk full")
    assert counts(run) == (128, 64)


def a_resumed_run_goes_on_with_units_away(rank, group):
    torch.set_default_dtype(torch.float64)
    run = exact_run(group)
    run.steps(2)
    run.balancer.move((3, 1))
    run.steps(2)
    with run.balancer.at_home():
        file = io.BytesIO()
        torch.save(run.optimizer.state_dict(), file)
        model, balancer = copy.deepcopy(run.model.state_dict()), run.balancer.state_dict()
    expected = run.steps(4)
    run.balancer.close()
    resumed = exact_run(group)
    resumed.model.load_state_dict(model)
    file.seek(0)
    resumed.optimizer.load_state_dict(torch.load(file, weights_only=True))
    resumed.balancer.load_state_dict(balancer)
    assert resumed.steps(4) == expected and counts(resumed) == AWAY


def test_moves_change_nothing_send_nothing_afterwards_and_get_into_no_file(run_ranks):
    run_ranks(
        in_turn(
            there_and_home_again_all_is_bitwise_as_it_was,
            a_settled_step_sends_no_byte_more_than_an_undisturbed_one,
            uneven_shards_get_into_no_file,
            a_resumed_run_goes_on_with_units_away,
        ),
        2,
    )


def wrong_shares_are_refused_before_anything_moves(rank, group):
    run = exact_run(group)
    for shares in [(1, 2, 3), (0, 0), (-1, 2), "auto", (float("nan"), 1.0)]:
        with pytest.raises(ValueError, match=rf"^move\(shares={re.escape(repr(shares))}\) is not allowed: "):
            run.balancer.move(shares)
        run.steps(1)
    for of_one in (None, (1, 1), (2, 1), (1, 2, 3)):
        with pytest.raises((ValueError, RuntimeError), match=r"differ in the shares of move\(\)|\(1, 2, 3\)\) is not"):
            run.balancer.move(of_one if rank else (1, 2))
    assert counts(run) == HOME


def a_receiver_without_memory_is_given_nothing(rank, group):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(agreement, "free_bytes", lambda device: 0 if rank == 0 else 2**40)
        run = exact_run(group)
        run.updates(2)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.updates(8)
    assert counts(run) == HOME and run.balancer.plan.owned == (1.0, 1.0)


def a_rank_that_runs_out_of_memory_in_a_move_is_named_on_all_and_it_is_tried_again(rank, group):
    run = exact_run(group, update_every=2)
    run.updates(1)
    run.time.chi = 4.0 if rank == 1 else 1.0
    who = "ranks [1] of the group failed while preparing "
    with pytest.MonkeyPatch.context() as patched, caught_log_lines(logging.WARNING) as warnings:
        if rank == 1:
            patched.setattr(UnitMove, "make_tensors", lambda _: torch.empty(2**50))
        with pytest.raises(NotEnoughMemoryError, match=re.escape(who)):
            run.balancer.move((3, 1))
        run.updates(8)
    assert counts(run) == HOME and run.balancer.plan.owned == (1.0, 1.0)
    assert rank or (warnings and all("units that were to move stay" in line and who in line for line in warnings))
    run.updates(24)
    assert counts(run)[1] < HOME[1]


def what_was_held_is_held_after_a_move_that_could_not_be_made(rank, group):
    run = exact_run(group)
    run.balancer.move((3, 1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(agreement, "free_bytes", lambda device: 0)
        with pytest.raises(RuntimeError, match="not enough memory"):
            run.balancer.move((1, 3))
    run.updates(8)
    assert counts(run) == AWAY


def what_cannot_move_stays_and_training_goes_on(rank, group):
    """Such as state of the optimizer whose shape is another: nobody may wait for the rank that has it."""
    for rank_with_it in (0, 1):
        run = exact_run(group)
        run.updates(1)
        if rank == rank_with_it:
            run.optimizer.state[run.model.down.weight]["row"] = torch.zeros(17)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.updates(6)
        with pytest.raises(RuntimeError, match="nothing has"):
            run.balancer.move((1, 2))
        assert counts(run) == HOME


def test_what_cannot_be_moved_stays_on_all_ranks(run_ranks):
    run_ranks(
        in_turn(
            wrong_shares_are_refused_before_anything_moves,
            a_receiver_without_memory_is_given_nothing,
            a_rank_that_runs_out_of_memory_in_a_move_is_named_on_all_and_it_is_tried_again,
            what_was_held_is_held_after_a_move_that_could_not_be_made,
            what_cannot_move_stays_and_training_goes_on,
        ),
        2,
    )


def test_a_rank_that_dies_once_units_have_moved_is_told_with_that_they_have(tmp_path, monkeypatch):
    def train(rank, world):
        run = exact_run(dist.new_group([0, 1], timeout=timedelta(seconds=5)))
        run.updates(1)
        move_units = owned_units.move_units

        def move_and_die(*arguments, **options):
            move_units(*arguments, **options)
            os._exit(0)

        if rank == 1:
            monkeypatch.setattr(owned_units, "move_units", move_and_die)
        with pytest.raises(RuntimeError) as caught:
            run.balancer.move((2, 1))
        assert counts(run) == (128, 64)
        return str(caught.value)

    (text,) = told_by_survivors(train, 2, tmp_path).values()
    assert "the units have moved, they are divided by [1.333333, 0.666667] now; then: ranks [1]" in text, text
    assert "nothing has" not in text


class DroppingPair(Pair):
    """With dropout between its layers, and dropout of replicated activations behind them, as transformers have it."""

    def __init__(self, group):
        super().__init__(group)
        self.between, self.behind = torch.nn.Dropout(0.25), torch.nn.Dropout(0.25)

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x):
        return x + self.behind(self.down(self.between(torch.nn.functional.gelu(self.up(x)))))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_dropout_clipping_accumulation_and_checkpointing_go_on_as_if_nothing_had_moved(run_ranks, num_ranks):
    """Also what replicated dropout drops behind the segment: all ranks draw equally many random numbers."""

    def train(rank, group):
        torch.set_default_dtype(torch.float64)

        def clip(model):
            """The norm of the whole model's gradient; what is replicated counts once."""
            shards = [model.up.weight.grad, model.up.bias.grad, model.down.weight.grad]
            squared = sum(grad.square().sum() for grad in shards)
            dist.all_reduce(squared, group=group)
            norm = (squared + model.down.bias.grad.square().sum()).sqrt()
            for parameter in model.parameters():
                parameter.grad.mul_(1e-3 / norm)

        def losses(*moves):
            run = exact_run(group, model=DroppingPair, update_every=100)
            torch.manual_seed(0)
            seen = []
            for shares in moves:
                run.balancer.move(shares[:num_ranks])
                for _ in range(3):
                    for half in run.x.chunk(2):
                        loss = run.model(half).square().mean() / 2
                        loss.backward()
                        seen.append(loss.item())
                    clip(run.model)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    run.balancer.step()
            return seen

        even = (1, 1, 1)
        return losses(even, even, even), losses(even, (3, 0, 1), even)

    for expected, moved in run_ranks(train, num_ranks):
        assert moved == pytest.approx(expected, rel=1e-10)
        assert len(set(expected)) == len(expected)


def test_semi_prunes_what_the_others_cannot_take_and_comes_home(run_ranks):
    @for_each([({},), ({"pruned_update": "freeze"},)])
    def train(rank, group, config):
        run = exact_run(group, mode="semi", moves=True, update_every=1, **config)
        run.steps(4)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.steps(20)
        began_s = run.time.now
        run.steps(1)
        busy_s, plan, away = run.time.now - began_s, run.balancer.plan, counts(run)
        pruned = {name: len(columns) if columns is not None else 0 for name, columns in run.pruned().items()}
        run.time.chi = 1.0
        run.steps(20)
        return busy_s, plan, away, pruned, counts(run), run.balancer.plan.relieved

    for results in zip(*run_ranks(train, 2), strict=True):
        (fast_s, plan, away, nothing, *_), (slow_s, _, _, pruned, *_) = results
        assert 96 < away[0] <= 104 and plan.owned[1] < 1.0  # at most half the tolerance longer
        assert 0.6 < plan.ranks[1].pruned < 0.8 and plan.ranks[0].pruned == 0.0
        assert nothing == {"up": 0, "down": 0}
        assert pruned["down"] == pytest.approx(plan.ranks[1].pruned * away[1], abs=9) and pruned["up"] > 0
        assert slow_s <= 1.08 * fast_s
        assert all(home == HOME and relieved == [] for *_, home, relieved in results)

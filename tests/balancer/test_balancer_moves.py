"""Mode "exact" on real ranks: units change hands, nothing else changes, and nothing travels afterwards."""

import copy
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines, told_by_survivors
from helpers.virtual_training import Pair, Run
from torch.utils.checkpoint import checkpoint

from zeroresize.control import mover
from zeroresize.measure import calibration
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.resharding.units import owned_units
from zeroresize.resharding.units.owned_units import OwnedUnits


@pytest.fixture(autouse=True)
def lending_is_dear(monkeypatch):
    """As virtual time does not count transfers, lending would cost nothing, and moving bring nothing more."""
    monkeypatch.setattr(calibration, "measure_migration_cost", lambda *_: MigrationCost(fixed_s=1e3))


def exact_run(group, **config):
    return Run(group, gather_s=0.0, **{"mode": "exact", "update_every": 4, **config})


def counts(run):
    """How many neurons every rank owns."""
    return run.model.down.segment.owned.counts


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_units_move_away_from_a_straggler_and_come_home_after_it_recovers(run_ranks, num_ranks):
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

    results = run_ranks(train, num_ranks)
    times = [busy_s for busy_s, *_ in results]
    assert max(times) <= 1.1 * min(times)
    for _, away, after, owned in results:
        assert away == results[0][1] and away[1] < away[0] / 2
        assert after == (192 // num_ranks,) * num_ranks and owned == 1.0


def test_a_rank_that_stays_slow_while_its_units_stay_is_told_with_the_reason(run_ranks, monkeypatch):
    """A move takes so long that it never pays."""
    monkeypatch.setattr(mover, "measure_move_cost", lambda *_: MoveCost(0.0, 1e6))

    def train(rank, group):
        with caught_log_lines() as lines:
            run = exact_run(group)
            run.updates(2)
            run.time.chi = 4.0 if rank == 1 else 1.0
            run.updates(24)
        return [line for line in lines if "units stay where they are" in line], counts(run)

    (lines, owned), (of_other_rank, _) = run_ranks(train, 2)
    assert owned == (96, 96) and of_other_rank == []
    steps = [int(line.split()[1].rstrip(":")) for line in lines]
    assert steps[1] - steps[0] == 8 * 4
    for line in lines:
        assert re.search(
            r"rank 1 is 3\.\d times slower .* a step and take 2e\+06 s; staying has cost \S+ of 4e\+06 s$", line
        )


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_training_goes_on_as_if_nothing_had_moved(run_ranks, num_ranks):
    def train(rank, group):
        torch.set_default_dtype(torch.float64)
        expected = exact_run(group, mode="off").steps(9)
        run = exact_run(group, mode="off")
        losses = run.steps(3)
        run.balancer.move([1.0, 0.0, 3.0, 2.0][:num_ranks])
        moved = counts(run)
        losses += run.steps(3)
        run.balancer.move([1.0] * num_ranks)
        losses += run.steps(3)
        return losses, expected, moved, counts(run)

    for losses, expected, moved, after in run_ranks(train, num_ranks):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert moved[1] == 0 and sum(moved) == 192
        assert len(set(after)) == 1


def test_there_and_home_again_leaves_weights_and_optimizer_state_bitwise(run_ranks):
    def train(rank, group):
        run = exact_run(group, mode="off")
        run.steps(3)

        def state():
            tensors = dict(run.model.state_dict())
            for number, state_of_parameter in run.optimizer.state_dict()["state"].items():
                tensors |= {f"{number}.{key}": value for key, value in state_of_parameter.items()}
            return {name: tensor.clone() for name, tensor in tensors.items()}

        before, parameters = state(), [id(parameter) for parameter in run.model.parameters()]
        run.balancer.move((3, 1))
        with run.balancer.at_home():
            at_home = state()
        away = counts(run)
        run.balancer.move((1, 1))
        after = state()
        same = [all(torch.equal(one[name], before[name]) for name in before) for one in (at_home, after)]
        return same, away, parameters == [id(parameter) for parameter in run.model.parameters()]

    for same, away, same_objects in run_ranks(train, 2):
        assert same == [True, True] and away == (144, 48) and same_objects


def test_a_settled_step_sends_no_byte_more_than_an_undisturbed_one(run_ranks):
    def train(rank, group):
        sent = []
        all_reduce = dist.all_reduce

        def counting(tensor, *args, **kwargs):
            sent.append(tensor.numel() * tensor.element_size())
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = counting
        run = exact_run(group, update_every=100)
        run.steps(2)
        sent.clear()
        run.steps(2)
        undisturbed = list(sent)
        run.balancer.move((1, 3))
        sent.clear()
        run.steps(2)
        return undisturbed, list(sent), run.balancer.bytes_migrated

    for undisturbed, moved, migrated in run_ranks(train, 2):
        assert undisturbed == moved and undisturbed and migrated == 0


def test_uneven_shards_get_into_no_file(run_ranks):
    def train(rank, group):
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
            shape = run.model.state_dict()["down.weight"].shape
            run.optimizer.state_dict()
            with pytest.raises(RuntimeError, match="at_home"):
                run.balancer.step()
        return tuple(shape), counts(run)

    assert run_ranks(train, 2) == [((48, 96), (128, 64))] * 2


def test_a_resumed_run_goes_on_with_units_away(run_ranks):
    def train(rank, group):
        torch.set_default_dtype(torch.float64)
        run = exact_run(group)
        run.steps(2)
        run.balancer.move((3, 1))
        run.steps(2)
        with run.balancer.at_home():
            saved = {
                "model": {name: value.clone() for name, value in run.model.state_dict().items()},
                "optimizer": run.optimizer.state_dict(),
                "balancer": run.balancer.state_dict(),
            }
            saved["optimizer"] = torch.load(_through_a_file(saved["optimizer"]), weights_only=True)
        expected = run.steps(4)
        run.balancer.close()

        resumed = exact_run(group)
        resumed.model.load_state_dict(saved["model"])
        resumed.optimizer.load_state_dict(saved["optimizer"])
        resumed.balancer.load_state_dict(saved["balancer"])
        return expected, resumed.steps(4), counts(resumed)

    for expected, losses, owned in run_ranks(train, 2):
        assert losses == expected and owned == (144, 48)


def _through_a_file(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_shares_that_are_none_are_refused_before_anything_moves(run_ranks):
    def train(rank, group):
        run = exact_run(group)
        for shares in [(1, 2, 3), (0, 0), (-1, 2), "auto", (float("nan"), 1.0)]:
            with pytest.raises(ValueError, match=rf"^move\(shares={re.escape(repr(shares))}\) is not allowed: "):
                run.balancer.move(shares)
            run.steps(1)
        return counts(run)

    assert run_ranks(train, 2) == [(96, 96)] * 2


def test_ranks_that_ask_for_different_shares_hear_of_it_and_nothing_moves(run_ranks):
    def train(rank, group):
        run = exact_run(group)
        run.steps(1)
        with pytest.raises(RuntimeError, match=r"differ|agree"):
            run.balancer.move((1, 2) if rank else (2, 1))
        return counts(run)

    assert run_ranks(train, 2) == [(96, 96)] * 2


def test_a_receiver_without_memory_is_given_nothing(run_ranks, monkeypatch, caplog):
    import zeroresize.resharding.agreement as agreement

    def train(rank, group):
        monkeypatch.setattr(agreement, "free_bytes", lambda device: 0 if rank == 0 else 2**40)
        run = exact_run(group)
        run.updates(2)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.updates(8)
        return counts(run), run.balancer.plan.owned

    assert run_ranks(train, 2) == [((96, 96), (1.0, 1.0))] * 2


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


@pytest.mark.parametrize("rank_with_it", [0, 1])
def test_what_cannot_move_stays_and_training_goes_on(run_ranks, rank_with_it):
    """Such as state of the optimizer whose shape is another: nobody may wait for the rank that has it."""

    def train(rank, group):
        run = exact_run(group)
        run.updates(1)
        if rank == rank_with_it:
            run.optimizer.state[run.model.down.weight]["row"] = torch.zeros(17)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.updates(6)
        with pytest.raises(RuntimeError, match="nothing has"):
            run.balancer.move((1, 2))
        del run.optimizer.state[run.model.down.weight]["row" if rank == rank_with_it else "step"]
        return counts(run)

    assert run_ranks(train, 2) == [(96, 96)] * 2


@pytest.mark.parametrize("chi", [2.0, 10.0])
def test_units_come_home_though_the_slowness_ended_just_as_they_left(run_ranks, monkeypatch, chi):
    """Steps at the old speed are all under the old division, steps at the new speed under the new one."""

    def train(rank, group):
        run = exact_run(group)
        move = OwnedUnits.move

        def move_as_the_slowness_ends(units, shares, why_not=None):
            run.time.chi = 1.0
            return move(units, shares)

        run.updates(4)
        run.time.chi = chi if rank == 1 else 1.0
        monkeypatch.setattr(OwnedUnits, "move", move_as_the_slowness_ends)
        while counts(run) == (96, 96):
            run.updates(1)
        monkeypatch.undo()
        run.updates(8)
        return counts(run)

    assert run_ranks(train, 2) == [(96, 96)] * 2


class DroppingPair(Pair):
    """With dropout between its layers, and dropout of replicated activations behind them, as transformers have it."""

    def __init__(self, group):
        super().__init__(group)
        self.between, self.behind = torch.nn.Dropout(0.25), torch.nn.Dropout(0.25)

    def forward(self, x):
        return x + self.behind(self.down(self.between(torch.nn.functional.gelu(self.up(x)))))


def test_dropout_drops_the_same_whoever_owns_the_units(run_ranks):
    """Also what replicated dropout drops behind the segment: all ranks draw equally many random numbers."""

    def train(rank, group):
        torch.set_default_dtype(torch.float64)

        def losses(*moves):
            run = exact_run(group, model=DroppingPair)
            run.balancer.move((1, 1))
            torch.manual_seed(0)
            seen = run.steps(3)
            for shares in moves:
                run.balancer.move(shares)
                seen += run.steps(3)
            return seen

        return losses((1, 1), (1, 1)), losses((3, 1), (1, 1))

    (expected, first), (same, second) = run_ranks(train, 2)
    assert first == second == pytest.approx(expected, rel=1e-10) and expected == same
    assert len(set(expected)) == len(expected)


class CheckpointedPair(DroppingPair):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_clipping_accumulation_and_checkpointing_go_on_as_if_nothing_had_moved(run_ranks, num_ranks):
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
            run = exact_run(group, model=CheckpointedPair, mode="exact", update_every=100)
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


def test_an_error_within_at_home_leaves_units_away_again(run_ranks):
    def train(rank, group):
        run = exact_run(group)
        run.steps(1)
        run.balancer.move((3, 1))
        with pytest.raises(OSError, match="disk"), run.balancer.at_home():
            raise OSError("disk full")
        away = counts(run)
        with run.balancer.at_home(), pytest.raises(RuntimeError, match="within at_home"):
            run.balancer.move((1, 1))
        run.steps(2)
        return away, counts(run)

    assert run_ranks(train, 2) == [((144, 48), (144, 48))] * 2


@pytest.mark.parametrize("config", [{}, {"paper": {"imputation": "same"}}, {"pruned_update": "freeze"}], ids=str)
def test_semi_prunes_what_the_others_cannot_take_and_comes_home(run_ranks, config):
    def train(rank, group):
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

    results = run_ranks(train, 2)
    (fast_s, plan, away, nothing, *_), (slow_s, _, _, pruned, *_) = results
    assert 96 < away[0] <= 104 and plan.owned[1] < 1.0  # at most half the tolerance longer
    assert 0.6 < plan.ranks[1].pruned < 0.8 and plan.ranks[0].pruned == 0.0
    assert nothing == {"up": 0, "down": 0}
    assert pruned["down"] == pytest.approx(plan.ranks[1].pruned * away[1], abs=9) and pruned["up"] > 0
    assert slow_s <= 1.08 * fast_s
    assert all(home == (96, 96) and relieved == [] for *_, home, relieved in results)


def test_what_was_held_is_held_after_a_move_that_could_not_be_made(run_ranks, monkeypatch):
    import zeroresize.resharding.agreement as agreement

    def train(rank, group):
        run = exact_run(group)
        run.balancer.move((3, 1))
        monkeypatch.setattr(agreement, "free_bytes", lambda device: 0)
        with pytest.raises(RuntimeError, match="not enough memory"):
            run.balancer.move((1, 3))
        monkeypatch.undo()
        run.updates(12)
        return counts(run)

    assert run_ranks(train, 2) == [(144, 48)] * 2

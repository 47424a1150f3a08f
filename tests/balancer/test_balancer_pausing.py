"""One rank's call, or its file, pauses balancing on all ranks at the same update; nothing that was learned is lost."""

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.pausing import Wishes
from helpers.processes import caught_log_lines
from helpers.virtual_training import FEATURES, Run
from torch import nn

from zeroresize.policy.tensor.costs import MigrationCost

pytestmark = pytest.mark.same_ranks


def whole_after(num_steps, x):
    """Parameters of the undivided model."""
    torch.manual_seed(0)
    up, down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()])
    for _ in range(num_steps):
        (x + down(nn.functional.gelu(up(x)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return up.weight, down.weight


class Paused:
    """A run of which rank 1 is slow, and alone says what balancing may be."""

    def __init__(self, rank, group, tmp_path, by_file, **config):
        self.rank, self.wishes, self.records, self.num_steps = rank, Wishes(rank, tmp_path, by_file=by_file), [], 0
        config = {"mode": "exact", "gather_s": 0.0, "update_every": 2, **config}
        with self.wishes.read():
            self.run = Run(group, chi={1: 4.0}, on_update=self.records.append, **config)
        self.balancer = self.run.balancer

    def wish(self, state):
        self.wishes.say(self.balancer, state)

    def updates(self, number):
        """After each what holds, what ranks spare, and what they own."""
        after = []
        for _ in range(number):
            self.run.steps(2)
            self.num_steps += 2
            ranks = self.balancer.plan.ranks
            after.append((self.balancer.restraint.state, [each.spared for each in ranks], self.counts))
        return after

    @property
    def counts(self):
        return self.run.model.down.segment.owned.counts

    def require_undivided(self):
        with self.balancer.at_home():
            whole = whole_after(self.num_steps, self.run.x)
            for part, weight, dim in zip((self.run.model.up, self.run.model.down), whole, (0, 1), strict=True):
                torch.testing.assert_close(part.weight, weight.chunk(2, dim)[self.rank], rtol=1e-4, atol=1e-5)


@on_ranks(2, cases=[("exact", False), ("exact", True), ("zero-rd", True)])
def test_off_takes_back_what_is_lent_or_pruned_on_all_ranks_at_once_and_on_gives_it_again(
    rank, group, mode, by_file, *, tmp_path
):
    paused = Paused(rank, group, tmp_path, by_file, mode=mode)
    paused.updates(4)
    assert paused.balancer.plan.ranks[1].spared > 0.4
    with caught_log_lines() as lines:
        paused.wish("off")
        off = paused.updates(4)
        moved_bytes = paused.balancer.bytes_migrated
        off += paused.updates(1)
        assert moved_bytes == paused.balancer.bytes_migrated and paused.run.pruned() == {"up": None, "down": None}
        paused.wish("on")
        again = paused.updates(2)
    assert [state for state, *_ in off[1:]] == ["off"] * 4 and off[-1][1] == [0.0, 0.0] and off[1][1] == [0.0, 0.0]
    assert [record.ratio for record in paused.records[-5:-2]] == [0.0] * 3
    assert again[-1][0] == "on" and paused.balancer.plan.ranks[1].spared > 0.4
    first, other = gathered(group, (off, again))
    assert first == other
    if mode == "exact":
        paused.require_undivided()
    pauses = [line for line in lines if line.startswith("balancing ")]
    since = [2 * (5 + (off[0][0] == "on")), 2 * (10 + (again[0][0] != "on"))]
    assert pauses == (
        []
        if rank
        else [
            f"balancing is paused since step {since[0]}, as {paused.wishes.says} says",
            f"balancing goes on since step {since[1]}, as every rank says",
        ]
    )


@on_ranks(2, cases=[(False,), (True,)])
def test_advice_tells_what_would_move_and_nothing_moves_meanwhile(rank, group, by_file, *, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroresize.measure.calibration.measure_migration_cost", lambda *_: MigrationCost(fixed_s=1e3))
    paused = Paused(rank, group, tmp_path, by_file)
    paused.updates(1)
    paused.wish("advice")
    with caught_log_lines() as lines:
        advised = paused.updates(12)
    assert advised[-1] == ("advice", [0.0, 0.0], (96, 96))
    would = paused.balancer.what_if()["exact"]
    assert would["owned"][1] < 0.6 and 0.2 < would["gain"] < 0.9
    assert paused.records[-1].would["exact"]["gain"] == would["gain"] and paused.records[-1].owned == 1.0
    assert any(
        line.startswith("step ") and "advice only, nothing of it is done: units by" in line for line in lines
    ) == (rank == 0)
    paused.wish("on")
    paused.updates(2)
    away = paused.counts
    assert away[1] < 60, "at once, by what was learned"
    paused.wish("off")
    paused.run.time.chi = 1.0
    off = paused.updates(12)
    assert off[-1] == ("off", [0.0, 0.0], away), "what has moved stays"
    paused.wish("on")
    assert paused.updates(12)[-1] == ("on", [0.0, 0.0], (96, 96))
    paused.require_undivided()


@on_ranks(2)
def test_what_is_saved_while_a_move_is_advised_has_the_shares_that_are_in_force(rank, group, *, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroresize.measure.calibration.measure_migration_cost", lambda *_: MigrationCost(fixed_s=1e3))
    paused = Paused(rank, group, tmp_path, by_file=False)
    paused.wish("advice")
    paused.updates(13)
    assert paused.balancer.what_if()["exact"]["owned"][1] < 0.6
    resumed = Paused(rank, group, tmp_path, by_file=False)
    resumed.balancer.load_state_dict(paused.balancer.state_dict())
    assert [each.owned for each in resumed.balancer.plan.ranks] == [1.0, 1.0]
    resumed.run.steps(1)
    assert resumed.counts == (96, 96)


@on_ranks(2, cases=[("exact",), ("zero-rd",)])
def test_who_is_slow_is_told_while_balancing_is_paused_to_advice(rank, group, mode, *, tmp_path):
    paused = Paused(rank, group, tmp_path, by_file=False, mode=mode)
    paused.run.time.chi = 1.0
    paused.wish("advice")
    for chi, slow in ((1.0, [False, False]), (4.0, [False, True]), (1.0, [False, False])):
        paused.run.time.chi = chi if rank == 1 else 1.0
        assert paused.updates(8)[-1][0] == "advice"
        assert [each.is_straggler for each in paused.balancer.plan.ranks] == slow
        assert paused.records[-1].is_straggler == bool(paused.balancer.metrics()["balance/is_straggler"]) == slow[rank]


@on_ranks(2)
def test_what_is_done_by_hand_and_what_is_loaded_hold_while_balancing_is_off(rank, group, *, tmp_path):
    paused = Paused(rank, group, tmp_path, by_file=False)
    paused.updates(4)
    paused.wish("off")
    paused.updates(2)
    paused.balancer.move((3, 1))
    assert paused.updates(2)[-1] == ("off", [0.0, 0.0], (144, 48))
    paused.balancer.move(None)
    paused.balancer.load_state_dict(paused.balancer.state_dict())
    assert paused.updates(2)[-1] == ("off", [0.0, 0.0], (144, 48))
    paused.require_undivided()

"""What balancing brought to a run, told by its own steps."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from helpers.runs import epoch_of, record, write_metrics, write_run

from scripts.report.gain import Gain, gain_of, gain_rows
from scripts.report.run import RunFolder

#: Starting takes long; full work until step 20, and in step 30; balanced, a little slower right after an update.
SECONDS = [9.0, 3.0, 2.0, 1.0, 1.0, *[0.4] * 15, *[0.16] * 10, 0.4, *[0.16] * 9]


def straggler(ratio: float = 0.75, busy_s: float = 0.4) -> list:
    """Rank 1 prunes from its second update on, and does all of its work in step 30."""
    shares = {1: 0.0, 2: ratio, 3: ratio, 4: ratio}
    return [
        record(1, update, share, busy_s=busy_s, calibration_steps=int(update == 3)) for update, share in shares.items()
    ]


def gain_in(folder: Path) -> Gain | str:
    return gain_of(RunFolder.read(folder))


def test_balanced_steps_are_compared_with_the_runs_own_at_full_work(tmp_path: Path) -> None:
    """Of 21 the first 5 warm up; that one prunes for itself later does not matter."""
    gain = gain_in(write_run(tmp_path, "zero-pri", SECONDS, straggler()))
    assert isinstance(gain, Gain)
    assert [one.begin for one in gain.unbalanced] == [*range(5, 20), 30]
    assert [one.begin for one in gain.balanced] == [*range(20, 30), *range(31, 40)]
    assert gain.ratio == pytest.approx(2.5)
    assert gain.interval() == pytest.approx((2.5, 2.5))
    assert dict(gain_rows(RunFolder.read(tmp_path))) == {
        "a step without balancing": "400.0 ms, median of the 16 at full work, before the first plan or to be measured",
        "a step with balancing": "160.0 ms, median of the 19 in which ranks were as slow as then",
        "without balancing steps took": "2.50 times as long (2.50 to 2.50: 95 % by bootstrap)",
    }


def test_the_first_steps_of_a_process_that_goes_on_warm_up_too(tmp_path: Path) -> None:
    write_run(tmp_path, "zero-pri", SECONDS, straggler())
    write_metrics(tmp_path, [epoch_of(SECONDS[:22]), epoch_of([5.0] * 5 + [0.16] * 13, begin=22, from_step=22)])
    gain = gain_in(tmp_path)
    assert isinstance(gain, Gain)
    assert [one.begin for one in gain.balanced] == [20, 21, 27, 28, 29, *range(31, 40)]


def test_a_noisy_step_makes_the_interval_wide(tmp_path: Path) -> None:
    noisy = [*SECONDS[:5], *[0.3, 0.4, 0.5] * 5, *SECONDS[20:]]
    gain = gain_in(write_run(tmp_path, "zero-pri", noisy, straggler()))
    assert isinstance(gain, Gain)
    low, high = gain.interval() or (0.0, 0.0)
    assert low < 2.5 <= high and low >= 0.3 / 0.16 and high <= 0.5 / 0.16


def test_steps_at_full_work_before_a_straggler_came_tell_nothing(tmp_path: Path) -> None:
    """Until step 20 nobody was slow: those steps were as short as the balanced ones."""
    records = straggler()
    early = [record(1, 1, 0.0, busy_s=0.1), record(1, 2, 0.75, busy_s=0.1)]
    rows = gain_rows(RunFolder.read(write_run(tmp_path, "zero-pri", [0.16] * 40, [*early, *records[2:]])))
    assert [name for name, _ in rows] == [""]
    assert rows[0][1].startswith("not known: too few steps without balancing")


def test_a_ratio_in_force_from_the_first_step_leaves_nothing_to_compare_with(tmp_path: Path) -> None:
    always = [record(1, update, 0.5, busy_s=0.4) for update in (1, 2, 3, 4)]
    assert "not known" in gain_in(write_run(tmp_path, "zero-pri", SECONDS, always))


def test_ratios_that_are_pinned_between_updates_are_not_compared(tmp_path: Path) -> None:
    pinned = {"kind": "none", "pin_ratio": 0.5}
    assert "not known" in gain_in(write_run(tmp_path, "zero-pri", SECONDS, straggler(), straggler=pinned))


@pytest.mark.parametrize(
    ("mode", "ratio", "said"),
    [("off", 0.0, "nothing: mode off"), ("zero-pri", 0.0, "nothing: no plan that moved, lent or pruned was in force")],
)
def test_where_nothing_is_balanced_it_says_so(tmp_path: Path, mode: str, ratio: float, said: str) -> None:
    assert gain_in(write_run(tmp_path, mode, SECONDS, straggler(ratio))) == said


def test_steps_that_were_timed_together_count_where_all_are_of_one_kind(tmp_path: Path) -> None:
    """As on a GPU; too few of them tell no interval."""
    write_run(tmp_path, "zero-pri", SECONDS, straggler())
    lines = [(9, 2.0), (19, 0.4), (24, 0.16), (29, 0.2), (34, 0.3), (39, 0.16)]
    write_metrics(tmp_path, [{"kind": "step", "step": step, "step_s": step_s} for step, step_s in lines])
    gain = gain_in(tmp_path)
    assert isinstance(gain, Gain)
    assert [(one.begin, one.end) for one in gain.unbalanced] == [(10, 20)]
    assert [(one.begin, one.end) for one in gain.balanced] == [(20, 25), (25, 30), (35, 40)]
    assert gain.ratio == pytest.approx(2.5) and gain.interval() is None
    assert gain_rows(RunFolder.read(tmp_path))[-1][1] == "2.50 times as long"


def test_balancing_that_made_steps_longer_is_told_as_it_is(tmp_path: Path) -> None:
    """No bound: what was measured."""
    slower = [*SECONDS[:20], *[0.8] * 10, 0.4, *[0.8] * 9]
    gain = gain_in(write_run(tmp_path, "mig", slower, straggler()))
    assert isinstance(gain, Gain) and gain.ratio == pytest.approx(0.5)


def test_steps_while_units_are_away_are_balanced_and_none_of_them_is_at_full_work(tmp_path: Path) -> None:
    """Ten steps before, twenty with units away of which two are made to be measured, ten at home again."""
    away = {2: 2, 3: 0}
    slow = [
        record(1, update, 0.0, busy_s=0.4, owned=0.4 if update in away else 1.0, calibration_steps=away.get(update, 0))
        for update in range(1, 6)
    ]
    seconds = [0.4] * 20 + [0.3] * 2 + [0.2] * 18 + [0.4] * 10
    gain = gain_of(RunFolder.read(write_run(tmp_path, "exact", seconds, slow)))
    assert isinstance(gain, Gain)
    assert [one.begin for one in gain.balanced] == list(range(22, 40))
    assert [one.begin for one in gain.unbalanced] == [*range(5, 20), *range(40, 50)]
    assert gain.ratio == pytest.approx(2.0)

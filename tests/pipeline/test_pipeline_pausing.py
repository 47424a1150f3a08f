"""One rank's call, or its file, keeps layers where they are on all stages, until it is taken back."""

import pytest
from helpers.on_ranks import gathered, on_ranks
from helpers.pausing import Wishes
from helpers.processes import caught_log_lines
from helpers.sleeping_layers import Training, undivided_losses

pytestmark = pytest.mark.same_ranks

HOME = (0, 4, 8)


@pytest.mark.slow
@on_ranks(2, cases=[(False,), (True,)])
def test_off_measures_nothing_and_moves_nothing_and_on_follows_the_work_again(rank, group, by_file, *, tmp_path):
    wishes = Wishes(rank, tmp_path, by_file=by_file)
    with wishes.read():
        training = Training(group, 8)
    wishes.say(training.balancer, "off")
    training.train(10)  # profiles that were on their way come
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    num_profiles = len(training.profiles)
    assert training.train(20) == HOME and len(training.profiles) == num_profiles and not training.records
    assert training.balancer.restraint.state == "off"
    wishes.say(training.balancer, "on")
    with caught_log_lines() as lines:
        moved = training.train(20)
    by_rank = gathered(group, (moved, [record.step for record in training.records], training.losses, lines))
    (moved, steps, *_), (*others, losses, _) = by_rank
    assert [moved, steps] == others and moved[1] > 4 and steps[0] > 30
    assert losses == pytest.approx(undivided_losses(8, 50), rel=1e-10, abs=0.0)
    goes_on = [line for line in by_rank[0][-1] if line.startswith("balancing goes on since step ")]
    assert len(goes_on) == 1 and goes_on[0].endswith(", as every rank says") and not by_rank[1][-1]


@on_ranks(2, cases=[(False,), (True,)])
def test_advice_records_moves_that_are_not_made_until_it_is_over(rank, group, by_file, *, tmp_path):
    wishes = Wishes(rank, tmp_path, by_file=by_file)
    with wishes.read():
        training = Training(group, 8)
    wishes.say(training.balancer, "advice")
    training.train(10)
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    with caught_log_lines() as lines:
        assert training.train(20) == HOME
    assert training.records and not any(record.is_made for record in training.records)
    assert {record.before for record in training.records} == {HOME} != {record.after for record in training.records}
    assert len(training.profiles) > 4
    assert any("layers stay where they are: by advice only layer" in line for line in lines) == (rank == 0)
    wishes.say(training.balancer, "on")
    assert training.train(12)[1] > 4, "at once, by what was learned"
    assert training.records[-1].is_made


@on_ranks(2)
def test_the_same_advice_is_recorded_and_logged_once_and_another_anew(rank, group, *, tmp_path):
    training = Training(group, 8)
    Wishes(rank, tmp_path, by_file=False).say(training.balancer, "advice")
    num_profiles = []
    with caught_log_lines() as lines:
        for pace in (3.0, 7.0):
            training.pace.of_rank = pace if rank == 1 else 1.0
            assert training.train(40) == HOME
            num_profiles.append(len(training.profiles))
    advised = [record.after for record in training.records]
    assert num_profiles[0] > 6 and len(advised) == len(set(advised)) == 2
    assert len([line for line in lines if "by advice only" in line]) == (0 if rank else 2)


@on_ranks(2)
def test_a_move_that_is_decided_and_not_begun_is_dropped_at_once(rank, group, *, tmp_path):
    wishes = Wishes(rank, tmp_path, by_file=False)
    training = Training(group, 8, profile_every=1)
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    while training.balancer._wanted is None:
        training.train(1)
    wishes.say(training.balancer, "off")
    assert training.train(6) == HOME and training.balancer.restraint.state == "off" and not training.records
    wishes.say(training.balancer, "on")
    assert training.train(12)[1] > 4

"""Single interruptions are no slowness, by one rule for all wings."""

from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.strategy.stragglers.rank_speeds import RankSpeeds
from zeroresize.utils.usual import usual_of


@given(st.floats(0.1, 10.0), st.floats(1.0, 100.0), st.permutations([0, 1, 2]), st.sampled_from([2, 3]))
def test_one_interruption_among_two_or_three_does_not_count(usual_s, longer, order, number):
    values = [usual_s] * (number - 1) + [longer * usual_s]
    assert usual_of([values[place] for place in order if place < number]) == usual_s


def test_of_more_it_is_the_median():
    assert usual_of([4.0, 1.0, 2.0]) == 2.0 and usual_of([8.0, 1.0, 2.0, 4.0]) == 3.0 and usual_of([5.0]) == 5.0


@given(st.integers(0, 2), st.floats(1.2, 100.0))
def test_steps_of_a_rank_are_filtered_so(interrupted, longer):
    ranks = RankSpeeds(2)
    for step in range(3):
        ranks.learn([longer if step == interrupted else 1.0, 1.0], [1.0, 1.0], [0.0, 0.0])
    assert ranks.speeds() == (1.0, 1.0)

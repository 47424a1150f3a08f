"""Which strategies are offered while ranks are slow, and when one is put in force: by a formula, without time."""

from dataclasses import replace

import numpy as np
from helpers.states import resumed
from helpers.strategies import FormulaCosts
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.layout import unit_bounds
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import FIRST_PAUSE, Reason
from zeroresize.policy.strategy.stragglers.candidates import (
    ModelDivision,
    arrangements,
    candidates,
    smaller_degrees,
)
from zeroresize.policy.strategy.stragglers.decision import StragglerDecision

MODEL = ModelDivision((1.0,) * 8, (8, 32))
EVEN = (1.0,) * 4
ORIGINAL = (Strategy(2, 2, 1),)


def one_slow(chi, rank=1, num_ranks=4):
    return tuple(1.0 / chi if one == rank else 1.0 for one in range(num_ranks))


def offered(original, speeds, costs=None, model=MODEL):
    candidates_of_kinds = candidates(original, original, speeds, model, costs or FormulaCosts([1.0] * len(original)))
    return {one.kind: one for one in candidates_of_kinds}


def decision(original=ORIGINAL, *, switch_s=10.0, costs=None, **options):
    """A switch takes ``switch_s``."""
    range_costs = costs or FormulaCosts([1.0] * len(original))
    return StragglerDecision(original, MODEL, range_costs, cost=MoveCost(switch_s, 0.0), **options)


def run(decider, speeds_of_steps):
    """Carries out whatever is decided: seconds of all steps and switches, and the steps after which it switched."""
    total_s, switched = 0.0, []
    for step, speeds in enumerate(speeds_of_steps):
        total_s += decider._costs.step_s(decider.in_force, speeds)
        proposal = decider.update(speeds)
        if proposal is not None:
            total_s += proposal.switch_s
            decider.made(proposal, speeds)
            switched.append(step)
    return total_s, switched


def test_what_fewer_ranks_do_stays_like_what_all_did():
    model = ModelDivision((1.0,) * 64, (64,), degrees=(1, 2, 4, 8, 16))
    assert set(smaller_degrees((2, 8, 2), 31, model)) == {(1, 8, 2), (3, 8, 1), (3, 4, 2), (7, 4, 1)}
    assert set(smaller_degrees((1, 4, 1), 3, model)) == {(1, 3, 1), (1, 2, 1)}


def test_a_slow_rank_is_left_out_and_three_divide_what_four_did():
    costs = FormulaCosts([1.0], least_split=3)
    candidate = offered([Strategy(1, 4, 1)], one_slow(8.0), costs)["leave out"]
    (strategy,) = candidate.strategies
    assert candidate.left_out == (1,) and strategy.degrees == (1, 3, 1) and strategy.ranks == (0, 2, 3)
    assert "leave out" not in offered([Strategy(1, 4, 1)], one_slow(8.0), FormulaCosts([1.0], least_split=4))  # memory
    assert sorted(np.diff(unit_bounds(8, strategy.shares))) == [2, 3, 3]
    assert sorted(np.diff(unit_bounds(32, strategy.shares))) == [10, 11, 11]


def test_memory_is_asked_of_the_optimizer_strategy_that_a_candidate_has_and_of_its_switches():
    class Tight(FormulaCosts):
        def fits(self, number, strategy, optimizer_strategy):
            return number == self.optimizer_strategy or optimizer_strategy.degrees == (1, 2, 1)

        def switches_fit(self, strategies):
            return self.switches_suffice

    original, costs = [Strategy(2, 2), Strategy(1, 4)], Tight([0.2, 1.0])
    costs.switches_suffice = True
    (optimizer_strategy, other) = offered(original, one_slow(8.0), costs)["leave out"].strategies
    assert optimizer_strategy.degrees == (1, 2, 1) and other.tp in (
        2,
        3,
    )  # (3, 1, 1) would be the faster strategy for the optimizer
    costs.switches_suffice = False
    assert set(offered(original, one_slow(8.0), costs)) == {"stay"}


def test_slow_ranks_of_different_groups_become_the_same_shard():
    speeds = (0.5, 1.0, 1.0, 0.5)  # shard 0 of one group, shard 1 of the other
    by_kind = offered([Strategy(2, 2, 1)], speeds)
    costs = FormulaCosts([1.0])
    (strategy,) = by_kind["rearrange"].strategies
    assert {speeds[rank] for rank, *_ in strategy.tp_groups()} in ({1.0}, {0.5})
    assert costs.range_s(0, strategy, speeds) < 0.8 * costs.range_s(0, Strategy(2, 2, 1), speeds)


def test_slow_ranks_become_one_stage_with_fewer_layers():
    speeds = (0.5, 1.0, 0.5, 1.0)
    strategies = arrangements((2, 1, 2), range(4), speeds, MODEL)
    best = min(strategies, key=lambda one: FormulaCosts([1.0]).range_s(0, one, speeds))
    slow_stage = {best.position_of(0).stage, best.position_of(2).stage}
    assert len(slow_stage) == 1
    layers = np.diff(best.partition(8).boundaries)
    assert layers[slow_stage.pop()] == min(layers) < max(layers)


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), st.sampled_from([(1, 4, 1), (2, 2, 1), (1, 2, 2)]))
@settings(max_examples=40)
def test_every_candidate_fits_the_model_and_every_shard_has_a_unit(speeds, degrees):
    original = [Strategy(*degrees), Strategy(1, 4, 1)]
    costs = FormulaCosts([1.0, 2.0])
    for candidate in candidates(original, original, speeds, MODEL, costs):
        for strategy in candidate.strategies:
            assert not set(strategy.ranks) & set(candidate.left_out) and max(strategy.ranks) < 4
            strategy.partition(8)
            for units in MODEL.unit_counts:
                assert min(np.diff(unit_bounds(units, strategy.shares or (1.0,) * strategy.tp))) >= 1


def test_units_move_inside_the_group_where_that_suffices_and_the_rank_is_left_out_where_not():
    mildly, badly = decision(switch_s=0.0), decision(switch_s=0.0)
    assert mildly.update(one_slow(1.5)).candidate.kind == "shares"
    assert badly.update(one_slow(8.0)).candidate.kind == "leave out"
    # 1.53 / 4 with shares, 1.33 / 4 without the rank: a matter of what suffices.
    assert decision(switch_s=0.0, tolerance=0.2).update(one_slow(2.0)).candidate.kind == "shares"


def test_it_switches_when_slowness_has_cost_as_much_as_the_switch_there_and_back_and_goes_back_alike():
    decider = decision(switch_s=1.0)
    slow, proposal = one_slow(8.0), None
    saving_s = next(one.saving_s for one in decider.what_if(slow) if one.candidate.kind == "leave out")
    _, switched = run(decider, [slow] * 20)
    assert switched == [int(np.ceil(2.0 / saving_s)) - 1]
    assert 1 not in decider.in_force[0].ranks
    proposal = {one.candidate.kind: one for one in decider.what_if(EVEN)}["original"]
    _, switched = run(decider, [EVEN] * 60)
    assert switched == [int(np.ceil(2.0 / proposal.saving_s - 1e-9)) - 1]
    assert decider.in_force == decider.original


def test_what_if_tells_what_each_candidate_would_bring_and_changes_nothing():
    decider = decision(switch_s=3.0)
    stay, *others = decider.what_if(one_slow(4.0))
    assert stay.candidate.kind == "stay" and stay.saving_s == stay.switch_s == 0.0
    assert [one.step_s for one in others] == sorted(one.step_s for one in others)
    assert all(one.switch_s == 3.0 and one.saving_s == stay.step_s - one.step_s for one in others)
    assert decider.state.rental.owed_s == {}


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.floats(1.5, 20.0), st.floats(0.05, 5.0))
@settings(max_examples=50)
def test_whatever_happens_it_takes_at_most_three_times_what_the_best_would_who_knew_it(is_slow, chi, switch_s):
    """And one step more for each switch, as it decides after the step.

    That is the best possible for two strategies. (4, 1, 1) has two: as it is, and leaving out.
    """
    original = (Strategy(4, 1, 1),)
    costs, slow = FormulaCosts([1.0], least_split=1), one_slow(chi)
    decider = decision(original, switch_s=switch_s, costs=costs, tolerance=0.0, min_saving=0.0)
    options = [one.candidate.strategies for one in decider.what_if(slow)]
    assert len(options) == 2
    steps = [slow if one else EVEN for one in is_slow]
    total_s, _ = run(decider, steps)
    least_s = [0.0, switch_s]
    for speeds in steps:
        least_s = [
            min(least_s[option], least_s[1 - option] + switch_s) + costs.step_s(options[option], speeds)
            for option in (0, 1)
        ]
    late_s = max(np.ptp([costs.step_s(one, speeds) for one in options]) for speeds in (slow, EVEN))  # a step's, at most
    factor = 3.0 + late_s / switch_s
    assert total_s <= factor * (min(least_s) + switch_s) + 2.0 * late_s


def test_after_a_switch_that_could_not_be_made_nothing_is_tried_for_a_while():
    decider, slow = decision(switch_s=0.0), one_slow(8.0)
    assert decider.update(slow) is not None
    decider.refuse()
    assert decider.update(slow) is None and decider.verdict.reason is Reason.PAUSED
    waited = 1 + next(step for step in range(100) if decider.update(slow) is not None)
    assert waited == FIRST_PAUSE - 1 and decider.verdict.reason is Reason.DUE
    decider.refuse()
    assert next(step for step in range(100) if decider.update(slow) is not None) == 2 * FIRST_PAUSE - 1
    assert decider.in_force == decider.original


def test_its_state_goes_on_where_it_was_saved():
    steps = [*[one_slow(8.0)] * 7, *[one_slow(2.0, 2)] * 40, *[EVEN] * 60]
    whole, first = decision(switch_s=2.0), decision(switch_s=2.0)
    run(first, steps[:30])
    second = decision(switch_s=99.0)
    second.state = replace(second.state, in_force=first.in_force)
    second.go_on_from(resumed(first.state))
    run(second, steps[30:])
    _, switched = run(whole, steps)
    assert len(switched) >= 2 and second.state == whole.state

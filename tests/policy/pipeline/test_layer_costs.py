"""Heavy layers and slow devices are told apart."""

import pytest
from helpers.pipelines import World

from zeroresize.policy.pipeline.layer_costs import LayerCosts


def after(world, *changes):
    """What is known after a profile of the world and one more after each change."""
    costs = LayerCosts.first(world.profile())
    for change in changes:
        for name, value in change.items():
            setattr(world, name, value)
        costs = costs.after(world.profile())
    return costs


def test_at_first_layers_cost_what_they_took():
    costs = after(World([1.0, 2.0, 3.0, 4.0], [1.0, 0.5], (0, 2, 4)))
    assert costs.seconds.tolist() == pytest.approx([1.0, 2.0, 6.0, 8.0])
    assert costs.speeds == (1.0, 1.0)


def test_a_change_of_all_layers_of_a_stage_is_its_devices():
    work = [1.0, 2.0, 2.5, 3.0, 4.0, 1.5]
    costs = after(World(work, [1.0, 1.0], (0, 3, 6)), {"speeds": [1.0, 0.25]})
    assert costs.speeds[0] / costs.speeds[1] == pytest.approx(4.0)
    assert (costs.seconds / costs.seconds[0]).tolist() == pytest.approx(work)


def test_two_layers_that_change_alike_say_nothing_of_their_device():
    costs = after(World([1.0] * 5, [1.0, 1.0], (0, 3, 5)), {"work": [1.0, 1.0, 1.0, 2.0, 2.0]})
    assert costs.speeds == (1.0, 1.0)
    assert costs.seconds.tolist() == pytest.approx([1.0, 1.0, 1.0, 2.0, 2.0])


def test_a_layer_that_is_alone_tells_that_its_device_is_slow_where_nothing_else_has_changed():
    world = World([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0], (0, 2, 4, 6))
    slow = {"speeds": [0.25, 1.0, 1.0]}
    costs = after(world, slow)
    assert costs.speeds[1] / costs.speeds[0] == pytest.approx(4.0)
    assert costs.seconds[1] == pytest.approx(costs.seconds[2])
    world = World([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0], (0, 2, 4, 6))
    assert after(world, slow | {"work": [0.0, 1.0, 1.0, 1.0, 2.0, 2.0]}).speeds == (1.0, 1.0, 1.0)
    world = World([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0], (0, 2, 4, 6))
    assert after(world, {"work": [0.0, 1.2, 1.0, 1.0, 1.0, 1.0]}).speeds == (1.0, 1.0, 1.0)


def test_a_slow_device_that_kept_two_layers_is_seen_to_recover():
    world = World([1.0] * 7, [1.0, 1.0], (0, 3, 7))
    slow, fewer = {"speeds": [1.0, 0.25]}, {"boundaries": (0, 5, 7)}
    slowed = after(world, slow, fewer)
    assert slowed.speeds[0] / slowed.speeds[1] == pytest.approx(4.0)
    world = World([1.0] * 7, [1.0, 1.0], (0, 3, 7))
    costs = after(world, slow, fewer, {"speeds": [1.0, 1.0]})
    assert costs.speeds == pytest.approx((1.0, 1.0))
    assert costs.seconds.tolist() == pytest.approx([1.0] * 7)


def test_a_change_of_some_layers_is_theirs():
    costs = after(World([1.0] * 6, [1.0, 1.0], (0, 3, 6)), {"work": [1.0, 1.0, 1.0, 1.0, 5.0, 5.0]})
    assert costs.speeds == (1.0, 1.0)
    assert costs.seconds.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 5.0, 5.0])


def test_work_that_grows_everywhere_is_no_slow_device():
    costs = after(World([1.0, 2.0, 3.0, 4.0], [1.0, 1.0], (0, 2, 4)), {"work": [3.0, 6.0, 9.0, 12.0]})
    assert costs.speeds == pytest.approx((1.0, 1.0))
    assert costs.seconds.tolist() == pytest.approx([3.0, 6.0, 9.0, 12.0])


def test_work_that_changes_differently_in_most_stages_is_no_change_of_devices():
    world = World([1.0] * 12, [1.0, 1.0, 0.5, 1.0], (0, 3, 6, 9, 12))
    pruned = [*[0.3] * 3, *[0.4] * 3, *[0.35] * 3, *[1.0] * 3]
    costs = after(world, {"work": pruned})
    assert costs.speeds == pytest.approx((1.0,) * 4)
    costs = after(world, {"work": pruned}, {"work": pruned, "speeds": [1.0, 1.0, 0.5, 0.5]})
    assert costs.speeds[3] == pytest.approx(0.5 * costs.speeds[2])


def test_work_that_is_known_to_have_changed_is_no_change_of_devices():
    world = World([1.0] * 6, [1.0, 1.0], (0, 3, 6))
    costs = LayerCosts.first(world.profile())
    world.work = [0.3, 0.3, 0.3, 1.0, 1.0, 1.0]
    known = costs.after(world.profile(), is_other_work=True)
    assert known.speeds == (1.0, 1.0) and known.seconds.tolist() == pytest.approx(world.work)
    assert costs.after(world.profile()).speeds[0] > 1.0
    world.boundaries = (0, 2, 6)
    assert costs.after(world.profile(), is_other_work=True).speeds == (1.0, 1.0)


def test_a_layer_that_moved_tells_which_device_is_faster():
    costs = after(World([1.0] * 6, [1.0, 0.5, 1.0], (0, 2, 4, 6)), {"boundaries": (0, 3, 4, 6)})
    assert costs.speeds[0] / costs.speeds[1] == pytest.approx(2.0)
    assert costs.seconds[2:4].tolist() == pytest.approx(costs.seconds[[0, 1]].tolist())


def test_a_wrong_guess_is_found_out_by_a_move():
    """All layers of the last stage have become heavier, which looks like a slow device."""
    world = World([1.0] * 6, [1.0, 1.0], (0, 3, 6))
    heavier = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    assert after(world, {"work": heavier}).speeds[1] < 0.5
    world = World([1.0] * 6, [1.0, 1.0], (0, 3, 6))
    costs = after(world, {"work": heavier}, {"boundaries": (0, 4, 6)})
    assert costs.speeds == pytest.approx((1.0, 1.0))
    assert costs.seconds.tolist() == pytest.approx(heavier)


def test_layers_that_take_nothing_say_nothing():
    costs = after(World([1.0, 0.0, 0.0, 0.0], [1.0, 1.0], (0, 2, 4)), {"work": [1.0, 1e-6, 1e-6, 0.0]})
    assert costs.speeds == (1.0, 1.0)
    assert costs.seconds.tolist() == pytest.approx([1.0, 1e-6, 1e-6, 0.0])


def test_stages_that_stay_are_as_fast_as_they_were():
    costs = LayerCosts((1.0, 2.0, 3.0), (2.0, 4.0, 6.0), (0.6, 1.8, 0.6), (0, 1, 2, 3))
    left = costs.on_stages((1, 2), (0, 2, 3))
    assert sum(left.speeds) == pytest.approx(2.0) and left.boundaries == (0, 2, 3)
    for before, after in ((1, 0), (2, 1)):
        assert left.seconds / left.speeds[after] == pytest.approx(costs.seconds / costs.speeds[before])
    assert left.forward_s == pytest.approx([one / 3 for one in (left.seconds)])

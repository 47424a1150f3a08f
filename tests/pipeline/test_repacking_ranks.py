"""A pipeline goes on with fewer stages as if nothing had happened, and the released ranks hold nothing any more."""

import weakref

import pytest
import torch
from helpers import pipelines
from helpers.on_ranks import gathered, on_ranks
from helpers.pipelines import (
    BOUNDARIES,
    MAX_NORM,
    OPTIMIZERS,
    assert_same,
    held,
    undivided,
)

from zeroresize.pipeline import LayerProfiler, clip_grad_norm_, move_layers, repack

pytestmark = pytest.mark.same_ranks


class Training(pipelines.Training):
    """One whose pipeline is packed onto fewer stages."""

    def repack(self, num_stages, **options):
        return repack(self.pipeline, self.optimizer, num_stages=num_stages, **options)

    def held_bytes(self):
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        tensors = [*self.pipeline.parameters(), *self.pipeline.module.buffers(), *states]
        tensors += [one.grad for one in self.pipeline.parameters() if one.grad is not None]
        return sum(one.untyped_storage().nbytes() for one in tensors)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (4, (2,), "AdamW"),
        (4, (1,), "SGD"),
        (4, (3,), "AdamW, foreach, amsgrad"),
        (3, (2,), "AdamW"),
        (4, (3, 2, 1), "AdamW"),
    ],
)
def test_training_goes_on_as_if_nothing_had_happened(run_ranks, before, after, name):
    def check(rank, group):
        training = Training(group, BOUNDARIES[before][1], name)
        training.train(2)
        for num_stages in after:
            whole = held(training.pipeline, training.optimizer)
            report = training.repack(num_stages, max_bytes=3000)
            assert report.remaining == tuple(range(num_stages)) and report.is_released == (rank >= num_stages)
            assert report.boundaries == training.pipeline.boundaries and len(report.boundaries) == num_stages + 1
            if report.is_released:
                assert training.held_bytes() == 0 and not training.optimizer.state
                return report, whole, None, training.losses
            assert training.pipeline.num_stages == num_stages and training.pipeline.stage == rank
            training.train(2)
        return report, whole, held(training.pipeline, training.optimizer), training.losses

    by_rank = run_ranks(check, before)
    num_steps = 2 + 2 * len(after)
    losses, state = undivided(OPTIMIZERS[name], num_steps, MAX_NORM)
    # The last stage tells losses: first of all stages, at last of those that stay.
    losses_of_last = by_rank[before - 1][-1] + [
        loss for of_rank in reversed(by_rank[: before - 1]) for loss in of_rank[-1]
    ]
    assert losses_of_last == pytest.approx(losses, rel=1e-10, abs=0.0)
    tensors = {
        key: tensor
        for *_, after_all, _ in by_rank
        for key, tensor in (after_all or {}).items()
        if "gradient" not in key
    }
    assert tensors.keys() == state.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(torch.as_tensor(tensor), state[key], rtol=1e-9, atol=1e-12)
    reports = [report for report, *_ in by_rank if report.stages == by_rank[0][0].stages]
    assert len({(one.moved_bytes, one.most_bytes, one.seconds, one.released) for one in reports}) == 1


@on_ranks(3)
def test_layers_arrive_bit_for_bit_between_two_batches_of_a_step(rank, group):
    training = Training(group)
    training.train(1)
    words, target = pipelines.batch(2)
    training.pipeline.step(words, target=target)
    before = held(training.pipeline, training.optimizer)
    training.repack(2)
    by_rank = gathered(group, (before, held(training.pipeline, training.optimizer), training.pipeline.boundaries))
    whole = {key: one for before, *_ in by_rank for key, one in before.items()}
    arrived = {key: one for _, after, _ in by_rank for key, one in after.items()}
    assert any("gradient" in key for key in whole)
    assert_same(dict(sorted(arrived.items())), dict(sorted(whole.items())))
    assert by_rank[2][1] == {} and by_rank[2][2] == by_rank[0][2]


@on_ranks(2)
def test_a_released_rank_holds_no_tensors_when_the_outside_is_told(rank, group):
    """What it has sent is free already: parameters, gradients and optimizer state."""

    training = Training(group)
    training.train(1)
    words, target = pipelines.batch(2)
    training.pipeline.step(words, target=target)
    stage_layers = [training.pipeline.layers[number] for number in training.pipeline.present]
    parameters = [one for layer in stage_layers for one in layer.parameters()]
    tensors = [*parameters, *(one.grad for one in parameters if one.grad is not None)]
    tensors += [state for one in parameters for state in training.optimizer.state[one].values()]
    storages = [weakref.ref(one.untyped_storage()) for one in tensors]
    assert len(storages) >= 3 * len(parameters) and all(one() is not None for one in storages)
    del tensors
    left = []
    training.repack(1, on_release=[lambda release: left.append(sum(one() is not None for one in storages))])
    assert gathered(group, left) == [[], [0]]


@on_ranks(2)
def test_a_released_rank_that_goes_on_is_told_what_to_do(rank, group):
    training = Training(group)
    training.train(1)
    assert not training.pipeline.is_released
    training.repack(1)
    if rank == 0:
        training.train(1)
        return
    words, target = pipelines.batch(5)
    assert training.pipeline.is_released and training.pipeline.stage == -1
    training.optimizer.step()
    for call in (
        lambda: training.pipeline.step(words, target=target),
        lambda: training.pipeline.evaluate(words),
        lambda: clip_grad_norm_(training.pipeline, 1.0),
        lambda: move_layers(training.pipeline, (0, 7), optimizer=None),
        lambda: training.repack(1),
    ):
        with pytest.raises(RuntimeError, match=r"this rank was released .* end the process"):
            call()
    assert training.pipeline.state_dict() == {}


@on_ranks(4)
def test_as_few_stages_as_memory_allows(rank, group):
    """Layers whose parameters have become fewer need fewer stages."""

    training = Training(group)
    training.train(1)
    with LayerProfiler(training.pipeline, training.optimizer) as profiler:
        training.train(1)
    profile = profiler.gather()

    def layer_bytes(num_kept):
        return [each.bytes_at_rest + num_kept * each.activation_bytes for each in profile.layers]

    limit = 0.55 * sum(layer_bytes(4))
    assert max(layer_bytes(4)) < 0.5 * limit
    options = {"memory_limits": [limit] * 4, "profile": profile}
    with pytest.raises(ValueError, match=r"no 1 of 4 stages with stage 0 among them can hold"):
        training.repack(1, **options)
    with pytest.raises(ValueError, match="no 4 of 4 stages"):
        training.repack(None, **options | {"memory_limits": [10.0] * 4})
    with pytest.raises(ValueError, match="not possible without profile="):
        training.repack(2, memory_limits=[limit] * 4)
    fewest = Training(group)
    fewest.train(2)
    report = fewest.repack(None, memory_limits=[0.75 * sum(layer_bytes(2))] * 4, profile=profile)
    if not report.is_released:
        fewest.train(1)
    assert training.repack(3).released == (3,)
    with pytest.raises((ValueError, RuntimeError), match=r"the profile is of boundaries|was released"):
        training.repack(None, **options)
    assert (training.pipeline.num_stages, report.remaining) == (3, (0, 1))

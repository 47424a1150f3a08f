"""Changes of the layers' work that not all ranks announce alike are named as such."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.pipelines import batch, pipeline_of

from zeroresize.comm.words import Call, Whereabouts, require_same_whereabouts
from zeroresize.pipeline import PipelineBalancer


def training(group, profile_every=4):
    """The balancer of a small pipeline, and what trains it for some steps."""
    pipeline = pipeline_of(group)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    balancer = PipelineBalancer(pipeline, optimizer, profile_every=profile_every, max_measuring=math.inf)

    def train(num_steps):
        for _ in range(num_steps):
            inputs, target = batch(balancer.steps)
            optimizer.zero_grad()
            with balancer.step():
                pipeline.step(inputs, target=target)
            optimizer.step()

    return balancer, train


@pytest.mark.parametrize(
    ("caller", "counts"), [(0, "rank 0: 1 times; rank 1: 0 times"), (1, "rank 0: 0 times; rank 1: 1 times")]
)
def test_a_change_that_a_single_rank_announces_is_named(run_ranks, caller, counts):
    def check(rank, group):
        balancer, train = training(group)
        train(1)
        if rank == caller:
            balancer.profile_next()
        with pytest.raises(RuntimeError) as caught:
            train(12)
        return str(caught.value)

    wanted = f"profile_next() or load_state_dict() was called on some ranks only, or unequally often: {counts};"
    assert all(wanted in text for text in run_ranks(check, 2))


def test_a_rank_that_waits_in_vain_for_figures_says_what_it_has_announced(run_ranks):
    """Nothing is due on the other rank, which waits for this one's messages in the next step."""

    def check(rank, group):
        balancer, train = training(dist.new_group([0, 1], timeout=timedelta(seconds=4)), profile_every=40)
        train(6)
        if rank == 0:
            balancer.profile_next()
        with pytest.raises(RuntimeError) as caught:
            train(12)
        return str(caught.value)

    text = run_ranks(check, 2)[0]
    assert "made other calls (profile_next() or load_state_dict() was called 1 times here)" in text


def test_changes_are_compared_before_steps():
    before, after = (Whereabouts(Call.STEP, 3 + number, num_work_changes=number) for number in (0, 1))
    assert Whereabouts.of_numbers(after.as_numbers()) == after and len(after.as_numbers()) == Whereabouts.NUM_NUMBERS
    require_same_whereabouts([after, after])
    with pytest.raises(RuntimeError, match="profile_next"):
        require_same_whereabouts([before, after])
    with pytest.raises(RuntimeError, match=r"step\(\) equally often"):
        require_same_whereabouts([after, Whereabouts(Call.STEP, 5, num_work_changes=1)])

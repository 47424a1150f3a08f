"""Calls that some ranks make and others do not, or not as often, end in an error on every rank that names them."""

import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from helpers.virtual_training import FEATURES, Run

pytestmark = pytest.mark.slow

LIMIT_S = 2


def impatient_run(rank, mode, num_ranks=2, **config):
    """Rank 1 is slow; in the modes that migrate it lends."""
    limit = datetime.timedelta(seconds=LIMIT_S)
    group = dist.new_group(list(range(num_ranks)), timeout=limit)
    config = {"update_every": 5, **({"budget": 0.0} if mode == "semi" else {}), **config}
    return Run(group, chi={1: 4.0}, mode=mode, **config)


def error_of(train):
    """What ``train()`` raises, and its type."""
    try:
        train()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def step_without_balancer(run, number):
    for _ in range(number):
        run.model(run.x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# ---- balancer.step() ------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("mode", "forgetting", "num_steps"), [("off", 0, 0), ("zero-pri", 1, 23), ("mig", 1, 23), ("semi", 0, 0)]
)
def test_a_step_that_one_rank_does_not_call_is_named_on_every_rank(run_ranks, mode, forgetting, num_steps):
    def train(rank, group):
        run = impatient_run(rank, mode)
        run.steps(num_steps)
        return error_of(lambda: step_without_balancer(run, 30) if rank == forgetting else run.steps(30))

    messages = [text for _, text in run_ranks(train, 2, timeout_s=25)]
    for text in messages:
        assert re.search(rf"rank {1 - forgetting}: [^;]*balancer.step\(\)", text), text
        assert f"rank {forgetting}: training, after {num_steps} calls of balancer.step()" in text
    assert re.search(rf"ranks \[{forgetting}\] .*balancer.step\(\)", messages[1 - forgetting]), messages[1 - forgetting]


# ---- balancer.epoch_end() -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "alone"), [("zero-pri", 1), ("mig", 0)])
def test_an_epoch_that_ends_on_one_rank_only_is_named_on_every_rank(run_ranks, mode, alone):
    def train(rank, group):
        run = impatient_run(rank, mode)
        run.steps(23)

        def go_on():
            if rank == alone:
                run.balancer.epoch_end()
            run.steps(13)

        return error_of(go_on)

    for rank, (kind, text) in enumerate(run_ranks(train, 2, timeout_s=25)):
        assert kind == "RuntimeError"
        assert "balancer.epoch_end()" in text and "rank 0: " in text and "rank 1: " in text, text
        if mode == "mig":
            assert f"rank {alone}: balancer.epoch_end(), after 23 calls of balancer.step()" in text
            assert rank != alone or f"ranks [{1 - alone}] of the group did not come to balancer.epoch_end()" in text
        else:
            assert "did not call balancer.epoch_end() equally often" in text


# ---- batches --------------------------------------------------------------------------------------------------------


def forward(run, num_tokens):
    run.model(torch.ones(num_tokens, FEATURES)).sum().backward()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("mode", "changing", "num_tokens", "trains"),
    [("zero-pri", 1, 4, True), ("mig", 1, 400, False), ("mig", 0, 4, True), ("off", 0, 400, True)],
)
def test_a_batch_that_changes_on_one_rank_only_is_an_error_on_every_rank(run_ranks, mode, trains, changing, num_tokens):
    def train(rank, group):
        run = impatient_run(rank, mode)
        run.steps(23)
        run.model.train(trains)
        run.model(run.x)
        began = time.monotonic()
        return *error_of(lambda: forward(run, num_tokens if rank == changing else len(run.x))), time.monotonic() - began

    outcomes = run_ranks(train, 2, timeout_s=25)
    waits_for_one = mode == "mig" and trains  # what is lent is awaited from rank to rank
    assert outcomes[changing][2] < LIMIT_S - 0.2
    assert waits_for_one or outcomes[1 - changing][2] < LIMIT_S - 0.2
    for kind, text, _ in outcomes:
        assert kind == "ValueError"
        for rank, tokens in enumerate((8, num_tokens) if changing else (num_tokens, 8)):
            assert f"rank {rank}: {tokens} tokens in layer " in text

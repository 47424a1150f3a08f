"""Loss scaling: steps whose gradients overflow are skipped, on all ranks of the group or on none."""

import pytest
import torch
from helpers.processes import for_each
from helpers.virtual_training import FEATURES, Run
from torch import nn

import zeroresize as zr

pytestmark = pytest.mark.same_ranks

#: What spoils which step: the loss of all ranks, or a gradient of one of them.
SPOILED = {4: "nan", 6: "inf", 8: "overflow"}
NUM_STEPS = 13
SCALE = {"init_scale": 4.0, "growth_interval": 2}


def spoiled(loss, step):
    how = SPOILED.get(step, "overflow")
    return loss if how == "overflow" else loss * float(how)


def scaled_steps(run, scaler, rank, move=None):
    """(loss, scale, whether a step was made) of each step."""
    steps = []
    for step in range(NUM_STEPS):
        if step == 3 and move is not None:
            run.balancer.move(move)
        run.time.now += 0.01
        loss = run.model(run.x).square().mean()
        scaler.scale(spoiled(loss, step)).backward()
        if SPOILED.get(step) == "overflow" and rank == 1:
            run.model.up.weight.grad.view(-1)[0] = float("inf")
        before = run.model.down.bias.detach().clone()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        steps.append((loss.item(), scaler.get_scale(), not torch.equal(before, run.model.down.bias)))
        run.balancer.step()
    return steps


def undivided():
    """As :func:`scaled_steps`, of one process."""
    torch.manual_seed(0)
    up, down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()])
    scaler = torch.amp.GradScaler("cpu", **SCALE)
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1))
    steps = []
    for step in range(NUM_STEPS):
        loss = (x + down(torch.nn.functional.gelu(up(x)))).square().mean()
        scaler.scale(spoiled(loss, step)).backward()
        if SPOILED.get(step) == "overflow":
            up.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append((loss.item(), scaler.get_scale(), step not in SPOILED))
    return steps


def test_steps_that_overflow_are_skipped_alike(run_ranks):
    cases = [("mig", None), ("semi", None), ("exact", (3, 1)), ("zero-pri", None)]

    @for_each(cases)
    def check(rank, group, mode, move):
        torch.set_default_dtype(torch.float64)
        run = Run(group, mode=mode, update_every=2)
        run.time.chi = 3.0 if rank == 1 else 1.0
        scaler = zr.GradScaler("cpu", process_group=group, **SCALE)
        return scaled_steps(run, scaler, rank, move), run.model.down.bias.detach(), undivided()

    for (mode, _), first, second in zip(cases, *run_ranks(check, 2), strict=True):
        (steps, bias, expected), (others, other_bias, _) = first, second
        assert torch.equal(bias, other_bias) and bias.isfinite().all()
        assert [one[1:] for one in steps] == [one[1:] for one in others] == [one[1:] for one in expected]
        if mode in ("exact", "mig"):
            assert [loss for loss, *_ in steps] == pytest.approx([loss for loss, *_ in expected], rel=1e-10)


def test_a_scaler_that_skips_on_one_rank_only_is_noticed_by_all(run_ranks):
    """A plain one hears of the gradients of its own rank."""

    def check(rank, group):
        run = Run(group, mode="exact", update_every=2)
        with pytest.raises(RuntimeError, match="did not make equally many optimizer steps") as caught:
            scaled_steps(run, torch.amp.GradScaler("cpu", **SCALE), rank)
        return str(caught.value)

    for said in run_ranks(check, 2):
        assert "rank 0: " in said and "use zeroresize.GradScaler" in said

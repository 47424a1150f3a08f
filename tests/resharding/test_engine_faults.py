"""Whatever goes wrong in a move, every rank that lives keeps what it had, and is told why, within the time limit.

All kinds of moves go through all faults: units, layers between two steps and during backward, re-packing, switches of
strategies, and the optimizer's move to another strategy.
"""

import os
import signal
import time

import pytest
import torch
from helpers.moves import KINDS
from helpers.processes import dying, for_each, send_half, told_by_survivors

from zeroresize.comm import words
from zeroresize.resharding import agreement, transaction, transport
from zeroresize.resharding.agreement import NotEnoughMemoryError

pytestmark = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind == "parts of heads" else []) for kind in KINDS]
)
NOTHING = "nothing has moved or changed"


def interrupt(kind, when, end):
    """Let this rank ``end()`` in its next move."""
    real, rounds = transport.start_messages, []

    def start(*arguments):
        rounds.append(1)
        if len(rounds) == 3:
            end()
        return real(*arguments)

    def start_half(sends, receives, group, over=None, tag=0):
        send_half(sends, receives, over or group)
        end()

    if when == "before all":
        end()
    elif when == "before messages":
        transport.start_messages = dying(end)
    elif when == "in a message":
        transport.start_messages = start_half
    elif when == "between rounds":
        transport.start_messages = start
    else:
        assert when == "received"
        transaction.require_received = lambda *_, **__: end()


@pytest.mark.few(6)
@pytest.mark.parametrize("when", ["before all", "before messages", "in a message", "between rounds", "received"])
def test_a_rank_that_dies_is_named_and_the_others_stay_as_they_were(tmp_path, kind, when):
    def check(rank, group):
        moving = KINDS[kind](group)
        if rank != 1:
            return moving.fails(moving.move)
        interrupt(moving, when, lambda *_: os._exit(0))
        moving.move()
        return "did not die"

    texts = told_by_survivors(check, 3, tmp_path)
    assert sorted(texts) == [0, 2], texts
    assert not any(text.startswith("Traceback") for text in texts.values()), texts
    if not KINDS[kind].computes_meanwhile or when in ("before all", "received"):  # else the pipeline's step fails, too
        for text in texts.values():
            assert text.startswith(f"RuntimeError: {NOTHING}") and "ranks [1] of the group" in text, text


@pytest.mark.slow
def test_a_rank_that_is_stopped_between_rounds_is_waited_for_once(tmp_path, kind):
    """The verdict on a move that has failed waits for what is left of the time limit only."""
    stops_and_is_waited_for(tmp_path, kind, "between rounds", limit_s=3.0)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("when", ["before all", "received"])
def test_a_rank_that_is_stopped_is_waited_for_no_longer_than_the_time_limit(tmp_path, kind, when):
    stops_and_is_waited_for(tmp_path, kind, when, limit_s=5.0)


def stops_and_is_waited_for(tmp_path, kind, when, *, limit_s):
    def check(rank, group):
        moving = KINDS[kind](group, limit_s)
        if rank != 1:
            return moving.fails(moving.move, within_s=1.6 * limit_s + words.WAIT_S)
        interrupt(moving, when, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        moving.move()
        return "did not stop"

    texts = told_by_survivors(check, 3, tmp_path, stopped=[1])
    assert sorted(texts) == [0, 2], texts
    assert all(text.startswith("RuntimeError: ") for text in texts.values()), texts


def nowhere(moving, patch):
    text = moving.fails(moving.move_nowhere if moving.rank == 1 else moving.move, (ValueError, RuntimeError))
    others = f"CannotMoveError: {NOTHING}: ranks [1] of the group failed while preparing "
    assert text.startswith("ValueError: ") if moving.rank == 1 else text.startswith(others) and text != others, text


def with_little_memory(moving, patch):
    if moving.rank == 1:
        patch.setattr(agreement, "free_bytes", lambda device: 100)
        patch.setattr(agreement, "_place_of", lambda device: "a small device")


def elsewhere(moving, patch):
    """Also where a rank lacks the memory to go there, which it would not need if they agreed."""
    with_little_memory(moving, patch)
    text = moving.fails(moving.move_elsewhere if moving.rank == 1 else moving.move)
    assert f"{NOTHING}: the ranks of the group differ in {moving.differs_in}" in text and "[[0, 2], [1]]" in text


def other_optimizer_state(moving, patch):
    if not moving.has_optimizer_state:
        return
    if moving.rank == 1:
        with moving.other_optimizer_state() as expected, pytest.raises(RuntimeError) as caught:
            moving.move()
    else:
        with pytest.raises(RuntimeError) as caught:
            moving.move()
        with moving.other_optimizer_state() as expected:
            pass
    assert expected in str(caught.value)
    moving.assert_unchanged()


def too_little_memory(moving, patch):
    with_little_memory(moving, patch)
    text = moving.fails(moving.move, NotEnoughMemoryError)
    assert text.startswith(f"NotEnoughMemoryError: {NOTHING}, as there is not enough memory for "), text
    assert "rank 1 lacks " in text and "rank 0" not in text and "rank 2" not in text


def fails_at_once(moving):
    begin = time.perf_counter()
    text = moving.fails(moving.move)
    assert time.perf_counter() - begin < 0.8 * moving.limit_s, text
    return text


def in_the_middle(error):
    def fail(moving, patch):
        finish, finished = transport.Transport._finish, []

        def failing(self, *arguments):
            finish(self, *arguments)
            finished.append(1)
            if len(finished) == 2:
                raise error

        if moving.rank == 1:
            patch.setattr(transport.Transport, "_finish", failing)
        text = fails_at_once(moving)
        heard = "" if moving.rank == 1 else "ranks [1] of the group have not received everything: "
        assert text.startswith(f"RuntimeError: {NOTHING}: {heard}it cannot be read"), text

    return fail


def raising(error):
    def fail(*_):
        raise error

    return fail


def laying_out_rounds(error):
    def fail(moving, patch):
        if moving.rank == 1:
            for part in (moving.part, *moving.part.__subclasses__()):
                patch.setattr(part, "agree", raising(error))
        fails_at_once(moving)

    return fail


def out_of_memory(run_out, expected):
    def fail(moving, patch):
        if moving.rank == 1:
            patch.setattr(transport.Transport, "allocate", run_out)
        text = moving.fails(moving.move, NotEnoughMemoryError)
        assert "ranks [1] of the group failed while preparing " in text and expected in text, text

    return fail


def out_of_memory_at_last(moving, patch):
    """Once messages and new tensors have theirs."""
    make, run_out = moving.part.make_tensors, lambda part: (make(part), torch.empty(2**50))
    if moving.rank == 1:
        patch.setattr(moving.part, "make_tensors", run_out)
    text = moving.fails(moving.move, NotEnoughMemoryError)
    named = f"NotEnoughMemoryError: {NOTHING}: ranks [1] of the group failed while preparing "
    assert text.startswith(named) and "DefaultCPUAllocator: can't allocate memory" in text, text


ALWAYS = [nowhere, elsewhere, other_optimizer_state, too_little_memory, out_of_memory_at_last]
#: Each kind of move has one of them in every run, and all where tests are exhaustive.
SOMETIMES = [
    in_the_middle(RuntimeError("it cannot be read")),
    out_of_memory(lambda *_: torch.empty(2**50), "DefaultCPUAllocator: can't allocate memory"),
    laying_out_rounds(MemoryError()),
    in_the_middle(ValueError("it cannot be read")),
    out_of_memory(raising(torch.cuda.OutOfMemoryError("CUDA out of memory")), "CUDA out of memory"),
    laying_out_rounds(RuntimeError("no rounds")),
    out_of_memory(raising(MemoryError("no memory left")), "no memory left"),
]


def goes_on_after(faults, kind):
    @for_each([[fault] for fault in faults])
    def check(rank, group, fault):
        moving = KINDS[kind](group)
        with pytest.MonkeyPatch.context() as patch:
            fault(moving, patch)
        moving.goes_on()

    return check


def test_after_any_fault_nothing_has_changed_and_the_ranks_can_move(run_ranks, kind):
    run_ranks(goes_on_after([*ALWAYS, SOMETIMES[list(KINDS).index(kind) % len(SOMETIMES)]], kind), 3)


@pytest.mark.exhaustive
def test_after_every_fault_nothing_has_changed_and_the_ranks_can_move(run_ranks, kind):
    run_ranks(goes_on_after(SOMETIMES, kind), 3)

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
from helpers.processes import dying, send_half, told_by_survivors

from zeroresize.resharding import agreement, transaction, transport
from zeroresize.resharding.agreement import NotEnoughMemoryError
from zeroresize.resharding.transaction import Transaction

pytestmark = pytest.mark.parametrize("kind", KINDS)
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
            return moving.fails(moving.move, within_s=1.6 * limit_s)
        interrupt(moving, when, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        moving.move()
        return "did not stop"

    texts = told_by_survivors(check, 3, tmp_path, stopped=[1])
    assert sorted(texts) == [0, 2], texts
    assert all(text.startswith("RuntimeError: ") for text in texts.values()), texts


def test_a_rank_that_cannot_go_there_tells_the_others(run_ranks, kind):
    def check(rank, group):
        moving = KINDS[kind](group)
        text = moving.fails(moving.move_nowhere if rank == 1 else moving.move, (ValueError, RuntimeError))
        if rank == 1:
            assert text.startswith("ValueError: ")
        else:
            assert text.startswith(f"CannotMoveError: {NOTHING}: ranks [1] of the group failed before"), text
        moving.goes_on()

    run_ranks(check, 3)


def test_ranks_that_differ_in_where_to_move_are_told_who_differs(run_ranks, monkeypatch, kind):
    """Also where one lacks the memory to go there, which it would not need if they agreed."""

    def check(rank, group):
        moving = KINDS[kind](group)
        with monkeypatch.context() as patched:
            if rank == 1:
                patched.setattr(agreement, "free_bytes", lambda device: 100)
                patched.setattr(agreement, "_place_of", lambda device: "a small device")
            text = moving.fails(moving.move_elsewhere if rank == 1 else moving.move)
        assert f"{NOTHING}: the ranks of the group differ in {moving.differs_in}" in text
        assert "[[0, 2], [1]]" in text
        moving.goes_on()

    run_ranks(check, 3)


def test_ranks_that_differ_in_optimizer_state_do_not_move(run_ranks, kind):
    if not KINDS[kind].has_optimizer_state:
        pytest.skip("no optimizer takes part")

    def check(rank, group):
        moving = KINDS[kind](group)
        if rank == 1:
            with moving.other_optimizer_state() as expected, pytest.raises(RuntimeError) as caught:
                moving.move()
        else:
            with pytest.raises(RuntimeError) as caught:
                moving.move()
            with moving.other_optimizer_state() as expected:
                pass
        assert expected in str(caught.value)
        moving.assert_unchanged()
        moving.goes_on()

    run_ranks(check, 3)


@pytest.mark.few(4)
@pytest.mark.parametrize("error", [RuntimeError("it cannot be read"), ValueError("it cannot be read")], ids=repr)
def test_a_rank_that_fails_in_the_middle_tells_the_others_at_once(run_ranks, monkeypatch, kind, error):
    def check(rank, group):
        moving = KINDS[kind](group)
        finish, finished = transport.Transport._finish, []

        def failing(self, *arguments):
            finish(self, *arguments)
            finished.append(1)
            if len(finished) == 2:
                raise error

        with monkeypatch.context() as patched:
            if rank == 1:
                patched.setattr(transport.Transport, "_finish", failing)
            begin = time.perf_counter()
            text = moving.fails(moving.move)
            assert time.perf_counter() - begin < 0.8 * moving.limit_s
        expected = "it cannot be read" if rank == 1 else "ranks [1] of the group have not received everything"
        assert text.startswith(f"RuntimeError: {NOTHING}: {expected}"), text
        moving.goes_on()

    run_ranks(check, 3)


@pytest.mark.few(5)
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no rounds")], ids=repr)
def test_a_rank_that_fails_while_it_lays_out_rounds_tells_the_others_at_once(run_ranks, monkeypatch, kind, error):
    def check(rank, group):
        moving = KINDS[kind](group)

        def failing(self, *arguments):
            raise error

        with monkeypatch.context() as patched:
            if rank == 1:
                for transaction_class in all_transactions():
                    patched.setattr(transaction_class, "agree", failing)
            begin = time.perf_counter()
            text = moving.fails(moving.move)
            assert time.perf_counter() - begin < 0.8 * moving.limit_s, text
        moving.goes_on()

    run_ranks(check, 3)


def all_transactions():
    """The classes of the engine's moves."""
    classes = list(Transaction.__subclasses__())
    for each in classes:
        classes += each.__subclasses__()
    return classes


def test_what_does_not_fit_into_memory_moves_nowhere(run_ranks, monkeypatch, kind):
    def check(rank, group):
        moving = KINDS[kind](group)
        with monkeypatch.context() as patched:
            if rank == 1:
                patched.setattr(agreement, "free_bytes", lambda device: 100)
                patched.setattr(agreement, "_place_of", lambda device: "a small device")
            text = moving.fails(moving.move, NotEnoughMemoryError)
        assert text.startswith(f"NotEnoughMemoryError: {NOTHING}, as there is not enough memory for "), text
        assert "rank 1 lacks 0.0" in text and "rank 0" not in text and "rank 2" not in text
        moving.goes_on()

    run_ranks(check, 3)


@pytest.mark.parametrize(
    ("run_out", "expected"),
    [
        (lambda *_: torch.empty(2**50), "DefaultCPUAllocator: can't allocate memory"),
        (lambda *_: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("CUDA out of memory")), "CUDA out of memory"),
        (lambda *_: (_ for _ in ()).throw(MemoryError("no memory left")), "no memory left"),
    ],
    ids=["of torch on the CPU", "of CUDA", "of Python"],
)
@pytest.mark.few(4)
def test_memory_that_runs_out_all_the_same_is_told_to_all(run_ranks, monkeypatch, kind, run_out, expected):
    def check(rank, group):
        moving = KINDS[kind](group)
        with monkeypatch.context() as patched:
            if rank == 1:
                patched.setattr(moving.part, "allocate", run_out)
                patched.setattr(agreement, "_place_of", lambda device: "a small device")
            text = moving.fails(moving.move, NotEnoughMemoryError)
        assert "rank 1 lacks 0.0" in text and "rank 0" not in text and "rank 2" not in text
        assert (expected in text) == (rank == 1)
        moving.goes_on()

    run_ranks(check, 3)

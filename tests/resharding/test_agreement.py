"""What ranks tell each other before and after a move: by tables of numbers, and over a real group."""

import re
from datetime import timedelta

import pytest
import torch
from helpers.on_ranks import on_ranks

from zeroresize.resharding import agreement
from zeroresize.resharding.agreement import (
    CannotMoveError,
    MeetReplicas,
    NotEnoughMemoryError,
    allocate_together,
    gather_reasons,
    gather_texts,
    meet_over,
    meet_prepared,
    require_received,
    require_same,
    text_numbers,
    text_of,
)

CPU = torch.device("cpu")
NOTHING = "nothing has moved or changed"


def meeting(others, heard=None):
    """A meet in which the other ranks, behind this one, give these numbers; ``heard`` gets what this one gives."""

    def meet(*numbers):
        if heard is not None:
            heard.append(numbers)
        return [list(numbers), *others]

    return meet


def nobody_comes(*numbers):
    raise RuntimeError("ranks [1] did not come")


@on_ranks(3)
def test_all_ranks_get_the_numbers_and_texts_of_all(rank, group):
    meet = meet_over(group, CPU)
    assert meet(rank, 0.5) == [[other, 0.5] for other in range(3)]
    assert list(gather_texts("é" * rank * 7, meet, group, CPU)) == ["é" * other * 7 for other in range(3)]
    assert list(gather_texts("", meet, group, CPU)) == [""] * 3


#: What goes wrong on rank 1, as what all ranks raise, and why.
FAILURES = [
    (KeyError("bad"), RuntimeError, "KeyError: 'bad'"),
    (OSError("Grüße\nfrom line 2"), RuntimeError, "Grüße"),
    (MemoryError(), NotEnoughMemoryError, "out of memory"),
    (torch.OutOfMemoryError("of CUDA"), NotEnoughMemoryError, "of CUDA"),
    (ValueError("x" * 5000), RuntimeError, "x" * 1000),
]


@on_ranks(3, [(*failure, moves) for failure in FAILURES for moves in (False, True)])
def test_all_ranks_name_the_one_that_cannot_prepare_with_its_reason(rank, group, error, kind, why, moves):
    """Where memory ran out all raise one kind: whoever goes on after that must not do so alone."""
    meet = meet_over(group, CPU)
    with pytest.raises(Exception) as caught:
        meet_prepared(meet, error if rank == 1 else (1.0, 2.0), "dinner", moves=moves)
    if rank == 1 and isinstance(error, ValueError):
        assert caught.value is error
        return
    assert caught.type is (CannotMoveError if moves and kind is RuntimeError else kind)
    expected = f"ranks [1] of the group failed while preparing dinner: {why}"
    assert str(caught.value) == (f"{NOTHING}: {expected}" if moves else expected)
    assert caught.value.__cause__ is (error if rank == 1 else None)


def test_several_that_fail_are_named_each_with_its_reason_and_so_is_who_does_not_come():
    assert meet_prepared(meeting([[3.0, 4.0]]), (1.0, 2.0), "it") == [[1.0, 2.0], [3.0, 4.0]]
    rows = [[-2.0, *text_numbers("no memory")], [-1.0, *text_numbers("odd"), 7.0]]
    for given in ((1.0, 1.0), MemoryError()):
        with pytest.raises(CannotMoveError, match=r"of the group failed .*rank 1: no memory; rank 2: odd$"):
            meet_prepared(meeting(rows), given, "it", moves=True)
    with pytest.raises(RuntimeError, match=rf"^{NOTHING}: ranks \[1\] did not come"):
        meet_prepared(nobody_comes, (1.0, 1.0), "it", moves=True)
    with pytest.raises(RuntimeError, match=r"^ranks \[1\] did not come"):
        meet_prepared(nobody_comes, (1.0, 1.0), "it")
    with pytest.raises(NotEnoughMemoryError, match=r"^this rank failed while preparing it: out of memory$"):
        meet_prepared(nobody_comes, MemoryError(), "it")


def test_ranks_that_differ_are_grouped_and_replicas_are_named_by_the_job():
    require_same([1.0, 1.0], "something", meeting([]))
    for moves, head in ((False, ""), (True, f"{NOTHING}: ")):
        with pytest.raises(
            RuntimeError, match=rf"^{head}the ranks of the group differ in something: \[\[0, 2\], \[1\]\]"
        ):
            require_same([1.0, 2.0, 1.0], "something", meeting([]), moves=moves)
    with pytest.raises(RuntimeError, match=r"the ranks of the job differ in something: \[\[4\], \[6\]\]"):
        require_same([1.0, 2.0], "something", MeetReplicas(meeting([]), (4, 6)))


def test_reasons_are_given_at_once_each_of_this_rank_or_of_the_first_other_that_has_one():
    row, heard = [*text_numbers(""), *text_numbers("odd\nmore"), *text_numbers("é")], []
    reasons = gather_reasons(meeting([row, row], heard), None, None, "here")
    assert reasons == [None, "odd (rank 1 of the group)", "here"] and len(heard) == 1


def test_who_has_not_received_everything_is_named_and_waits_no_longer_than_it_may():
    assert require_received(None, meeting([[0.0, 7.0]]), 3.0) == [3.0, 7.0]
    with pytest.raises(RuntimeError, match=r"ranks \[1\] of the group have not received everything: torn$"):
        require_received(None, meeting([[1.0, 0.0, *text_numbers("torn")]]))
    never, heard = torch.futures.Future(), []
    for meet, left in (
        (meeting([[0.0, 0.0]], heard), None),
        (meeting([[0.0, 0.0]], heard), timedelta(seconds=3)),
        (lambda *_: never.wait(), timedelta(seconds=-3)),
    ):
        with pytest.raises(RuntimeError, match=f"{NOTHING}: torn"):
            require_received(ValueError("torn"), meet, left=left)
    assert [(failed, text_of(text)) for failed, _, *text in heard] == [(1.0, "torn")] * 2


def test_memory_is_allocated_where_it_fits_and_ranks_on_one_device_share_what_is_free(monkeypatch):
    monkeypatch.setattr(agreement, "free_bytes", lambda device: 2**20)
    calls, half = [], 2.0**19

    def allocating(needed, other, other_place=0.0):
        def meet(needed, free, place):
            return [[needed, free, place], [other, free, place + other_place]]

        allocate_together(int(needed), CPU, lambda: calls.append(needed), meet)

    allocating(half, half)
    assert calls == [half]
    allocating(2 * half, 2 * half, other_place=1.0)  # on different devices
    allocating(0, 2 * half)  # who needs nothing lacks nothing
    for needed, other, said in (
        (half, 2 * half, "rank 0 lacks 524 kB, of 524 kB that it needs; rank 1 lacks"),
        (0, 4 * half, "rank 1 lacks"),
        (4 * half, 0, r"rank 0 lacks 1\.05 MB, of 2\.1 MB that it needs"),
    ):
        with pytest.raises(NotEnoughMemoryError, match=said):
            allocating(needed, other)
    assert 4 * half not in calls  # nothing is allocated that does not fit


def test_what_else_allocating_raises_is_told_to_the_others():
    heard = []

    def fail():
        raise TypeError("odd")

    with pytest.raises(CannotMoveError, match="odd"):
        allocate_together(1, CPU, fail, meeting([], heard))
    assert [failed for failed, *_ in heard] == [-1.0]


@pytest.mark.parametrize("runs_out", [False, True])
def test_the_rank_that_lacks_memory_is_the_one_named_also_where_all_share_a_device(run_ranks, monkeypatch, runs_out):
    def allocate(rank, group):
        if rank == 1 and not runs_out:
            monkeypatch.setattr(agreement, "free_bytes", lambda device: 400_000)
        with pytest.raises(NotEnoughMemoryError) as caught:
            size = 2**50 if rank == 1 else 1
            allocate_together(10**6, CPU, lambda: torch.empty(size) and None, meet_over(group, CPU))
        return str(caught.value)

    for text in run_ranks(allocate, 3):
        expected = r"ranks \[1\] .* new tensors: .*can't allocate" if runs_out else r"rank 1 lacks 600 kB, of 1 MB"
        assert re.search(expected, text) and not re.search(r"rank 0|rank 2|ranks \[0|2\]", text), text


def test_memory_is_known_on_a_cpu_with_meminfo_and_what_a_step_takes_again_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(agreement, "_MEMINFO", tmp_path / "meminfo")
    assert agreement.free_bytes(CPU) is None
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:     1000 kB\n")
    assert agreement.free_bytes(CPU) == 972800
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert agreement.bytes_up_to_peak(torch.device("cuda")) == 300
    assert agreement.bytes_up_to_peak(CPU) == 0

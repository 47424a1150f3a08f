"""A re-packing that cannot be carried out leaves every rank that lives with what it had, and tells all of them why."""

import itertools
import os
import time

import pytest
import torch.distributed as dist
from helpers import pipelines
from helpers.on_ranks import on_ranks
from helpers.pipelines import Limited
from helpers.processes import dying, send_half, told_by_survivors

from zeroresize.pipeline import repack, repacking
from zeroresize.resharding import transaction, transport
from zeroresize.utils.torch_private import known_groups


class Training(Limited):
    def __init__(self, group):
        super().__init__(group, limit_s=3.0)

    def repack(self, num_stages=2, **options):
        return repack(self.pipeline, self.optimizer, num_stages=num_stages, **options)

    def repack_fails(self, *arguments, **options):
        """The text of the error."""
        with self.fails(RuntimeError, ValueError) as texts:
            self.repack(*arguments, **options)
        return texts[0]

    def goes_on(self):
        """Afterwards a re-packing is possible, and training goes on."""
        pipelines.train_step(self.pipeline, self.optimizer, 1)
        if not self.repack().is_released:
            pipelines.train_step(self.pipeline, self.optimizer, 2)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("dead", "when"),
    [
        *itertools.product([2], ["before all", "while", "received"]),
        *itertools.product([1, 2], ["before the group"]),
        (1, "in the group"),
    ],
)
def test_a_rank_that_dies_is_named_and_the_others_stay_as_they_were(tmp_path, dead, when):
    """A rank that was to be released; and, where the group of those that stay is made, one that was to stay."""

    def check(rank, group):
        training = Training(group)
        if rank != dead:
            return training.repack_fails(max_bytes=2000)

        def die(*_, **__):
            os._exit(0)

        if when == "before all":
            die()
        elif when == "while":
            transport.start_messages = dying(send_half)
        elif when == "received":
            transaction.require_received = die
        elif when == "before the group":
            repacking.free_group_number = die
        else:
            repacking.make_side_group = die
        training.repack(max_bytes=2000)
        return "did not die"

    texts = told_by_survivors(check, 3, tmp_path)
    assert sorted(texts) == sorted({0, 1, 2} - {dead}), texts
    for text in texts.values():
        assert "nothing has moved or changed" in text, text
    if when != "in the group":
        assert all(f"ranks [{dead}] of the group" in text for text in texts.values()), texts


@pytest.mark.slow
@pytest.mark.parametrize("is_made", [True, False])
def test_a_group_that_one_rank_cannot_make_is_told_to_all_and_the_next_one_can_be_made(run_ranks, monkeypatch, is_made):
    """Also where the others have it already, or have tried one more than that rank has."""

    def check(rank, group):
        training = Training(group)
        make, known = repacking.make_side_group, set(known_groups())

        def fail(*arguments):
            if is_made:
                made = make(*arguments)
                time.sleep(0.3)  # until the others have theirs
                dist.destroy_process_group(made)
            raise RuntimeError("no more ports")

        if rank == 1:
            monkeypatch.setattr(repacking, "make_side_group", fail)
        text = training.repack_fails()
        assert set(known_groups()) == known
        monkeypatch.undo()
        training.goes_on()
        return text

    failed = [1] if is_made else [0, 1]
    for text in run_ranks(check, 3):
        assert f"nothing has moved or changed: ranks {failed} of the group failed while preparing the group" in text
        assert "no more ports" in text
        if not is_made:
            assert "rank 0: ranks [1] of the new group did not come to make a process group of ranks [0, 1]" in text


@pytest.mark.parametrize("wrong", [0, 4])
@on_ranks(3)
def test_a_number_of_stages_that_is_not_possible_is_told_to_all(rank, group, *, wrong):
    training = Training(group)
    text = training.repack_fails(wrong if rank == 2 else 2)
    expected = f"{wrong} stages cannot be left of 3: wanted are 1 to 3"
    assert (expected if rank == 2 else "ranks [2] of the group failed") in text
    training.goes_on()


@on_ranks(3)
def test_ranks_that_know_different_numbers_of_groups_are_repacked_all_the_same(rank, group):
    """Torch would name the new group differently on them, and they would wait for each other."""

    training = Training(group)
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    training.goes_on()

"""The ranks of a group once more, for lent weights alone."""

import datetime

import pytest
import torch
import torch.distributed as dist

from zeroresize.comm.groups import WeightGroup


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(run_ranks):
    def build(rank, group):
        impatient = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=2))
        if rank != 1:
            with pytest.raises(RuntimeError, match=r"^ranks \[1\] of the group did not come to connect .* within 2 s"):
                WeightGroup(impatient, torch.device("cpu"))

    run_ranks(build, 3, timeout_s=20)

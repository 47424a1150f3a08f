"""Numbers cross the group without anybody waiting in between."""

import datetime
import itertools
import time

import pytest
import torch
import torch.distributed as dist

from zeroresize.comm.collectives import time_limit
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup, WeightGroup
from zeroresize.comm.rendezvous import Rendezvous


def test_every_rank_sees_the_table_of_the_last_post_for_which_nobody_waits(run_ranks):
    def post(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        tables = [exchange.collect()]
        for update in range(2):
            time.sleep(0.6 if rank == 1 else 0.0)
            began = time.perf_counter()
            exchange.post([float(rank), float(update)])
            assert time.perf_counter() - began < 0.3
            with pytest.raises(RuntimeError, match=r"post\(\) was called twice"):
                exchange.post([1.0])
            tables.append(exchange.collect())
        return tables

    for tables in run_ranks(post, 3):
        assert tables == [None, *([[float(r), float(update)] for r in range(3)] for update in range(2))]


def test_the_time_limit_is_the_groups_own_or_torchs_where_its_backend_does_not_tell(run_ranks):
    def limits(rank, group):
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - a backend without options

        two_hours = datetime.timedelta(hours=2)
        return [time_limit(dist.new_group([0], backend=name, timeout=two_hours)) for name in ("gloo", "fake")]

    (limits_of_backends,) = run_ranks(limits, 1)
    assert limits_of_backends == [datetime.timedelta(hours=2), dist.default_pg_timeout]


def test_aborting_after_a_rank_has_closed_is_no_error_and_ends_the_others_waits(run_ranks):
    def end(rank, group):
        cpu_group = CpuGroup(group, {})
        if rank == 1:
            cpu_group.close()
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            cpu_group.abort()
        if rank == 2:
            with pytest.raises(RuntimeError):
                cpu_group.recv([torch.empty(1)], 0, 7).wait()
        seconds = time.perf_counter() - began
        dist.barrier()  # so that rank 2's wait does not end as rank 0 does
        return seconds

    assert max(run_ranks(end, 3, timeout_s=20)) < 10


@pytest.mark.slow
def test_rendezvous_and_exchange_wait_as_long_as_their_group_may_and_no_longer(run_ranks):
    def wait_alone(rank, group):
        impatient = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
        exchange = Exchange(CpuGroup(impatient, {}))
        if rank == 1:
            time.sleep(8.0)  # alive, with its connections open
            return []
        exchange.post([1.0])
        moments = [time.perf_counter()]
        with pytest.raises(RuntimeError, match=r"ranks \[1\] of the group did not come .* within 2 s, the time limit"):
            exchange.collect()
        moments.append(time.perf_counter())
        for make in (lambda: CpuGroup(impatient, {}), lambda: WeightGroup(impatient, torch.device("cpu"))):
            with pytest.raises(
                RuntimeError, match=r"ranks \[1\] of the group did not come .* within 2 s, the time lim"
            ):
                make()
            moments.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(moments)]

    waited_s, _ = run_ranks(wait_alone, 2, timeout_s=20)
    assert len(waited_s) == 3 and all(1.5 < seconds < 4.5 for seconds in waited_s), waited_s


def test_where_the_jobs_store_is_gone_that_is_what_is_told(run_ranks):
    class Gone:
        def __getattr__(self, name):
            raise ConnectionResetError("Connection reset by peer")

    def meet(rank, group):
        rendezvous = Rendezvous(group, "eat")
        rendezvous.store = Gone()
        with pytest.raises(RuntimeError, match=r"the job's store cannot be reached.* did not come to eat"):
            rendezvous.exchange("here")

    run_ranks(meet, 1)


@pytest.mark.slow
def test_ranks_meet_at_once_after_one_has_failed_before_it_came(run_ranks):
    limit_s = 3.0

    def train(rank, group):
        impatient = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=limit_s))
        if rank != 1:  # which has failed before
            with pytest.raises(RuntimeError, match=r"ranks \[1\] of the group did not come"):
                CpuGroup(impatient, {})
        dist.barrier(group)
        began = time.perf_counter()
        table = Exchange(CpuGroup(impatient, {})).gather([float(rank)])
        return table, time.perf_counter() - began

    for table, seconds in run_ranks(train, 3, timeout_s=30):
        assert table == [[0.0], [1.0], [2.0]] and seconds < limit_s / 2

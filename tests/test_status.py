"""One status for all that balances or watches: what it tells, as a table, as lines and as plain values."""

import json
import math

import pytest
import torch
from helpers.virtual_training import Run
from torch.utils.data import DataLoader

import zeroresize as zr
from zeroresize.status import HEADINGS, RankStatus, Status, ranks_by_speed

SLOW = RankStatus(1, 0.48, 0.25, 0.67, 40, "products", 12.0)
STATUS = Status("units", "on", 120, 0.0, 0.31, 0.30, 0.60, 123.0, 12.0, (RankStatus(0, 0.12, 1.0, 1.33), SLOW), "<why>")
UNKNOWN = Status("nothing", "on", 0, 0.0, *[math.nan] * 4, 0.0, ())


def test_printed_it_is_a_table_of_ranks_between_a_headline_and_the_decision():
    headline, heading, first, second, decided = str(STATUS).splitlines()
    assert "step 120" in headline and "50 % shorter than evenly" in headline and "saved 2 min 3 s" in headline
    assert heading.split() == " ".join(HEADINGS).split()
    assert first.split() == ["0", "120", "ms", "1.00", "1.33"]
    assert second.split() == ["1", "480", "ms", "0.25", "0.67", "step", "40", "matrix", "products", "12", "s"]
    assert decided == "<why>"
    assert "watched" in str(UNKNOWN) and "nan" not in str(UNKNOWN)


def test_in_a_notebook_it_is_a_table_whose_texts_are_escaped():
    page = STATUS._repr_html_()
    assert page.count("<tr>") == 3 and "&lt;why&gt;" in page and "<why>" not in page


@pytest.mark.parametrize("status", [STATUS, UNKNOWN])
def test_it_comes_back_from_the_lines_of_telemetry(status, tmp_path):
    telemetry = zr.JsonLinesTelemetry(tmp_path / "status.jsonl")
    telemetry(status)
    telemetry.close()
    line = json.loads((tmp_path / "status.jsonl").read_text())
    assert str(Status.from_dict(line)) == str(status)
    assert Status.from_dict(line).to_dict() == status.to_dict()


def test_a_line_of_an_older_version_comes_back_without_what_it_does_not_tell():
    line = STATUS.to_dict()
    for rank in line["ranks"]:
        for name in ("past_score", "node", "waits_s"):
            del rank[name]
    assert str(Status.from_dict(line)) == str(STATUS)


def test_a_rank_tells_its_past_and_where_it_waits_most():
    rank = RankStatus(
        0, 0.12, 1.0, past_score=0.71, node="n0", waits_s={"collectives of group dp": 0.124, "rank 5": 0.01}
    )
    status = Status("nothing", "on", 120, 0.0, 0.31, *[math.nan] * 3, 0.0, (rank,))
    assert str(status).splitlines()[2].endswith("0.71  collectives of group dp, 40 % of a step")
    assert Status.from_dict(status.to_dict()).ranks == status.ranks
    assert status.scalars()["status/rank 0/past_score"] == 0.71


def test_what_is_no_status_is_refused_by_what_lacks():
    with pytest.raises(ValueError, match=r"no Status is here.*saved_s"):
        Status.from_dict({"kind": "units", "step": 3})


def test_each_number_has_a_name_for_loggers():
    scalars = STATUS.scalars()
    assert scalars["status/saved_s"] == 123.0 and scalars["status/rank 1/speed"] == 0.25
    assert all(isinstance(value, float) for value in scalars.values())


def test_speeds_are_told_of_the_fastest():
    assert ranks_by_speed((1.0, 4.0), (0.4, 1.6), 2.0) == (RankStatus(0, 8.0, 0.25, 0.4), RankStatus(1, 2.0, 1.0, 1.6))


def test_a_balancer_tells_who_is_slow_what_moved_and_what_that_saves(run_ranks):
    def train(rank, group):
        statuses = []
        run = Run(group, gather_s=0.0, mode="exact", update_every=4)
        run.balancer.on_status = statuses.append
        at_first = run.balancer.status()
        run.updates(3)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.updates(12)
        slow = run.balancer.status()
        run.time.chi = 1.0
        run.updates(12)
        again = run.balancer.status()
        run.balancer.close()
        run.balancer.close()
        return at_first, slow, again, statuses

    both = run_ranks(train, 2)
    for at_first, slow, again, _ in both:
        assert at_first.ranks == () and math.isnan(at_first.even_step_s)
        assert slow.kind == "units" and slow.state == "on" and slow.step == 60
        fast_rank, slow_rank = slow.ranks
        assert fast_rank.speed == 1.0 and slow_rank.speed < 0.5
        assert fast_rank.share > 1.2 > 0.8 > slow_rank.share
        assert fast_rank.share + slow_rank.share == pytest.approx(2.0, rel=0.02)
        assert fast_rank.slow_since is None and 8 <= slow_rank.slow_since <= 20
        assert slow_rank.cause == "products" and slow.cost_s > 0.0
        assert slow.expected_step_s < 0.8 * slow.even_step_s and slow.saved_s > 0.0
        assert again.ranks[1].slow_since is None and again.saved_s >= slow.saved_s
        assert again.expected_step_s == pytest.approx(again.even_step_s, rel=1e-6)
    (*_, statuses), (*_, nothing) = both
    assert [status.step for status in statuses[:-1]] == list(range(4, 109, 4)) and nothing == []
    assert statuses[-1].state == "ended" and [status.state for status in statuses[:-1]] == ["on"] * 27
    for name in ("step", "even_step_s", "saved_s", "ranks", "decided"):
        assert getattr(both[0][1], name) == getattr(both[1][1], name)


def test_a_balancer_that_is_off_watches(run_ranks):
    def train(rank, group):
        run = Run(group, gather_s=0.0, mode="off", update_every=4)
        run.updates(3)
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.updates(8)
        return run.balancer.status()

    for status in run_ranks(train, 2):
        assert status.kind == "nothing" and math.isnan(status.saved_s)
        assert status.ranks[1].slow_since is not None and status.cost_s > 0.0
        assert [rank.share for rank in status.ranks] == [1.0, 1.0]


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_a_balancer_of_a_single_rank_counts_steps_and_says_that_there_is_no_other(run_ranks, mode):
    def train(rank, group):
        run = Run(group, mode=mode)
        run.steps(7)
        return run.balancer.status()

    (status,) = run_ranks(train, 1)
    assert status.step == 7 and status.decided == "the group has no other rank"


def test_alone_nothing_is_known():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = zr.DataBalancer(model, optimizer, global_batch=4)
    x = torch.randn(8, 4)
    for rows in DataLoader(x, batch_sampler=balancer.sampler(x)):
        (model(rows).square().mean() * balancer.loss_scale()).backward()
        optimizer.step()
        balancer.step()
    assert balancer.status().kind == "samples" and balancer.status().ranks == ()
    with zr.watch(model, optimizer) as watch:
        assert str(watch.status()).startswith("step 0")
    assert watch.status().state == "ended"

"""``zeroresize whatif``: who straggled, by traces and by statuses, and what dividing work would have saved."""

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.on_ranks import gathered
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from zeroresize.commands.__main__ import main
from zeroresize.commands.traces import job_of
from zeroresize.commands.whatif import BY_SPEED, advice, jobs_of, savings_of, slowness_of, stragglers_of
from zeroresize.injection import StragglerInjector
from zeroresize.policy.tensor.estimation.times import MOVING_REST
from zeroresize.status import RankStatus, Status

#: Two ranks' steps 2 to 5 of DistributedDataParallel on gloo, products of rank 1 slowed to χ = 3 by an injector.
TRACES = Path(__file__).parent / "traces"
#: What the injector added to each of these steps.
ADDED_S = (0.01118, 0.01026, 0.00881, 0.00967)


def output(capsys, *arguments):
    assert main(["whatif", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def divided_by_speed(seconds, more_s):
    """What a rank that takes so much longer than another costs a step, less what it costs if work is divided."""
    return seconds + more_s - 2.0 / (1.0 / seconds + 1.0 / (seconds + more_s))


def test_a_recorded_job_names_the_slow_rank_and_what_dividing_saves(capsys):
    job = job_of(sorted(TRACES.glob("ddp*")))
    (straggler,) = stragglers_of(job)
    assert (straggler.rank, straggler.numbers, straggler.cause) == (1, [2, 3, 4, 5], "products")
    assert 2.0 < straggler.times < 3.0
    assert straggler.late_s == pytest.approx(sum(ADDED_S), rel=0.3)
    usual_s = min(step.busy_s for step in job.steps[0])
    step_s = sum(step.busy_s + step.wait_s for step in job.steps[1]) / 4
    assert savings_of(job) == {BY_SPEED: pytest.approx(divided_by_speed(usual_s, sum(ADDED_S) / 4) / step_s, rel=0.25)}
    assert job.waits[("default_pg", "all_reduce")][0] > 10 * job.waits[("default_pg", "all_reduce")][1]
    assert job.notes == []
    text = output(capsys, TRACES)
    assert "It will pay while this lasts: rank 1 is late by matrix products" in text
    assert "with DataBalancer." in text
    assert "rank 0    ····" in text


def test_a_rank_that_an_injector_slows_is_named_by_its_traces(run_ranks, tmp_path):
    def run(rank, group):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        added_s = []
        with (
            StragglerInjector(model, process_group=group, chi={1: 3.0}) as injector,
            profile(
                activities=[ProfilerActivity.CPU],
                schedule=schedule(wait=1, warmup=1, active=6, repeat=1),
                on_trace_ready=lambda each: each.export_chrome_trace(str(tmp_path / f"{rank}.json")),
            ) as profiler,
        ):
            for _ in range(8):
                before_s = injector.seconds_added
                optimizer.zero_grad()
                model(torch.randn(1024, 256)).square().mean().backward()
                optimizer.step()
                profiler.step()
                added_s.append(injector.seconds_added - before_s)
        return gathered(group, added_s[2:])[1]

    added_s = run_ranks(run, 2)[0]
    job = job_of(sorted(tmp_path.glob("?.json")))
    slowest = stragglers_of(job)[0]
    assert (slowest.rank, slowest.cause) == (1, "products")
    assert len(slowest.numbers) >= 3
    usual_s = sorted(step.busy_s for step in job.steps[0])[1]
    step_s = max(step.busy_s + step.wait_s for step in job.steps[1])
    expected = divided_by_speed(usual_s, sorted(added_s)[1]) / step_s
    assert 0.5 * expected < savings_of(job)[BY_SPEED] < 0.6


def nccl_trace(path, rank, product_us, waits_us, *, clock_us, groups=("tp",), marked=True, loader_us=0.0, **header):
    """Four steps on a GPU: a product, then an all-reduce of 100 µs in each group; later the optimizer, of 200 µs."""
    events, time = [], clock_us

    def kernel(name, duration, **arguments):
        nonlocal time
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": time, "dur": duration, "args": arguments})
        time += duration

    for step in range(9, 13):
        time += loader_us
        begin = time
        kernel("void elementwise_kernel<add>", 100.0)
        kernel("sm90_xmma_gemm_bf16", product_us)
        for group, wait_us in zip(groups, waits_us, strict=True):
            known = {"Collective name": "allreduce", "Process Group Name": "1", "Process Group Description": group}
            known["Process Group Ranks"] = "[0, 1]"
            kernel(
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", wait_us + 100.0, **known
            )
        kernel("multi_tensor_apply_kernel", 200.0)
        mark = {
            "ph": "X",
            "cat": "gpu_user_annotation",
            "name": f"ProfilerStep#{step}",
            "ts": begin,
            "dur": time - begin,
        }
        events += [mark, mark | {"cat": "user_annotation", "ts": begin - 5e3, "dur": 10.0}] if marked else []
    info = {"backend": "nccl", "rank": rank, "world_size": 2} | header
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))


def test_nccl_kernels_tell_waits_by_group_and_products_whatever_the_clocks_say(tmp_path, capsys):
    nccl_trace(tmp_path / "a.json", 0, 1000.0, (2000.0, 0.0), clock_us=5e12, groups=("tp", "dp"))
    nccl_trace(tmp_path / "b.json", 1, 3000.0, (0.0, 300.0), clock_us=7e6, groups=("tp", "dp"))
    job = job_of([tmp_path / "b.json", tmp_path / "a.json"])
    assert job.ranks == [0, 1]
    assert job.waits == {
        ("tp [0, 1]", "allreduce"): pytest.approx({0: 3 * 2000e-6, 1: 0.0}, abs=1e-6),
        ("dp [0, 1]", "allreduce"): pytest.approx({0: 0.0, 1: 3 * 300e-6}, abs=1e-6),
    }
    assert [step.busy_s for step in job.steps[0]] == pytest.approx([1300e-6] * 3, abs=1e-6)
    assert [step.products_s for step in job.steps[1]] == pytest.approx([3000e-6] * 3, abs=1e-6)
    (straggler,) = stragglers_of(job)
    assert (straggler.rank, straggler.numbers, straggler.cause) == (1, [10, 11, 12], "products")
    assert straggler.times == pytest.approx(3300 / 1300, rel=1e-3)
    saved = savings_of(job)
    assert saved[BY_SPEED] == pytest.approx((3300 - 2 / (1 / 1300 + 1 / 3300)) / 3800, rel=1e-2)
    # Rank 1 gives away half of its products: 300 + 1500 of both in place of 300 + 3000.
    assert saved["exact"] == pytest.approx(1500 / 3800, rel=0.02)
    assert saved["zero-pri"] == pytest.approx(2000 / 3800, rel=0.02)
    text = output(capsys, tmp_path)
    assert "rank 1    ▓▓▓" not in text
    assert "rank 1    ███" in text
    assert text.index("tp [0, 1]") < text.index("dp [0, 1]")
    assert "39 % with Balancer in mode exact where they are tensor parallel" in text


def test_what_a_collective_takes_beside_computing_is_no_wait(tmp_path):
    for rank in range(2):
        nccl_trace(tmp_path / f"{rank}.json", rank, 1000.0, (2000.0 * rank,), clock_us=0.0)
    path = tmp_path / "1.json"
    trace = json.loads(path.read_text())
    hidden = [
        {**event, "name": "cutlass_gemm", "dur": 1500.0} for event in trace["traceEvents"] if "nccl" in event["name"]
    ]
    path.write_text(json.dumps(trace | {"traceEvents": trace["traceEvents"] + hidden}))
    job = job_of(sorted(tmp_path.iterdir()))
    assert job.waits[("tp [0, 1]", "allreduce")][1] == pytest.approx(6000e-6, abs=1e-6)
    assert [step.wait_s for step in job.steps[1]] == pytest.approx([600e-6] * 3, abs=1e-6)


def test_an_op_that_waits_for_a_collective_is_no_computing(tmp_path):
    """As in tensor parallelism on gloo: 1 ms of a product, then 4 ms in which the rank waits inside an op."""
    for rank, wait_us in enumerate((4000.0, 500.0)):
        begin = 1e6 * rank
        spans = [
            ("user_annotation", "ProfilerStep#3", 1, begin, 1200.0 + wait_us),
            ("cpu_op", "aten::mm", 1, begin + 100.0, 1000.0),
            ("cpu_op", "Redistribute", 1, begin + 1100.0, wait_us),
            ("cpu_op", "_c10d_functional::wait_tensor", 1, begin + 1110.0, wait_us - 10.0),
            ("user_annotation", "gloo:all_reduce", 2, begin + 1100.0, wait_us),
        ]
        events = [
            {"ph": "X", "pid": 1, **dict(zip(("cat", "name", "tid", "ts", "dur"), each, strict=True))} for each in spans
        ]
        (tmp_path / f"{rank}.json").write_text(json.dumps({"traceEvents": events}))
    job = job_of(sorted(tmp_path.iterdir()))
    assert [step.wait_s for (step,) in job.steps] == pytest.approx([4000e-6, 500e-6], abs=1e-6)
    assert [step.products_s for (step,) in job.steps] == pytest.approx([1000e-6] * 2, abs=1e-6)
    assert job.waits == {("?", "all_reduce"): pytest.approx({0: 3500e-6, 1: 0.0}, abs=1e-6)}
    assert job.notes[0] == "traces do not say of which rank they are: counted as given"


def test_sends_and_receives_wait_for_what_is_beyond_the_shortest_of_their_kind(tmp_path):
    for rank in range(2):
        nccl_trace(tmp_path / f"{rank}.json", rank, 1000.0, (0.0,), clock_us=0.0)
        text = (tmp_path / f"{rank}.json").read_text().replace("allreduce", ("send", "recv")[rank])
        trace = json.loads(text)
        calls = [event for event in trace["traceEvents"] if event["name"].startswith("nccl")]
        for call, more in zip(calls, (0.0, 0.0, 50.0, 70.0), strict=True):
            call["dur"] += more * rank
        (tmp_path / f"{rank}.json").write_text(json.dumps(trace))
    waits = job_of(sorted(tmp_path.iterdir())).waits
    assert waits == {
        ("tp [0, 1]", "send"): pytest.approx({0: 0.0}),
        ("tp [0, 1]", "recv"): pytest.approx({1: 120e-6}, abs=1e-6),
    }


def test_a_late_loader_is_named_and_not_what_dividing_work_mends(tmp_path, capsys):
    nccl_trace(tmp_path / "0.json", 0, 1000.0, (4000.0,), clock_us=0.0)
    nccl_trace(tmp_path / "1.json", 1, 1000.0, (0.0,), clock_us=0.0, loader_us=4000.0)
    job = job_of(sorted(tmp_path.iterdir()))
    assert stragglers_of(job)[0].cause == "loader"
    assert [step.loader_s for step in job.steps[1]] == pytest.approx([4000e-6] * 3, abs=1e-6)
    moved_us = 1000.0 + MOVING_REST * 300.0  # the other rank computes all products, and what lies between them
    assert savings_of(job)["exact"] == pytest.approx(moved_us / 5400, rel=0.01)
    text = output(capsys, tmp_path)
    assert "Mend what comes before the forward first: rank 1 is late by its data loader" in text


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"marked": False}, "no steps are marked, as by profiler.step(): the whole trace is one"),
        ({"world_size": 4}, "of 4 ranks there are traces of ranks 0, 1 alone: waits may be longer"),
        ({"groups": (), "waits_us": ()}, "no collectives are in the traces"),
    ],
)
def test_what_traces_do_not_tell_is_said(tmp_path, capsys, change, note):
    for rank in range(2):
        options = {"waits_us": (2000.0 - 2000.0 * rank,), "clock_us": 9e9 * rank} | change
        nccl_trace(tmp_path / f"{rank}.json", rank, 1000.0 + 2000.0 * rank, **options)
    text = output(capsys, tmp_path)
    assert f"note: {note}" in text
    says_nothing = "Whether it will pay cannot be said" in text
    assert says_nothing == ("groups" in change)
    assert ("rank 1    █\n" in text) == ("marked" in change)


def test_other_json_of_a_runs_folder_is_passed_over(tmp_path, capsys):
    nccl_trace(tmp_path / "0.json", 0, 1000.0, (0.0,), clock_us=0.0)
    (tmp_path / "config.json").write_text('{"mode": "off"}')
    assert "rank 0; steps" in output(capsys, tmp_path)
    (tmp_path / "0.json").unlink()
    assert main(["whatif", str(tmp_path)]) == 2
    assert "no trace of torch.profiler is there" in capsys.readouterr().err


def test_of_one_rank_nothing_is_compared(tmp_path, capsys):
    text = output(capsys, TRACES / "ddp_rank0.json.gz")
    assert "note: of 2 ranks there are traces of rank 0 alone" in text
    assert "straggler" not in text
    assert "Whether it will pay cannot be said" in text


def test_gloo_of_several_groups_does_not_say_which(tmp_path):
    for rank in range(2):
        trace = json.loads(gzip.decompress((TRACES / f"ddp_rank{rank}.json.gz").read_bytes()))
        trace["distributedInfo"]["pg_config"] *= 2
        (tmp_path / f"{rank}.json").write_text(json.dumps(trace))
    job = job_of(sorted(tmp_path.iterdir()))
    assert list(job.waits) == [("?", "all_reduce")]
    assert job.notes == ["gloo's events do not say of which group they are: all groups count together"]


def test_only_steps_of_all_traces_count(tmp_path):
    for rank in range(2):
        nccl_trace(tmp_path / f"{rank}.json", rank, 1000.0, (0.0,), clock_us=0.0)
    path = tmp_path / "1.json"
    path.write_text(path.read_text().replace("ProfilerStep#12", "ProfilerStep#13"))
    job = job_of(sorted(tmp_path.iterdir()))
    assert job.numbers == [10, 11]
    assert job.notes == ["only steps that are in every trace count"]
    path.write_text(path.read_text().replace("ProfilerStep#1", "ProfilerStep#9"))
    assert main(["whatif", str(tmp_path)]) == 2


def status(step, busy_s, **values):
    ranks = tuple(
        RankStatus(rank, seconds, min(busy_s) / seconds, cause="rest" if seconds > 1.5 * min(busy_s) else "")
        for rank, seconds in enumerate(busy_s)
    )
    known = {"kind": "nothing", "state": "on", "step_s": max(busy_s), "expected_step_s": math.nan}
    known |= {"even_step_s": math.nan, "saved_s": math.nan, "cost_s": 0.0}
    return Status(step=step, time=0.0, ranks=ranks, **(known | values))


def written(path, statuses):
    path.write_text("".join(json.dumps(each.to_dict()) + "\n" for each in statuses))
    return path


def test_statuses_tell_the_same_of_a_job(tmp_path, capsys):
    even, slow = [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1.0]
    path = written(tmp_path / "run.jsonl", [status(10, even), status(20, slow), status(30, slow), status(40, slow)])
    (job,) = jobs_of([str(tmp_path)])
    (straggler,) = stragglers_of(job)
    assert straggler == (2, 2.0, [20, 30, 40], "rest", pytest.approx(3.0))
    assert slowness_of(job)[2] == [1.0, 2.0, 2.0, 2.0]
    text = output(capsys, path)
    assert "rank 2    ·▓▓▓" in text
    assert "rank 2 is late by other computing" in text
    assert "waits in group" not in text


def test_a_job_that_is_balanced_says_what_it_has_saved(tmp_path):
    path = written(tmp_path / "run.jsonl", [status(10, [1.0, 3.0], kind="samples", saved_s=90.0)])
    (job,) = jobs_of([str(path)])
    said = advice(job, stragglers_of(job), savings_of(job))
    assert said == "It pays already: dividing samples otherwise has saved 1 min 30 s so far."


def test_no_rank_that_is_slow_is_no_reason_to_balance(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", [status(10, [1.0, 1.02]), status(20, [1.03, 1.0])])
    assert "It will not pay as long as no rank is slower than the others." in output(capsys, path)


def test_a_kind_that_tells_no_step_has_stragglers_too(tmp_path):
    path = written(tmp_path / "run.jsonl", [status(10, [1.0, 3.0], kind="layers", step_s=math.nan)])
    assert [each.rank for each in stragglers_of(*jobs_of([str(path)]))] == [1]


def test_statuses_without_times_are_passed_over(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", [status(10, [math.nan, math.nan]), status(20, [1.0, 2.0])])
    assert [job.numbers for job in jobs_of([str(path)])] == [[20]]
    written(path, [status(10, [math.nan, math.nan], kind="strategies")])
    assert main(["whatif", str(path)]) == 2
    assert "no rank's times are in its newest status" in capsys.readouterr().err


def test_other_lines_beside_traces_are_passed_over(tmp_path, capsys):
    nccl_trace(tmp_path / "0.json", 0, 1000.0, (0.0,), clock_us=0.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    assert "rank 0; steps" in output(capsys, tmp_path)


def test_a_long_run_fits_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    slow = [status(step, [1.0, 3.0 if step == 400 else 1.0]) for step in range(500)]
    text = output(capsys, written(tmp_path / "run.jsonl", slow))
    (row,) = (line for line in text.splitlines() if line.startswith("rank 1    "))
    assert row.count("█") == 1
    assert 20 < len(row) <= 40


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"", "no trace of steps, or a damaged one"),
        ("a.json", b'{"traceEvents": [{"ph"', "no trace of steps, or a damaged one"),
        ("a.json", b"[" * 100_000, "no trace of steps, or a damaged one"),
        ("a.json.gz", gzip.compress(b'{"traceEvents": []}' * 9)[:-12], "no trace of steps, or a damaged one"),
        ("a.json.gz", b"\x1f\x8bnothing", "no trace of steps, or a damaged one"),
        ("a.json", b"[1, 2]", "no trace: profiler.export_chrome_trace"),
        ("a.json", b'{"loss": 1.0}', "no trace: profiler.export_chrome_trace"),
        ("a.json", b'{"traceEvents": 3}', "no trace: profiler.export_chrome_trace"),
        ("a.json", b'{"traceEvents": [7]}', "no trace: profiler.export_chrome_trace"),
        ("a.json", b'{"traceEvents": []}', "the profiler has recorded nothing"),
        ("a.jsonl", b"", "no status is in there yet"),
        ("a.jsonl", b"nothing\n", "line 1: no line of JSON"),
        ("a.jsonl", b'{"ranks": [], "expected_step_s": 1.0}\n', "line 1: no line of JSON, or no status"),
        ("a.jsonl", b'{"ranks": 3, "expected_step_s": 1.0}\n', "line 1: no line of JSON, or no status"),
        ("a.txt", None, "no file is there whose name ends in .json or .json.gz or .jsonl"),
    ],
    ids=[str(number) for number in range(15)],
)
def test_what_is_no_trace_is_refused_in_a_line(tmp_path, capsys, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["whatif", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert name in error
    assert error.count("\n") == 1


def test_two_traces_of_a_rank_are_refused(tmp_path, capsys):
    for name in "ab":
        nccl_trace(tmp_path / f"{name}.json", 0, 1000.0, (0.0,), clock_us=0.0)
    assert main(["whatif", str(tmp_path)]) == 2
    assert "b.json: a second trace of rank 0; give one of each rank" in capsys.readouterr().err


def test_it_begins_without_torch():
    code = f"""
import sys
from zeroresize.commands.__main__ import main
assert main(["whatif", {str(TRACES)!r}]) == 0
print([name for name in ("torch", "pandas", "matplotlib") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "[]"

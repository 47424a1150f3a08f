"""Exporters give the numbers of records to Prometheus, OpenTelemetry and W&B by their libraries, and end no job."""

import dataclasses
import socket
import sys
import types
import urllib.request

import pytest

import zeroresize as zr
from zeroresize.status import RankStatus, Status
from zeroresize.telemetry import ChangeRecord

SLOW = RankStatus(1, 0.4, 0.25, 0.5, 10, "products", 3.0)
STATUS = Status("units", "on", 20, 1000.0, 0.5, 0.4, 0.8, 5.0, 3.0, (RankStatus(0, 0.1, 1.0, 1.5), SLOW))
BOUNDARIES = (0, 2, 4), (0, 3, 4)
CHANGE = ChangeRecord("layers", 30, "layer 3 moves", (), (1.0, 0.5), *BOUNDARIES, 0.4, 0.3, 2.0, 100, True, "slow")


def record(**changes):
    update = zr.UpdateRecord(
        update=2, step=20, epoch=0, rank=1, busy_s=0.2, gemm_s=0.1, is_straggler=True, ratio=0.5,
        pruned=0.5, lent=0.0, borrowed=0.0, lent_to={}, layer_shares={"fc1": 0.5}, predicted_step_s=0.2,
        calibration_steps=0, balancing_since_update_s=0.05,
    )  # fmt: skip
    return dataclasses.replace(update, **changes)


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_prometheus_reads_the_newest_numbers_with_rank_node_and_wing(free_port):
    pytest.importorskip("prometheus_client")
    tell = zr.PrometheusTelemetry(free_port)
    with pytest.raises(OSError):  # nothing is served before there is anything
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics")
    tell(dataclasses.replace(STATUS, step_s=0.9))
    tell(STATUS)
    tell(dataclasses.replace(STATUS, kind="samples", ranks=(), even_step_s=float("nan")))
    page = urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics").read().decode()
    numbers = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    node = socket.gethostname()
    assert numbers[f'zeroresize_status_step_seconds{{node="{node}",rank="",wing="units"}}'] == "0.5"
    assert numbers[f'zeroresize_status_rank_busy_seconds{{node="{node}",rank="1",wing="units"}}'] == "0.4"
    assert numbers[f'zeroresize_step{{node="{node}",rank="",wing="samples"}}'] == "20.0"
    assert numbers[f'zeroresize_status_even_step_seconds{{node="{node}",rank="",wing="samples"}}'] == "NaN"


def test_prometheus_forgets_ranks_that_have_left(tmp_path):
    pytest.importorskip("prometheus_client")
    path = tmp_path / "zeroresize.prom"
    tell = zr.PrometheusTelemetry(textfile=path)
    for kind in ("samples", "units"):
        tell(dataclasses.replace(STATUS, kind=kind))
    tell(dataclasses.replace(STATUS, ranks=STATUS.ranks[:1]))
    lines = path.read_text().splitlines()
    of_rank_1 = [line for line in lines if line.startswith("zeroresize_status_rank_") and 'rank="1"' in line]
    assert of_rank_1 and all('wing="samples"' in line for line in of_rank_1)
    assert any('rank="0",wing="units"' in line for line in lines)


def test_prometheus_has_a_file_for_node_exporter(tmp_path):
    pytest.importorskip("prometheus_client")
    path = tmp_path / "zeroresize.prom"
    tell = zr.PrometheusTelemetry(textfile=path)
    tell(record())
    text = path.read_text()
    assert 'rank="1",wing="units"} 0.2\n' in text and "zeroresize_balance_busy_seconds" in text
    assert "fc1" not in text and "balance_layers" not in text
    for arguments in ({}, {"port": 9400, "textfile": path}):
        with pytest.raises(ValueError, match="exactly one of port and textfile"):
            zr.PrometheusTelemetry(**arguments)


@pytest.fixture
def spans():
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exporter = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    tell = zr.OpenTelemetrySpans()
    tell._tracer = provider.get_tracer("zeroresize")  # the global provider can be set once alone
    return tell, exporter.get_finished_spans


def test_a_slow_rank_is_a_span_from_when_it_became_slow_until_it_is_fast_again(spans):
    tell, finished = spans
    tell(STATUS)
    tell(
        dataclasses.replace(
            STATUS, step=40, time=1010.0, ranks=(STATUS.ranks[0], dataclasses.replace(SLOW, cost_s=9.0))
        )
    )
    tell(dataclasses.replace(STATUS, kind="samples", ranks=()))
    assert finished() == ()
    tell(dataclasses.replace(STATUS, step=50, time=1020.0, ranks=STATUS.ranks[:1]))
    (span,) = finished()
    assert span.name == "slow rank"
    assert (span.start_time, span.end_time) == (995 * 10**9, 1010 * 10**9)
    assert span.attributes["zeroresize.rank"] == 1 and span.attributes["zeroresize.cost_s"] == 9.0
    tell(STATUS)
    tell(dataclasses.replace(STATUS, state="ended"))
    assert len(finished()) == 2


def test_moves_and_changes_are_spans_as_long_as_they_took(spans):
    tell, finished = spans
    tell(CHANGE)
    tell(dataclasses.replace(CHANGE, is_made=False))
    tell(record())
    tell(record(moved_bytes=48, moving_s=0.5, verdict="it pays"))
    change, move = finished()
    assert (change.name, change.attributes["zeroresize.reason"]) == ("move layers", "slow")
    assert (change.end_time - change.start_time) / 1e9 == pytest.approx(2.0, abs=1e-3)
    assert (move.name, move.attributes["zeroresize.moved_bytes"]) == ("move units", 48)


class FakeRun:
    def __init__(self):
        self.defined, self.logged = [], []

    def define_metric(self, name, *, step_metric):
        self.defined.append((name, step_metric))

    def log(self, numbers, *, commit):
        self.logged.append((numbers, commit))


@pytest.fixture
def wandb(monkeypatch):
    module = types.SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_logs_numbers_over_a_step_of_their_own(wandb):
    wandb.run = FakeRun()
    tell = zr.WandbTelemetry()
    tell(dataclasses.replace(STATUS, even_step_s=float("nan")))
    tell(STATUS)
    (first, commit), (second, _) = wandb.run.logged
    assert (first["zeroresize/step"], first["status/rank 1/share"], commit) == (20, 0.5, False)
    assert "status/even_step_s" not in first and second["status/even_step_s"] == 0.8
    assert len(wandb.run.defined) == len(set(wandb.run.defined)) == len(second) - 1
    assert {step for _, step in wandb.run.defined} == {"zeroresize/step"}


def test_an_exporter_that_fails_warns_once_and_ends_no_job(wandb, caplog, tmp_path):
    tell = zr.WandbTelemetry()
    tell(STATUS)
    tell(STATUS)
    (line,) = caplog.messages
    assert line == "Weights & Biases' run is incomplete from step 20 on: wandb.init was not called"
    pytest.importorskip("prometheus_client")
    zr.PrometheusTelemetry(textfile=tmp_path / "no" / "file.prom")(STATUS)
    assert f"Prometheus's {tmp_path / 'no' / 'file.prom'} is incomplete from step 20 on" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("exporter", "arguments", "module", "extra"),
    [
        (zr.WandbTelemetry, [], "wandb", "wandb"),
        (zr.PrometheusTelemetry, [9400], "prometheus_client", "prometheus"),
        (zr.TensorBoardTelemetry, ["events"], "tensorboard.compat.proto.event_pb2", "tensorboard"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_what_to_install(
    exporter, arguments, module, extra, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package {package}: pip install 'zeroresize\[{extra}\]'"):
        exporter(*arguments)
    assert list(tmp_path.iterdir()) == []

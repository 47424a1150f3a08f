"""What balancing saw and decided, for Prometheus, OpenTelemetry and Weights & Biases, by their own libraries."""

from __future__ import annotations

import math
import re
import socket
import time
from pathlib import Path
from typing import Any

from zeroresize.status import Kind, RankStatus, Status
from zeroresize.telemetry import ChangeRecord, Record, UpdateRecord
from zeroresize.utils.checked import checked, integer
from zeroresize.utils.extras import need
from zeroresize.utils.files import BestEffort

_RANK = re.compile(r"(?<=/)(?:rank )?(\d+)[/_]")
_SPANS = {"layers": "move layers", "strategies": "switch strategies", "micro-batches": "replan", "samples": "divide"}


class _Exporter:
    """Takes records; what cannot be exported is lost, with one warning."""

    def __init__(self, what: str) -> None:
        self._best_effort = BestEffort(what, Exception)

    def __call__(self, record: Record) -> None:
        with self._best_effort.writing(f"step {record.step}"):
            self._export(record)

    def _export(self, record: Any) -> None: ...


@checked(port=integer(1, 65535))
class PrometheusTelemetry(_Exporter):
    """Shows the newest numbers of records to Prometheus, as gauges with the labels ``rank``, ``node`` and ``wing``.

    They are those of ``scalars()``, such as ``zeroresize_status_step_seconds`` and, of each rank,
    ``zeroresize_status_rank_busy_seconds``; shares of single layers are left out. ``rank`` is empty where a number is
    the group's, ``node`` is the machine of the process that tells, and ``wing`` what is divided. Needs the package
    ``prometheus-client``. What fails is warned of once; training goes on.

    Args:
        port: serves them over HTTP, to all who reach it, from the first record on; one port each process.
        textfile: or writes them into a file, for node_exporter's textfile collector.

    Raises:
        ValueError: if not exactly one of the two is given.
    """

    def __init__(self, port: int | None = None, *, textfile: str | Path | None = None) -> None:
        super().__init__(f"Prometheus's {f'port {port}' if textfile is None else textfile}")
        if (port is None) == (textfile is None):
            raise ValueError("PrometheusTelemetry: exactly one of port and textfile is needed")
        self._client, self._port, self._textfile = need("prometheus_client", "prometheus"), port, textfile
        self._registry, self._node = self._client.CollectorRegistry(), socket.gethostname()
        self._gauges: dict[str, Any] = {}
        self._of_status: dict[str, set[tuple[str, str]]] = {}  # gauges of the newest status, and ranks, by wing

    def _export(self, record: Any) -> None:
        wing = getattr(record, "kind", "units" if isinstance(record, UpdateRecord) else "layers")
        shown: set[tuple[str, str]] = set()
        for name, value in {"step": record.step, **record.scalars()}.items():
            if name.startswith("balance_layers/"):
                continue
            known = _RANK.search(name)
            rank = known[1] if known else str(getattr(record, "rank", ""))
            metric = re.sub("_s$", "_seconds", re.sub(r"\W", "_", f"zeroresize_{_RANK.sub('rank_', name)}"))
            if metric not in self._gauges:
                description, labels = f"{name} of zeroresize", ("rank", "node", "wing")
                self._gauges[metric] = self._client.Gauge(metric, description, labels, registry=self._registry)
            self._gauges[metric].labels(rank, self._node, wing).set(value)
            shown.add((metric, rank))
        if isinstance(record, Status):
            for metric, rank in self._of_status.get(wing, set()) - shown:  # of ranks that have left
                self._gauges[metric].remove(rank, self._node, wing)
            self._of_status[wing] = shown
        if self._textfile is not None:
            self._client.write_to_textfile(str(self._textfile), self._registry)
        elif self._port is not None:
            port, self._port = self._port, None
            self._client.start_http_server(port, registry=self._registry)


class OpenTelemetrySpans(_Exporter):
    """Tells OpenTelemetry of each move, switch and slow rank when it is over, as a span from when it began.

    Spans "move units", "move layers", "switch strategies", "replan" (micro-batches), "divide" (samples) and "slow rank"
    have attributes ``zeroresize.step``, ``zeroresize.reason`` and so on. Needs the package ``opentelemetry-api``; where
    the program has set up no provider of spans they go nowhere.
    """

    def __init__(self) -> None:
        super().__init__("OpenTelemetry's trace")
        self._tracer = need("opentelemetry.trace", "opentelemetry").get_tracer("zeroresize")
        self._slow: dict[tuple[Kind, int, int], tuple[float, float, RankStatus]] = {}

    def _export(self, record: Any) -> None:
        if isinstance(record, Status):
            self._follow_slow_ranks(record)
        elif isinstance(record, ChangeRecord) and record.is_made:
            self._tell(_SPANS[record.kind], time.time() - record.change_s, time.time(), record, "what", "reason")
        elif isinstance(record, UpdateRecord) and record.moved_bytes:
            self._tell("move units", time.time() - record.moving_s, time.time(), record, "rank", "verdict")

    def _follow_slow_ranks(self, status: Status) -> None:
        slow = {(status.kind, each.rank, each.slow_since): each for each in status.ranks if each.slow_since is not None}
        for key, each in slow.items():
            begin = status.time - (status.step - key[2]) * status.step_s
            known = self._slow.get(key, (status.time if math.isnan(begin) else begin,))
            self._slow[key] = known[0], status.time, each
        still = {} if status.state == "ended" else slow
        for key in [key for key in self._slow if key not in still and key[0] == status.kind]:
            self._tell("slow rank", *self._slow.pop(key), "rank", "slow_since", "speed", "cause", "cost_s")

    def _tell(self, name: str, begin: float, end: float, source: Any, *names: str) -> None:
        names = (*names, *(each for each in ("step", "moved_bytes") if hasattr(source, each)))
        attributes = {f"zeroresize.{each}": getattr(source, each) for each in names}
        self._tracer.start_span(name, start_time=int(1e9 * begin), attributes=attributes).end(int(1e9 * end))


@checked()
class WandbTelemetry(_Exporter):
    """Logs records to Weights & Biases, under the names of their ``scalars()``, over ``zeroresize/step``.

    They go out with what the program logs next, so its own steps stay as they are. Needs the package ``wandb``.

    Args:
        commit: sends each record by itself, for a program that logs nothing else.
    """

    def __init__(self, *, commit: bool = False) -> None:
        super().__init__("Weights & Biases' run")
        self._wandb, self._commit = need("wandb", "wandb"), commit
        self._defined: set[str] = set()

    def _export(self, record: Any) -> None:
        if (run := self._wandb.run) is None:
            raise RuntimeError("wandb.init was not called")
        numbers = {name: value for name, value in record.scalars().items() if not math.isnan(value)}
        for name in numbers.keys() - self._defined:
            run.define_metric(name, step_metric="zeroresize/step")
        self._defined |= numbers.keys()
        run.log({"zeroresize/step": record.step, **numbers}, commit=self._commit)

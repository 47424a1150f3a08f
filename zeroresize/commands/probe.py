"""Measure every rank before a job, and name those that are slower than the others: products, copies, memory, links.

Start it as the job is started, by torchrun or srun; by itself it starts a rank for each GPU of this machine, or two on
its CPU. All ranks measure at the same time, in rounds. A rank is slow that takes over 10 % longer than is usual among
the others, in four of five rounds; a link where a message takes over twice as long. The exit status is 0 where none is,
1 where one is, and 2 where ranks fail, or do not come within a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from zeroresize.commands.errors import CommandError, require_within, write
from zeroresize.commands.ranks import LIMIT, Member, StartedRanks, member_of_job
from zeroresize.commands.tables import console, table_of
from zeroresize.config import BalanceConfig
from zeroresize.utils.progress import Progress
from zeroresize.utils.texts import size_text
from zeroresize.utils.usual import usual_of_others

_LEAST_S, _MOST_S = 1.0, 600.0
_LEAST_ROUNDS, _MOST_ROUNDS = 10, 30
#: A rank is slow in all rounds but one of so many, at least: in fewer it was disturbed.
_ALL_BUT_ONE_OF = 5
#: Links of a machine differ by how they are built: only much slower ones are named.
_TOLERANCES = {"link": 1.0}
#: Of a weight [K, K], and bytes of a copy, by kind of device: more than caches hold. Bytes of a message.
_WIDTHS, _COPIED, _SENT = {"cpu": 1024, "cuda": 8192}, {"cpu": 2**26, "cuda": 2**28}, 2**22
#: Seconds that a timing takes at least; the fastest of a few is that of a round.
_SAMPLE_S = 0.02
_TEXTS = {"fp32": "fp32 products", "bf16": "bf16 products", "copy": "copies", "link": "messages to the next rank"}
_UNITS = {"fp32": "FLOP/s", "bf16": "FLOP/s", "copy": "B/s", "link": "B/s"}
_NEXT_STEPS = {
    "cpu": "look there for other programs (top) and limits of its CPU",
    "cuda": "look there at nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE, and for other programs on its GPU",
    "link": "look there, and where the next rank is, at the network",
}


@dataclass(frozen=True)
class Reading:
    """What was measured on a rank, by what it was: "fp32" and "bf16" (a layer's three products), "copy" and "link".

    Attributes:
        device: "cpu", or the name of a GPU; ``kind`` is "cpu" or "cuda".
        seconds: of each round.
        per_second: FLOPs or bytes.
    """

    rank: int
    node: str
    device: str
    kind: str
    seconds: Mapping[str, Sequence[float]]
    per_second: Mapping[str, float]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="to measure for, at most about, once ranks have started (default 20)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was measured, and who is slow")


def run(options: argparse.Namespace) -> int:
    require_within("--seconds", options.seconds, _LEAST_S, _MOST_S)
    screen = console()
    member = member_of_job()
    tells = member is None or member.rank == 0
    if tells:
        if options.json is not None:
            write("--json", options.json, "")  # so that it is known before all is measured
        print(f"all ranks measure, for about {options.seconds:g} s", flush=True)
    with Progress("measuring", is_shown=tells):
        readings = _of_this_machine(options.seconds) if member is None else measure(member, options.seconds)
    slow = slow_ranks(readings)
    if tells:
        screen.print(_table(readings))
        lines = [_line(readings[rank], times) for rank, times in slow.items()]
        print("\n".join(lines) or "no rank is slower than the others by more than noise", flush=True)
        if options.json is not None:
            values = {"ranks": list(map(asdict, readings)), "slow": slow}
            write("--json", options.json, json.dumps(values, indent=1) + "\n")
    if member is not None:
        member.part()
    return 1 if slow else 0


def slow_ranks(readings: Sequence[Reading]) -> dict[int, dict[str, float]]:
    """Return by rank in what it takes how many times as long as is usual among the others."""
    slow: dict[int, dict[str, float]] = {}
    nodes = [reading.node for reading in readings]
    for what in _TEXTS:
        compared: dict[bool, list[Reading]] = {}
        for reading in readings:
            if reading.seconds.get(what):
                leaves = what == "link" and reading.node != nodes[reading.rank + 1]
                compared.setdefault(leaves, []).append(reading)
        for alike in compared.values():
            if len(alike) < 2:
                continue
            rounds = list(zip(*(reading.seconds[what] for reading in alike), strict=True))
            others = [usual_of_others(seconds) for seconds in rounds]
            for at, reading in enumerate(alike):
                ratios = [seconds[at] / usual[at] for seconds, usual in zip(rounds, others, strict=True)]
                least = sorted(ratios)[len(ratios) // _ALL_BUT_ONE_OF]
                if least - 1.0 > _TOLERANCES.get(what, BalanceConfig.tolerance):
                    slow.setdefault(reading.rank, {})[what] = median(ratios)
    return slow


def measure(member: Member, seconds: float) -> list[Reading]:
    """Return what all ranks have measured, on each of them.

    Raises:
        CommandError: naming ranks that do not come, or this one where it fails, and how.
    """
    member.nodes = member.meet("the beginning", socket.gethostname())
    try:
        reading = _measure(member, seconds)
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        raise CommandError(f"rank {member.rank} on {member.nodes[member.rank]}: {line}") from error
    return [Reading(**json.loads(text)) for text in member.meet("the end", json.dumps(asdict(reading)))]


def _measure(member: Member, seconds: float) -> Reading:
    import torch
    import torch.distributed as dist

    from zeroresize.comm.collectives import require_group
    from zeroresize.measure.links import measure_neighbour_links
    from zeroresize.measure.timed_products import FIRST_TOKENS, fastest_seconds, product_seconds

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", member.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", member.store),
        rank=member.rank,
        world_size=member.num_ranks,
        timeout=LIMIT,
    )
    everybody = require_group(dist.group.WORLD)
    width, dtypes = _WIDTHS[kind], {"fp32": torch.float32, "bf16": torch.bfloat16}
    if kind == "cpu":
        del dtypes["bf16"]
    timed: dict[str, Callable[[], float]] = {}
    for name, dtype in dtypes.items():
        weight = torch.ones(width, width, dtype=dtype, device=device)
        timed[name] = partial(product_seconds, weight, least_s=_SAMPLE_S)
    copied = torch.ones(2, _COPIED[kind], dtype=torch.uint8, device=device)
    timed["copy"] = partial(fastest_seconds, partial(copied[0].copy_, copied[1]), device, least_s=_SAMPLE_S)
    amounts = {**dict.fromkeys(dtypes, 6 * FIRST_TOKENS * width**2), "copy": _COPIED[kind], "link": _SENT}
    taken_s: dict[str, list[float]] = {name: [] for name in amounts}

    def measure_round() -> float:
        began = time.perf_counter()
        links = measure_neighbour_links(everybody, device, num_bytes=_SENT)  # so all begin together
        for link in links[member.rank : member.rank + 1]:  # the last rank has none
            taken_s["link"].append(link.seconds(_SENT))
        for name, time_it in timed.items():
            taken_s[name].append(time_it())
        return time.perf_counter() - began

    measure_round()  # what is set up once
    longest_s = max(map(float, member.meet("the first round", str(measure_round()))))
    for _ in range(min(max(math.ceil(seconds / longest_s), _LEAST_ROUNDS), _MOST_ROUNDS)):
        measure_round()
    dist.destroy_process_group()
    kept = {name: rounds[2:] for name, rounds in taken_s.items() if rounds}
    per_second = {name: amounts[name] / median(rounds) for name, rounds in kept.items()}
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "cpu"
    return Reading(member.rank, member.nodes[member.rank], name, kind, kept, per_second)


def _of_this_machine(seconds: float) -> list[Reading]:
    import torch

    readings: list[list[Reading]] = []
    with StartedRanks(_send_readings, torch.cuda.device_count() or 2, seconds) as ranks:
        while not ranks.have_ended:
            readings += ranks.received(LIMIT.total_seconds())
    return readings[0]


def _send_readings(member: Member, send: Callable[[Any], None], seconds: float) -> None:
    send(measure(member, seconds))


def _table(readings: Sequence[Reading]) -> Any:
    shown = [what for what in _TEXTS if any(what in reading.per_second for reading in readings)]
    headings = [what.replace("link", "to next rank") for what in ("rank", "node", "device", *shown)]
    rows = [
        (
            str(each.rank),
            each.node,
            each.device,
            *(size_text(each.per_second[what], _UNITS[what]) if what in each.per_second else "" for what in shown),
        )
        for each in readings
    ]
    return table_of(headings, rows, numbers=headings[3:])


def _line(reading: Reading, times: Mapping[str, float]) -> str:
    causes = ", ".join(f"{_TEXTS[what]} take {ratio:.2f} times as long" for what, ratio in times.items())
    step = _NEXT_STEPS["link" if set(times) == {"link"} else reading.kind]
    return f"rank {reading.rank} on {reading.node} is slow: {causes} as on the others: {step}"

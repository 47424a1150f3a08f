"""What runs have told of themselves: statuses of two ranks, of which the second is slow for a while."""

import dataclasses
import json

from zeroresize.status import RankStatus, Status


def at(step, shares=(1.0, 1.0), chi=1.0, saved_s=0.0, since=None, **changes):
    slow = {} if since is None else {"slow_since": since, "cause": "products", "cost_s": 3.0}
    ranks = RankStatus(0, 0.1, 1.0, shares[0]), RankStatus(1, 0.1 * chi, 1.0 / chi, shares[1], **slow)
    text = f"why of {step}"
    status = Status("units", "on", step, 1000.0 + step, 0.1 * chi, 0.1, 0.1 * chi, saved_s, 3.0, ranks, text)
    return dataclasses.replace(status, **changes)


RUN = [
    at(10),
    at(20, chi=4.0, since=15),
    at(30, shares=(1.6, 0.4), chi=4.0, since=15, saved_s=5.0),
    at(40, shares=(1.6, 0.4), chi=4.0, since=15, saved_s=20.0),
    at(50, saved_s=20.0),
    at(60, saved_s=20.0, state="ended"),
]


def write_runs(folder, **runs):
    for name, statuses in runs.items():
        lines = "".join(json.dumps(status.to_dict()) + "\n" for status in statuses)
        (folder / f"{name}.jsonl").write_text(lines)
    return [str(folder / f"{name}.jsonl") for name in runs]

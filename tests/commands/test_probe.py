"""zeroresize probe names slow ranks and links, and no others."""

import json
import subprocess
import sys

import pytest

from zeroresize.commands.__main__ import main
from zeroresize.commands.probe import Reading, slow_ranks


def readings(what, rounds_of_ranks, nodes="aaaaaaaa"):
    """Of each rank the seconds of its rounds; None for a rank that has none."""
    return [
        Reading(rank, nodes[rank], "cpu", "cpu", {} if rounds is None else {what: rounds}, {})
        for rank, rounds in enumerate(rounds_of_ranks)
    ]


STEADY = [1.0, 1.01, 0.99, 1.0, 1.02]


def test_a_slow_rank_is_named_and_how_slow_it_is():
    for num_ranks in (2, 3, 8):
        of_ranks = [STEADY] * num_ranks
        of_ranks[1] = [1.5 * seconds for seconds in STEADY]
        assert slow_ranks(readings("fp32", of_ranks)) == {1: {"fp32": pytest.approx(1.5)}}


def test_who_is_a_little_slower_or_varies_as_much_is_not():
    assert slow_ranks(readings("copy", [STEADY, [1.09 * seconds for seconds in STEADY]])) == {}
    assert slow_ranks(readings("copy", [STEADY, [1.0, 1.5, 1.3, 2.0, 0.9]])) == {}
    assert slow_ranks(readings("copy", [STEADY])) == {}


def test_links_within_a_machine_and_between_machines_are_compared_apart():
    slow = [10.0 * seconds for seconds in STEADY]
    of_ranks = [STEADY, STEADY, slow, STEADY, slow, STEADY, STEADY, None]
    assert slow_ranks(readings("link", of_ranks, "aaabbccc")) == {}  # those that leave are alike
    assert set(slow_ranks(readings("link", of_ranks, "aaabbbbb"))) == {4}
    unequal = [STEADY, STEADY, [1.9 * seconds for seconds in STEADY], None]
    assert slow_ranks(readings("link", unequal)) == {}  # as machines are built


@pytest.mark.slow
def test_by_itself_it_measures_two_ranks(tmp_path, capsys):
    path = tmp_path / "probe.json"
    status = main(["probe", "--seconds", "1", "--json", str(path)])
    written, said = json.loads(path.read_text()), capsys.readouterr().out
    assert status == (1 if written["slow"] else 0)  # other work on the machine may make a rank slow
    assert [rank["rank"] for rank in written["ranks"]] == [0, 1]
    for rank, expected in zip(written["ranks"], ({"fp32", "copy", "link"}, {"fp32", "copy"}), strict=True):
        assert expected == set(rank["seconds"]) == set(rank["per_second"])
        assert all(value > 0.0 for rounds in rank["seconds"].values() for value in rounds)
    assert "FLOP/s" in said and said.count(written["ranks"][0]["node"]) >= 2


SLOWED = """
import os, sys
import torch
from zeroresize.commands.__main__ import main
from zeroresize.injection.slow_ops import SlowOps
with SlowOps() as slow:
    slow.chi = 4.0 if os.environ["RANK"] == "1" else 1.0
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_of_a_job_that_is_slow_is_named(tmp_path):
    program, path = tmp_path / "slowed.py", tmp_path / "probe.json"
    program.write_text(SLOWED)
    command = [sys.executable, "-m", "vit_examples.one_node", "--nproc-per-node", "2", str(program)]
    command += ["probe", "--seconds", "1", "--json", str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1, finished.stderr
    slow = json.loads(path.read_text())["slow"]
    assert slow["1"]["fp32"] > 1.5 and "fp32" not in slow.get("0", {})
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("rank 1 on")]
    assert "fp32 products take" in line and "look there for other programs" in line

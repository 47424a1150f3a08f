"""The launcher of one node's ranks: what they are given, how they end, and who can reach them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.runs import ONE_NODE, environment, launched, long_run, wait_for_epochs

from vit_examples.one_node import rank_environment, started, train_command

LISTEN = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
ONE_FAILS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {end}
time.sleep(60)
"""


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit('had enough')", 1, "had enough\nrank 1 ended with status 1\n"),
        ("sys.exit(2)", 2, ""),  # a mistake of the user's: the rank has said it
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL\n"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_its_status_is_that_of_the_launcher(
    tmp_path: Path, end: str, status: int, said: str
) -> None:
    done = launched(*ONE_NODE, script(tmp_path, ONE_FAILS.format(end=end)), seconds=50)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_alone_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    waiting = script(tmp_path, r"import os, time; os.write(1, b'%d\n' % os.getpid()); time.sleep(60)")
    process = subprocess.Popen(
        [*ONE_NODE, waiting], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    assert process.wait(50) == 128 + number
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    process.stdout.close()


WAITS = """
import os, signal, sys, time
ignored = all(signal.getsignal(one) is signal.SIG_IGN for one in (signal.SIGHUP, signal.SIGINT))
os.write(1, b"%r\\n" % ignored)  # in one piece, as two ranks write
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_signals_that_are_ignored_at_the_start_stay_ignored(tmp_path: Path) -> None:
    """As ``nohup`` does for SIGHUP, and a shell without job control for SIGINT in the background."""

    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        [*ONE_NODE, script(tmp_path, WAITS), str(tmp_path / "end")],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=ignore,
    )  # fmt: skip
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["True\n"] * 2
        for number in (signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
        (tmp_path / "end").touch()
        assert process.wait(50) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_the_user_sets_for_gloo_and_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    variables = rank_environment(1, 2, 4321)
    assert variables["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert variables["NCCL_SOCKET_IFNAME"] == "eth7"
    assert (variables["RANK"], variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("1", "127.0.0.1", "4321")


@pytest.mark.few(1)
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net/tcp")
@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("host", ["torch", pytest.param("colossalai", marks=pytest.mark.colossalai)])
def test_a_launched_training_listens_on_loopback_only(tmp_path: Path, host: str) -> None:
    """Also while columns migrate, over a process group of their own."""
    pytest.importorskip("transformers")
    pytest.importorskip("pyarrow")
    from test_vit_data import write_parquet

    write_parquet(tmp_path / "train.parquet", 64)
    write_parquet(tmp_path / "test.parquet", 10)
    mig = "balance={mode: mig, ratio: 0.5, ranks: [1], update_every: 2}"
    _, _, config, *sets = long_run(tmp_path, tmp_path / "run", mig, f"host={host}")
    overrides = [setting.removeprefix("--set=") for setting in sets]
    command = train_command(config.removeprefix("--config="), overrides, 2)
    with started(command, tmp_path / "log.txt", {"OMP_NUM_THREADS": "1"}) as process:
        wait_for_epochs(tmp_path / "run" / "metrics.jsonl", 1, process)
        listening = list(listeners(process.pid))
    assert len(listening) >= 3, listening  # the store, and gloo of either rank
    assert all(address in LOOPBACK for address, _ in listening), listening


def listeners(pid: int) -> Iterator[tuple[str, str]]:
    """Addresses and ports, as Linux writes them, where a process or one that it started listens."""
    links = [link for one in tree(pid) for link in Path(f"/proc/{one}/fd").iterdir()]
    sockets = {os.readlink(link) for link in links if link.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == LISTEN and f"socket:[{inode}]" in sockets:
                yield tuple(local.split(":"))


def tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from tree(int(child))


PARENT = """
import sys, time
from pathlib import Path
from vit_examples.one_node import started
child = (
    "import pathlib, sys, time; alive = pathlib.Path(sys.argv[1])\\n"
    "while True: alive.touch(); time.sleep(0.1)"
)
with started([sys.executable, "-c", child, sys.argv[1]], Path(sys.argv[1]).with_suffix(".log")) as process:
    process.wait()
"""


def is_touched(file: Path) -> bool:
    before = file.stat().st_mtime_ns
    time.sleep(1.0)
    return file.stat().st_mtime_ns != before


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody that a parent was killed")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_training_does_not_outlive_a_study_that_is_killed(tmp_path: Path, end: signal.Signals) -> None:
    alive = tmp_path / "alive"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(alive)], cwd=Path(__file__).parents[2])
    for _ in range(300):
        if alive.exists():
            break
        time.sleep(0.1)
    assert is_touched(alive)
    parent.send_signal(end)
    parent.wait()
    assert not is_touched(alive)


def test_what_is_left_running_is_stopped_at_the_end_of_the_block(tmp_path: Path) -> None:
    with started([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log") as process:
        assert process.poll() is None
    assert process.poll() is not None

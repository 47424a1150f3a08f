"""``zeroresize live``: what a job that runs tells of itself, as it comes."""

import dataclasses
import json
import subprocess
import sys

import pytest

from zeroresize.commands import live
from zeroresize.commands.__main__ import COMMANDS, main
from zeroresize.commands.errors import CommandError
from zeroresize.status import RankStatus, Status

SLOW = RankStatus(1, 0.48, 0.25, 0.67, 40, "products", 12.0)
STATUS = Status("units", "on", 120, 0.0, 0.31, 0.30, 0.60, 123.0, 12.0, (RankStatus(0, 0.12, 1.0, 1.33), SLOW), "moved")


def write(path, *statuses, end="\n"):
    with path.open("a") as file:
        file.write("".join(json.dumps(status.to_dict()) + "\n" for status in statuses)[: -len("\n")] + end)


def at(step, **changes):
    return dataclasses.replace(STATUS, step=step, **changes)


def test_what_is_there_now_is_shown_once(tmp_path, capsys):
    even = tuple(dataclasses.replace(each, share=1.0) for each in STATUS.ranks)
    write(tmp_path / "status.jsonl", at(5, ranks=even, decided="at first"), at(10), at(20, step_s=0.5))
    assert main(["live", "--once", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 20" in shown and "step 10; " not in shown
    assert "matrix products" in shown and "0.67" in shown
    assert "▅▅█" in shown and "at most 500 ms" in shown
    assert shown.count("moved") == 1 and "step 10: moved" in shown and "at first" not in shown


def test_lines_of_other_records_are_passed_over(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"format": 1, "rank": 0, "step": 3}\n')
    write(tmp_path / "a.jsonl", at(20))
    assert main(["live", "--once", str(tmp_path / "a.jsonl")]) == 0
    assert "step 20" in capsys.readouterr().out


def test_other_files_of_a_runs_folder_are_not_waited_for(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    write(tmp_path / "status.jsonl", at(20, state="ended"))
    assert main(["live", str(tmp_path)]) == 0
    assert main(["live", "--once", str(tmp_path)]) == 0
    assert "metrics" not in capsys.readouterr().out


def test_a_file_that_grows_is_read_on_where_it_was_left_and_an_unfinished_line_waits(tmp_path):
    path = tmp_path / "status.jsonl"
    write(path, at(10))
    group = live.Group(path)
    group.look()
    assert group.newest.step == 10 and not group.has_ended
    write(path, at(20), end="")
    group.look()
    assert group.newest.step == 10
    path.write_text(path.read_text() + "\n")
    write(path, at(30, state="ended"))
    group.look()
    assert group.newest.step == 30 and group.has_ended and len(group.steps_s) == 3
    path.write_text("")
    write(path, at(1))  # the job was begun anew
    group.look()
    assert group.newest.step == 1


def test_off_a_terminal_a_line_is_printed_for_each_new_status_until_the_job_ends(tmp_path, capsys, monkeypatch):
    path, coming = tmp_path / "status.jsonl", [at(20), at(30), at(30, state="ended")]
    write(path, at(10))
    monkeypatch.setattr(live.time, "sleep", lambda _: write(path, coming.pop(0)) if coming else None)
    monkeypatch.setattr(live, "LINE_EVERY_S", 0.0)
    assert main(["live", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines] == ["step 10", "step 20", "step 30", "step 30"]
    assert "(ended)" in lines[-1]
    assert all("rank 1 4.00 times slower" in line for line in lines)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no file is there whose name ends in .jsonl"),
        ("{\n", "line 1: no line of JSON"),
        ('{"ranks": [], "expected_step_s": 1}\n', "kind, state"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(content, text, tmp_path, capsys):
    path = tmp_path / "status.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["live", "--once", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zeroresize live: ") and text in line


def test_help_of_every_command_is_there_without_torch():
    code = (
        "import sys, zeroresize.commands.__main__ as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    for arguments in [["--help"], *([name, "--help"] for name in COMMANDS if name in ("live",))]:
        out = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert out.returncode == 0, out.stderr
        assert "usage: zeroresize" in out.stdout


def test_what_is_no_file_is_passed_over_and_what_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "folder.jsonl").mkdir()
    write(tmp_path / "status.jsonl", at(20))
    assert main(["live", "--once", str(tmp_path), str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("step 20;") == 1
    group = live.Group(tmp_path / "status.jsonl")
    group.path.unlink()
    with pytest.raises(CommandError, match=r"status.jsonl: cannot be read: No such file or directory"):
        group.look()


def test_without_rich_it_is_said_what_to_install(tmp_path, capsys, monkeypatch):
    write(tmp_path / "status.jsonl", at(10))
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "zeroresize.utils.console", raising=False)
    assert main(["live", "--once", str(tmp_path)]) == 2
    assert "pip install 'zeroresize[cli]'" in capsys.readouterr().err

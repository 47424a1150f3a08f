"""What all commands have in common: help without torch, and errors of one line."""

import importlib.util
import subprocess
import sys

import pytest

from zeroresize.commands.__main__ import COMMANDS, main

#: Runs the command line, and says what it has imported.
SEEN = """
import sys
from zeroresize.commands.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("torch" in sys.modules, end.code)
"""
PRESENT = [name for name in COMMANDS if importlib.util.find_spec(f"zeroresize.commands.{name}")]


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in PRESENT)], ids=" ".join)
def test_help_comes_without_torch(arguments):
    command = [sys.executable, "-c", SEEN, *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith("usage: zeroresize")
    assert said.splitlines()[-1] == "False 0"


def error_of(arguments, capsys):
    """The one line of an error, without its beginning."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    beginning = f"zeroresize {arguments[0]}: "
    assert line.startswith(beginning)
    return line.removeprefix(beginning)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--seconds", "1"], "--seconds 1 is not allowed: a number from 4 to 3600 is needed"),
        (["demo", "--seconds", "nan"], "--seconds nan is not allowed: a number from 4 to 3600 is needed"),
        (["demo", "--chi", "0.5"], "--chi 0.5 is not allowed: a number from 1 to 100 is needed"),
        (["probe", "--seconds", "0"], "--seconds 0 is not allowed: a number from 1 to 600 is needed"),
    ],
)
def test_what_is_not_allowed_is_named(arguments, expected, capsys):
    assert error_of(arguments, capsys) == expected


@pytest.mark.parametrize("name", ["demo", "probe"])
def test_rich_is_asked_for(name, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "zeroresize.utils.console", raising=False)
    assert error_of([name], capsys) == "needs the package rich: pip install 'zeroresize[cli]'"


def test_a_status_that_is_there_is_kept(tmp_path, capsys):
    path = tmp_path / "status.jsonl"
    path.write_text("{}\n")
    assert error_of(["demo", "--folder", str(tmp_path)], capsys) == (
        f"--folder {tmp_path}: a status.jsonl cannot be made there: File exists"
    )
    assert path.read_text() == "{}\n"


@pytest.mark.parametrize("where", ["importlib.import_module", "zeroresize.commands.probe.run"])
def test_an_interrupt_ends_a_command_with_one_line_also_while_it_is_imported(monkeypatch, capsys, where):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == "zeroresize probe: interrupted\n"

"""Whoever waits is told how far it is: by a bar on a terminal, else by lines, and only of what takes long."""

import io
import queue
import sys
import threading

import pytest

from zeroresize.utils import progress
from zeroresize.utils.progress import Progress

LIMIT_S = 60.0


class Lines:
    """Takes lines as they come, so that no clock is needed: the next one waits until somebody has looked for it."""

    def __init__(self):
        self._lines = queue.Queue()

    def __call__(self, line):
        self._lines.put(line)

    def beginning_with(self, text):
        while not (line := self._lines.get(timeout=LIMIT_S)).startswith(text):
            pass
        return line


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1e-3)


def test_lines_tell_how_far_it_is_and_how_long_it_has_taken():
    lines = Lines()
    with Progress("runs", 3, tell=lines) as shown:
        assert lines.beginning_with("runs: 0 of 3, ")[-1] == "s"
        shown.advance("the second")
        lines.beginning_with("runs: 1 of 3 (the second), ")


def test_of_what_nobody_knows_how_much_there_is_it_is_told_how_much_is_done():
    lines = Lines()
    with Progress("forwards", tell=lines) as shown:
        lines.beginning_with("forwards, ")
        shown.advance()
        lines.beginning_with("forwards: 1, ")


@pytest.mark.parametrize("is_shown", [True, False])
def test_nothing_is_told_of_what_is_over_soon_or_is_for_another_rank_to_tell(monkeypatch, is_shown):
    monkeypatch.setattr(progress, "_QUIET_S", threading.TIMEOUT_MAX if is_shown else 0.0)
    lines = []
    with Progress("runs", 3, tell=lines.append, is_shown=is_shown) as shown:
        shown.advance()
    assert lines == []


@pytest.mark.parametrize("is_terminal", [False, True])
def test_off_a_terminal_and_without_rich_lines_go_to_stderr(monkeypatch, is_terminal):
    lines = Lines()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "write", lines, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    if is_terminal:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    with Progress("runs"):
        lines.beginning_with("runs, ")


def test_on_a_terminal_a_bar_is_drawn_and_gone_at_the_end(monkeypatch):
    stream, is_there, started = io.StringIO(), threading.Event(), Progress._started_bar
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)

    def start(shown):
        shown._bar = started(shown)
        is_there.set()
        return shown._bar

    monkeypatch.setattr(Progress, "_started_bar", start)
    with Progress("steps", 40) as shown:
        assert is_there.wait(LIMIT_S)
        shown.advance("fast")
        shown._bar.refresh()
        print("a line above", file=sys.stderr)
    text = stream.getvalue()
    assert "0/40" in text and "1/40" in text and "fast" in text and "a line above\n" in text
    assert text.endswith("\x1b[2K")  # the bar's line is empty again


def test_it_ends_with_an_error_too():
    shown = Progress("runs", tell=Lines())
    with pytest.raises(KeyboardInterrupt), shown:
        raise KeyboardInterrupt
    assert not shown._thread.is_alive()

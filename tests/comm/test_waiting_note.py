"""A note is left by long waits only, and a store that does not answer holds up nobody."""

import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from zeroresize.comm import waiting_note
from zeroresize.comm.waiting_note import WaitingNote

LONG_S = 0.02


@pytest.fixture
def note():
    store = SimpleNamespace(time_limit=timedelta(seconds=10 * LONG_S), store=dist.HashStore())
    made = WaitingNote(store)
    yield made
    made.close()


def until(holds, most_s=10.0):
    end = time.monotonic() + most_s
    while not holds() and time.monotonic() < end:
        time.sleep(LONG_S)
    return holds()


def test_a_long_wait_leaves_a_note_and_the_newest_stays(note):
    assert note.read() is None
    for text in ("first", "second"):
        with note.left_if_long(text):
            assert until(lambda: note.read() == text)  # noqa: B023 - called within the turn
    assert note.read() == "second"


def test_short_waits_leave_none(note):
    for number in range(200):
        with note.left_if_long(str(number)):
            pass
    time.sleep(5 * LONG_S)
    assert note.read() is None


def test_who_makes_no_progress_looks_less_and_less_often(note):
    class Watched:
        steps = looks = 0

        def progress(self):
            return self.steps

        def look(self):
            self.looks += 1

    watched = Watched()
    note.look_when_stuck(watched.progress, watched.look)
    with note.left_if_long(""):
        pass
    assert until(lambda: watched.looks == 3)
    watched.steps = 1
    assert until(lambda: watched.looks == 4)


def test_what_is_watched_is_freed_by_who_drops_it_not_by_the_thread_that_ends_later(note):
    class Watched:
        was_asked = threading.Event()

        def progress(self):
            self.was_asked.set()
            return 0

        def look(self):
            pass

    watched = Watched()
    note.look_when_stuck(watched.progress, watched.look)
    with note.left_if_long(""):
        pass
    assert watched.was_asked.wait(10.0)
    time.sleep(LONG_S / 2)  # the thread waits to ask again
    weak = weakref.ref(watched)
    del watched
    assert weak() is None


def test_python_shuts_down_only_when_a_look_has_ended(note):
    class Watched:
        looks, has_ended = threading.Event(), False

        def progress(self):
            return 0

        def look(self):
            self.looks.set()
            time.sleep(0.3)
            self.has_ended = True

    watched = Watched()
    note.look_when_stuck(watched.progress, watched.look)
    with note.left_if_long(""):
        pass
    assert watched.looks.wait(10.0)
    waiting_note._end_threads()
    assert watched.has_ended


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch):
    monkeypatch.setattr(waiting_note, "_ANSWER_S", 0.1)
    asked = []
    store = SimpleNamespace(check=lambda keys: asked.append(keys) or time.sleep(2))
    note = WaitingNote(SimpleNamespace(time_limit=timedelta(seconds=1), store=store))
    assert note.read() is None and note.read() is None
    assert len(asked) == 1

"""What a file or a call says of balancing, and what ranks agree on."""

from types import SimpleNamespace

import pytest

from zeroresize.comm import pausing
from zeroresize.comm.pausing import VARIABLE, Restraint


@pytest.fixture
def restraint(tmp_path, monkeypatch):
    monkeypatch.setattr("zeroresize.comm.pausing.READ_EVERY_S", 0.0)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "balancing"))
    return Restraint()


def test_the_first_word_of_the_file_counts_and_what_is_no_word_is_warned_of_once(restraint, tmp_path, caplog):
    file = tmp_path / "balancing"
    assert restraint.wish() == 0.0
    for text, wish in (("off", 2.5), (" advice\nuntil Monday", 1.5), ("Off", 1.5), ("", 1.5), ("on of course", 0.0)):
        file.write_text(text)
        assert restraint.wish() == wish, text
    file.write_text("off")
    assert restraint.wish() == 2.5
    file.unlink()
    assert restraint.wish() == 0.0
    file.mkdir()
    assert restraint.wish() == 0.0
    (warning,) = caplog.messages
    assert str(file) in warning and "'Off'" in warning and "words on, advice and off" in warning


def test_the_most_restrained_wish_of_any_rank_holds_and_one_rank_says_so(restraint, tmp_path, caplog):
    (tmp_path / "balancing").write_text("advice")
    caplog.set_level("INFO")
    restraint.of_call = 2
    assert restraint.wish() == 2.0
    for wishes, state in (([0.0, 0.0], "on"), ([1.5, 0.0], "advice"), ([1.5, 2.0], "off"), ([0.0, 0.0], "on")):
        restraint.agree(wishes, 7, tells=True)
        assert restraint.state == state
    restraint.agree([1.0], 8, tells=False)
    assert caplog.messages == [
        f"balancing is paused (advice only) since step 7, as the file of {VARIABLE} says",
        "balancing is paused since step 7, as pause() says",
        "balancing goes on since step 7, as every rank says",
    ]


def test_the_file_is_read_at_most_once_a_second(tmp_path, monkeypatch):
    read_at, times = [], (0.0, 0.25, 0.5, 0.75, 1.25, 1.5, 1.75, 2.0, 2.25, 6.0, 6.75)
    clock = SimpleNamespace(monotonic=lambda: times[len(wishes)])

    def opened(*arguments, **options):
        read_at.append(clock.monotonic())
        return open(*arguments, **options)

    file = tmp_path / "balancing"
    file.write_text("off")
    monkeypatch.setenv(VARIABLE, str(file))
    monkeypatch.setattr(pausing, "open", opened, raising=False)
    monkeypatch.setattr(pausing, "time", clock)
    restraint, wishes = Restraint(), []
    for _ in times:
        wishes.append(restraint.wish())
        file.write_text("advice")
    assert read_at == [0.0, 1.25, 2.25, 6.0] and wishes == [2.5] * 4 + [1.5] * 7


def test_where_no_file_is_named_none_is_read(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("builtins.open", None)
    assert Restraint().wish() == 0.0

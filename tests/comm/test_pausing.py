"""What a file or a call says of balancing, and what ranks agree on."""

from types import SimpleNamespace

import pytest

from zeroresize.comm import pausing
from zeroresize.comm.pausing import VARIABLE, Pausable, Restraint


@pytest.fixture
def restraint(tmp_path, monkeypatch):
    monkeypatch.setattr("zeroresize.comm.pausing.READ_EVERY_S", 0.0)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "balancing"))
    return Restraint()


def test_the_first_word_of_the_file_counts_and_what_is_no_word_changes_nothing(restraint, tmp_path, caplog):
    file = tmp_path / "balancing"
    assert restraint.wish() == 0.0
    for text, wish in (
        ("off", 2.5),
        (" advice\nuntil Monday", 1.5),
        ("Offline", 1.5),
        ("", 1.5),
        ("on of course", 0.0),
    ):
        file.write_text(text)
        assert restraint.wish() == wish, text
    file.write_text("off")
    assert restraint.wish() == 2.5
    file.unlink()
    assert restraint.wish() == 0.0
    file.mkdir()
    assert restraint.wish() == 0.0
    assert all(str(file) in line and "words on, advice and off" in line for line in caplog.messages)
    assert ["offline" in line for line in caplog.messages] == [True, False, False]


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


def test_words_may_be_in_capitals_and_each_other_word_is_refused_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pausing, "READ_EVERY_S", 0.0)
    file = tmp_path / "balancing"
    monkeypatch.setenv(VARIABLE, str(file))
    restraint = Restraint()
    for text, wish, refused in (("OFF please", 2.5, 0), ("halt", 2.5, 1), ("halt", 2.5, 1), ("", 2.5, 2), ("On", 0, 2)):
        file.write_text(text)
        assert restraint.wish() == wish and len(caplog.messages) == refused
    assert "begins with none of the words on, advice and off" in caplog.text and "'halt'" in caplog.text


@pytest.mark.parametrize("advice", ["advice", "no", 1])
def test_advice_is_true_or_false(advice):
    with pytest.raises(ValueError, match=f"advice={advice!r} is not allowed: true or false"):
        Pausable().pause(advice)


def test_where_no_file_is_named_none_is_read(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("builtins.open", None)
    assert Restraint().wish() == 0.0

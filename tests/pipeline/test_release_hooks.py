"""A command hears of a release, and nothing it does can harm anybody."""

import json
import logging
import sys
import time

import pytest

from zeroresize.pipeline import CommandHook, Release
from zeroresize.pipeline.release_hooks import tell_outside

RELEASE = Release(rank=3, released=(2, 3), remaining=(0, 1), moved_bytes=10, step=40)
TELL = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps([sys.argv[2:], dict(os.environ)]))"


def test_a_command_is_told_by_arguments_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT", "as it was")
    CommandHook([sys.executable, "-c", TELL, tmp_path / "told", "{rank} {{of}} {step}", "; exit 1"])(RELEASE)
    arguments, environment = json.loads((tmp_path / "told").read_text())
    assert arguments == ["3 {of} 40", "; exit 1"]
    assert json.loads(environment["ZERORESIZE_RELEASE"]) == {
        "rank": 3,
        "released": [2, 3],
        "remaining": [0, 1],
        "moved_bytes": 10,
        "step": 40,
    }
    assert (environment["ZERORESIZE_RELEASED"], environment["ZERORESIZE_REMAINING"]) == ("2,3", "0,1")
    assert environment["KEPT"] == "as it was"
    assert (environment["ZERORESIZE_RANK"], environment["ZERORESIZE_STEP"]) == ("3", "40")
    assert environment["ZERORESIZE_MOVED_BYTES"] == "10"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-program"], r"\['no-such-program'\] cannot be started: .*No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('no such pod')"], "ended with status 1: no such pod"),
        ([sys.executable, "-c", "import time; time.sleep(20)"], r"has not ended within 0\.3 s"),
    ],
)
def test_a_command_that_fails_is_told_and_is_no_more_than_a_warning(command, message, caplog):
    hook, heard = CommandHook(command, timeout_s=0.3 if "sleep" in command[-1] else 20.0), []
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        hook(RELEASE)
    assert time.monotonic() - begin < 10.0
    with caplog.at_level(logging.WARNING):
        tell_outside([hook, heard.append], RELEASE)
    assert "rank 3 is released, but the outside has not been told: CommandHook: [" in caplog.text
    assert heard == [RELEASE]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ([], {}, "wanted are a program and its arguments"),
        ("echo {rank}", {}, "wanted are a program and its arguments, as a list"),
        (["echo", "{node}"], {}, r"\{rank\} and \{step\} can be filled in"),
        (["echo", "{"], {}, "braces that are meant as such are doubled"),
        (3, {}, "command=3 is not allowed: wanted are a program and its arguments, as a list"),
        (None, {}, "command=None is not allowed"),
        (["echo"], {"timeout_s": 0.0}, "timeout_s=0.0 is not allowed"),
        (["echo"], {"timeout_s": "5"}, "timeout_s='5' is not allowed: a finite number above 0 is needed"),
    ],
)
def test_wrong_options_are_errors_at_once(command, options, message):
    with pytest.raises(ValueError, match=message):
        CommandHook(command, **options)

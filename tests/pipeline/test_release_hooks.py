"""Hooks hear of a release, and nothing they do can harm anybody."""

import logging

from zeroresize.pipeline import Release
from zeroresize.pipeline.release_hooks import tell_outside


def test_a_hook_that_fails_is_no_more_than_a_warning(caplog):
    release, heard = Release(rank=3, released=(2, 3), remaining=(0, 1), moved_bytes=10, step=40), []

    def fails(release):
        raise RuntimeError("no such pod")

    with caplog.at_level(logging.WARNING):
        tell_outside([fails, heard.append], release)
    assert "rank 3 is released, but the outside has not been told: function: no such pod" in caplog.text
    assert heard == [release]

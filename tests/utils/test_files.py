"""Files that are whole, or as they were."""

import pytest
from helpers.faults import files_of_at_most

from zeroresize.policy.microbatches.costs import CostTable
from zeroresize.utils.files import write_whole


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "some.json"
    write_whole(path, "before")
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        write_whole(path, "x" * 2000)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    write_whole(path, b"after")
    assert path.read_bytes() == b"after"


def test_a_full_disk_leaves_the_costs_that_there_were(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text("before")
    monkeypatch.setattr("zeroresize.policy.microbatches.costs.encoded", lambda table: "x" * 2000)
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        CostTable.save(None, path)
    assert path.read_text() == "before"

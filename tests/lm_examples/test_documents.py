"""Documents of long-tailed lengths: cut where functions begin, drawn by seed and step alone."""

import numpy as np
import pytest
import torch

from lm_examples.data import read_files
from lm_examples.documents import DocumentsConfig, MiniBatches, definitions, lengths_of, sources_of

SOURCE = b"""import this

class A:
    x = 1

    def first(self):
        def inner():
            return 1
        return inner

    @property
    @cached
    def second(self):
        return 2

@wraps
async def third():
    pass
"""


def documents_of(folder, **data):
    for number in range(6):
        (folder / f"{number}.py").write_bytes(bytes([71 + number]) * 200 + b"\n" + SOURCE)
    config = DocumentsConfig(folder=str(folder), **data)
    return sources_of(config, read_files(config))


def test_sources_are_cut_before_each_definition_and_its_decorators():
    parts = definitions(SOURCE)
    assert b"".join(parts) == SOURCE
    begins = [b"import", b"class", b"    def first", b"    @property\n    @cached\n    def second", b"@wraps\nasync"]
    assert [part.startswith(one) for part, one in zip(parts, begins, strict=True)] == [True] * 5


@pytest.mark.parametrize("lengths", ["definitions", "files", "commoncrawl", "github"])
def test_a_mini_batch_depends_on_seed_and_step_alone_and_is_as_large_as_asked_for(tmp_path, lengths):
    documents = documents_of(tmp_path, lengths=lengths, max_length=60)
    first, again = (MiniBatches(documents, tokens=500, seed=3) for _ in range(2))
    rows = first.training(7)
    assert all(map(torch.equal, rows, again.training(7))) and lengths_of(rows).sum() == 500
    assert rows[0].dtype == torch.int64 and lengths_of(rows).min() >= 1 and lengths_of(rows).max() <= 60
    others = [first.training(8), MiniBatches(documents, tokens=500, seed=4).training(7), first.validation(7)]
    assert all(torch.cat(one).tolist() != torch.cat(rows).tolist() for one in others)
    held_out = {chr(one) for row in first.validation(0) for one in row.tolist()}
    assert len(held_out & set("GHIJKL")) == 1  # of one file alone


def test_whole_documents_end_with_the_end_and_cut_ones_do_not(tmp_path):
    documents = documents_of(tmp_path, lengths="definitions", max_length=60)
    random = np.random.default_rng(0)
    rows = {bytes(documents[0](random).tolist()) for _ in range(500)}
    assert b"@wraps\nasync def third():\n    pass" + b"\0" in rows
    assert {len(row) for row in rows if row[-1] != 0} == {61}

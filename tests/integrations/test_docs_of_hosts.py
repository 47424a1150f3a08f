"""docs/hosts: the program of each page runs as it stands, and the table of hosts names tests that there are."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.dtensor_models import mesh_of
from torch import nn

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "docs" / "hosts"


def program_of(page):
    """The names that the first program of a page defines."""
    program, *_ = re.findall(r"```python\n(.*?)```", (HOSTS / page).read_text(), re.DOTALL)
    names = {"__name__": page}
    exec(compile(program, page, "exec"), names)
    return names


def test_torchs_program_trains_as_one_process_and_saves_what_it_learned(run_ranks, tmp_path):
    names = program_of("torch.md")
    torch.manual_seed(0)
    whole = names["Model"]()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = []
    for step in range(6):
        words = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(whole(words).flatten(0, 1), words.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    (losses, weights), (other_losses, _) = run_ranks(
        lambda rank, group: names["main"](mesh_of(), tmp_path / "checkpoint"), 2
    )
    assert losses == other_losses == pytest.approx(expected, abs=1e-5)
    state = names["Model"]().state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state[name], weights[name], atol=0, rtol=0)


def test_the_table_of_hosts_names_tests_that_there_are():
    page = (HOSTS / "README.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 20
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in files.get(file, "")] == []

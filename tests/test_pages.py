"""Each block of Python in README and docs runs, or says what it continues or needs and names what there is."""

import re
import sys

import pytest
import torch
from helpers.pages import PAGES, ROOT, Block, blocks_of, faults_of
from torch import nn
from torch.utils.data import TensorDataset

BLOCKS = {str(page.relative_to(ROOT)).removeprefix("docs/"): blocks_of(page) for page in PAGES}
for path in ROOT.glob("docs/programs/*.py"):
    BLOCKS[f"programs/{path.name}"] = [Block(f"programs/{path.name}", 1, "", "", path.read_text())]

#: Pages whose programs run here; those of others run by the tests that are named.
HERE = ("checking.md", "data_parallel.md", "microbatches.md", "pipelines.md", "strategies.md", "what_if.md")
ELSEWHERE = {
    "README.md": "test_readme.py",
    "adding_a_host.md": "integrations/test_hosts.py",
    "hosts/transformers.md": "integrations/test_host_pages.py",
    **{page: "integrations/test_host_pages.py" for page in BLOCKS if page.startswith("programs/")},
    "programs/own_products.py": "integrations/test_hosts.py",
    "programs/own_forward.py": "integrations/test_host_forward.py",
}
#: Pages of fragments, each of which continues a program of the reader's.
FRAGMENTS = ("commands.md", "watching.md")
#: Programs are made shorter: few steps, and costs of few shapes.
SHORTER = {
    r"for (step|iteration) in range\(\w+\)": r"for \1 in range(3)",
    r"STEPS, SIZES = 20": "STEPS, SIZES = 3",
    r"most_rows=64, longest=\(512,\), most_tokens=8192": "most_rows=8, longest=(32,), most_tokens=256",
    r"\(64, 1\)\), 2, 512": "(8, 1)), 2, 32",
    r"torch\.randint\(2, 1024, \(16,\)": "torch.randint(2, 256, (4,)",
}


@pytest.mark.parametrize("page", [page for page in BLOCKS if BLOCKS[page]])
def test_blocks_compile_and_name_what_the_package_has(page):
    assert {f"line {block.line}": fault for block in BLOCKS[page] for fault in faults_of(block)} == {}


def test_a_name_or_keyword_that_the_package_does_not_have_is_told():
    def faults(text):
        return list(faults_of(Block("page.md", 1, "", "", text)))

    assert faults("zr.Balancer(model, optimizer)\nbalancer.what_if()") == []
    assert faults("zr.Balanser(model)") == ["zr has no Balanser"]
    assert faults("zr.watch(model, tolerence=1)") == ["zr.watch does not take all of ['tolerence']"]
    assert faults("balancer.what_iff()") == ["balancer.what_iff does not exist"]
    assert faults("from zeroresize.pipeline import Pipelines") == ["zeroresize.pipeline has no Pipelines"]


def test_each_block_runs_or_says_what_it_continues_or_needs():
    unmarked = {page for page, blocks in BLOCKS.items() if any(not block.mark for block in blocks)}
    assert sorted(unmarked - {*HERE, *FRAGMENTS} - ELSEWHERE.keys()) == []
    for page, test in ELSEWHERE.items():
        assert page.rpartition("/")[2] in (ROOT / "tests" / test).read_text(), f"{test} does not run {page}"


def program_of(page: str) -> list[str]:
    """What runs of a page, one block after another in the same namespace, made shorter."""
    texts = [block.text for block in BLOCKS[page] if block.mark != "needs"]
    for long, short in SHORTER.items():
        texts = [re.sub(long, short, text) for text in texts]
    return texts


def use_functions_of(page: str, names: dict) -> None:
    """Call what a page only defines."""
    if page == "data_parallel.md":
        torch.manual_seed(0)
        rows = TensorDataset(torch.randn(128, 8), torch.randint(4, (128,)))
        model = nn.Linear(8, 4)
        assert names["check"](model, rows[:64]) == []
        names["train"](model, rows, 1)


def test_programs_run_on_two_ranks(run_ranks, tmp_path, monkeypatch):
    (lengths, *_) = program_of("microbatches.md")
    (tmp_path / "lengths.py").write_text(lengths)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)

    def check(rank, group):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.init_process_group", lambda *_: None)
            patch.setattr("torch.distributed.destroy_process_group", lambda *_: None)
            for page in HERE:
                names = {"__name__": page}
                for text in program_of(page):
                    exec(compile(text, page, "exec"), names)
                use_functions_of(page, names)

    run_ranks(check, 2, timeout_s=110)

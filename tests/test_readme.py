"""README: short, and its program runs when it is copied out, as one that trains the undivided model does."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.pages import ROOT, blocks_of

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

README = ROOT / "README.md"
(PROGRAM,) = (block.text for block in blocks_of(README))
(SAVING,) = blocks_of(ROOT / "docs" / "start.md")


def test_it_is_short_and_attaching_takes_ten_lines_at_most():
    assert len(README.read_text().splitlines()) <= 110
    needed = [
        line
        for line in PROGRAM.splitlines()
        if re.search(r"zr\.|parallelize_module\(|mesh = |balancer\.|for block in", line)
    ]
    assert len([line for line in needed if "StragglerInjector" not in line and "print" not in line]) <= 11


@pytest.mark.slow
@pytest.mark.timeout(400)  # on a loaded machine
def test_its_program_runs_when_it_is_copied_out(tmp_path):
    (tmp_path / "gpt.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*torchrun, tmp_path / "gpt.py"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"(?m)^.+: \d+ ms a step, loss (\d+\.\d+)$", run.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert re.search(r"(?m)^rank +busy +speed +share", run.stdout), run.stdout


def test_its_program_trains_as_one_process_also_when_units_have_moved(run_ranks, tmp_path, monkeypatch):
    attached, begins, rest = PROGRAM.partition("\n\ndef train(")
    rest = re.sub(r'(?m)(train\(".*", )\d+\)$', r"\g<1>2)", begins + rest)
    defined, _, _ = attached.partition("\ndist.init_process_group")

    def words_of(step, names):
        return torch.randint(256, (2, names["TOKENS"] + 1), generator=torch.Generator().manual_seed(step))

    def loss_of(model, words):
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    whole_names = {}
    exec(compile(defined, "README.md", "exec"), whole_names)
    torch.manual_seed(0)
    whole = whole_names["GPT"]()
    of_whole, expected = torch.optim.AdamW(whole.parameters(), lr=1e-3), []
    for step in range(4):
        loss = loss_of(whole, words_of(step, whole_names))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        of_whole.step()
        of_whole.zero_grad()
        expected.append(loss.item())

    def check(rank, group):
        names = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.init_process_group", lambda *_: None)
            exec(compile(attached, "README.md", "exec"), names)
        model, optimizer, balancer, losses = names["model"], names["optimizer"], names["balancer"], []
        assert len(owned_segments(balanced_layers(model))) == 4
        for step in range(4):
            loss = loss_of(model, words_of(step, names))
            loss.backward()
            zr.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
            if step == 1:
                balancer.move((3, 1))
                assert balancer.plan.owned != (1.0, 1.0)
            losses.append(loss.item())
        assert losses == pytest.approx(expected, abs=1e-4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.destroy_process_group", lambda: None)
            for text in (rest, SAVING.text):
                exec(compile(text, "README.md", "exec"), names)

    monkeypatch.chdir(tmp_path)
    run_ranks(check, 2)

"""Released ranks end while the others train on, in a job as users start it, and where rank 0 hosts the store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

PROGRAM = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from zeroresize.pipeline import Pipeline, repack

folder = Path(sys.argv[1])
dist.init_process_group("gloo", **eval(sys.argv[2]), timeout=timedelta(seconds=20))
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(6)]
pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, process_group=dist.group.WORLD)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
hooks = [
    lambda release: (folder / f"released {release.rank} after {release.step}").touch(),
    lambda release: (folder / "no such folder" / "file").touch(),
]
left = {3: 3, 6: 2, 9: 1}
for step in range(12):
    if step in left and repack(pipeline, optimizer, num_stages=left[step], on_release=hooks, step=step).is_released:
        break
    if step in left:  # those that were released have really ended
        time.sleep(0.5)
    x = torch.arange(32, dtype=torch.float64).view(8, 4).sin() + step
    optimizer.zero_grad()
    loss = pipeline.step(x, target=x)
    optimizer.step()
    if loss is not None:
        (folder / f"loss {step}").write_text(str(loss.item()))
dist.destroy_process_group()
(folder / f"end {rank}").write_text(str(step))
"""


def undivided_losses():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(12):
        x = torch.arange(32, dtype=torch.float64).view(8, 4).sin() + step
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def require_released_in_turn(folder):
    ends = {int(path.name.split()[1]): int(path.read_text()) for path in folder.glob("end *")}
    assert ends == {0: 11, 1: 9, 2: 6, 3: 3}
    assert sorted(path.name for path in folder.glob("released *")) == [
        "released 1 after 9",
        "released 2 after 6",
        "released 3 after 3",
    ]
    losses = [float((folder / f"loss {step}").read_text()) for step in range(12)]
    assert losses == pytest.approx(undivided_losses(), rel=1e-10, abs=0.0)


def program_in(folder):
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return folder / "program.py", environment


@pytest.mark.slow
def test_torchrun_takes_released_ranks_for_ranks_that_have_ended_well(tmp_path):
    program, environment = program_in(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*torchrun, program, tmp_path, "{}"], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the outside has not been told: ") == 3, done.stderr
    require_released_in_turn(tmp_path)

#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: two things happen without a message.
#
# 1. Gradients that are accumulated over several schedule.step() calls are divided by the number of micro-batches anew
#    each time, what was accumulated before included. A guess would be that each step divides its own part. Seen with
#    four micro-batches: after 1, 2, 3 steps on one batch the gradient is 1, 1.25, 1.3125 times that of the batch.
#    Way out: scale_grads=False and a loss that is divided by the user, or no accumulation.
# 2. schedule.eval() of 5 rows in 4 micro-batches returns 8 rows: rows are cut into pieces of two, and of the micro-batch
#    that is not there something is returned all the same.
#    Way out: evaluate batches that the number of micro-batches divides.
# Two CPU ranks (gloo). Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

warnings.simplefilter("ignore")


def run(rank, folder):
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6).double() for _ in range(2)]
    whole = nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(2)))
    whole.load_state_dict(nn.Sequential(*layers).state_dict())
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    F.mse_loss(whole(x), y).backward()
    schedule = ScheduleGPipe(PipelineStage(layers[rank], rank, 2, torch.device("cpu")), 4, loss_fn=F.mse_loss)
    for number, expected in ((1, 1.0), (2, 1.25), (3, 1.3125)):
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
        torch.testing.assert_close(layers[rank].weight.grad, expected * whole[rank].weight.grad)
        if rank == 0:
            print(f"after {number} steps on one batch: {expected} times its gradient")

    schedule = ScheduleGPipe(PipelineStage(layers[rank], rank, 2, torch.device("cpu")), 4, loss_fn=F.mse_loss)
    if rank == 0:
        schedule.eval(x[:5])
    else:
        outputs = schedule.eval(target=y[:5], losses=[])
        assert outputs.shape == (8, 6), outputs.shape
        print(f"eval of 5 rows in 4 micro-batches returns {outputs.shape[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/program.py" "$folder"

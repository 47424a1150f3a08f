#!/usr/bin/env bash
# prodigyopt 1.1.2 and dadaptation 3.2 under torch 2.13.0's fully_shard: every rank takes another step size, and the model
# drifts away from the one that is not sharded. No message.
#
# Both work out their step size d from sums over all parameters. On DTensors these sums end as numbers of the local
# shard. Prodigy promises to notice PyTorch's FSDP by itself; it looks for a mark that FullyShardedDataParallel puts on
# parameters and fully_shard does not, and what it does then works on CUDA only.
# Seen on two CPU ranks (gloo), a model of 420 parameters, 200 steps:
#     Prodigy     d = 0.0443 undivided; 0.0586 and 0.0290 on the ranks; weights off by 0.83 to 1.35 of their change
#     DAdaptAdam  d = 0.1617 undivided; 0.1443 and 0.1778 on the ranks; weights off by 1.14 to 2.04 of their change
# Way out: fsdp_in_use=True of Prodigy on GPUs, or an optimizer of given step size. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0
"$folder/venv/bin/pip" install -q --no-deps prodigyopt==1.1.2 dadaptation==3.2
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dadaptation import DAdaptAdam
from prodigyopt import Prodigy
from torch import nn
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def trained(model, kind):
    """Return d after 200 steps, with equal batches on all ranks."""
    optimizer = kind(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        y = torch.stack([x.sum(1), x.prod(1), x[:, 0], x[:, 1] * x[:, 2]], 1)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(optimizer.param_groups[0]["d"])


def run(rank, folder):
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    for kind in (Prodigy, DAdaptAdam):
        before, whole, sharded = made(), made(), made()
        expected = trained(whole, kind)
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (2,)))
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, trained(sharded, kind))
        parameters = zip(before.parameters(), whole.parameters(), sharded.parameters(), strict=True)
        errors = [float((is_.full_tensor() - right).norm() / (right - was).norm()) for was, right, is_ in parameters]
        assert max(of_ranks) > 1.1 * min(of_ranks), of_ranks
        assert min(errors) > 0.5, errors
        if rank == 0:
            shown = " and ".join(f"{d:.4f}" for d in of_ranks)
            print(f"{kind.__name__}: d = {expected:.4f} undivided; {shown} on the ranks; "
                  f"weights off by {min(errors):.2f} to {max(errors):.2f} of their change")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/program.py" "$folder"

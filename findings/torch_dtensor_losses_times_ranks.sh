#!/usr/bin/env bash
# torch 2.13.0, DTensor: five losses of torch.nn.functional give the right value and a gradient that is too large by the
# number of ranks, where input and target are sharded; their neighbours are right. No message.
#
# A guess would be that all pointwise losses with reduction="mean" behave alike. Seen on two CPU ranks (gloo), ratio of
# the gradient to that of plain tensors, sharded on rows or on columns:
#     mse_loss 2, huber_loss 2, smooth_l1_loss 2, binary_cross_entropy 2, soft_margin_loss 2
#     l1_loss 1, binary_cross_entropy_with_logits 1, kl_div 1, poisson_nll_loss 1, ((a - b) ** 2).mean() 1
# Way out: write the loss by elementary operations, or compute it on plain local tensors. Fails if that changes.
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
from torch.distributed.tensor import Shard, distribute_tensor

warnings.simplefilter("ignore")
TIMES_RANKS = {
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
}
RIGHT = {
    "l1_loss": F.l1_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "kl_div": F.kl_div,
    "poisson_nll_loss": F.poisson_nll_loss,
    "mean of squares": lambda x, y: ((x - y) ** 2).mean(),
}


def run(rank, folder):
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64)
    for expected, losses in ((2.0, TIMES_RANKS), (1.0, RIGHT)):
        for name, loss in losses.items():
            for dim in (0, 1):
                plain = x.clone().requires_grad_()
                loss(plain, y).backward()
                sharded = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
                value = loss(sharded, distribute_tensor(y, mesh, [Shard(dim)]))
                value.backward()
                ratio = sharded.grad.full_tensor() / plain.grad
                torch.testing.assert_close(ratio, torch.full_like(ratio, expected), msg=f"{name} over dimension {dim}")
                torch.testing.assert_close(value.full_tensor(), loss(x, y))
                if rank == 0:
                    print(f"{name}, sharded on dimension {dim}: value right, gradient x {expected:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/program.py" "$folder"

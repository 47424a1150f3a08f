"""Accelerate: torchrun --nproc-per-node 2 docs/programs/with_accelerate.py folder"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import zeroresize as zr


def main(folder, num_batches=24, goes_on=False):
    """Losses of batches, two of which make a step; the first half is saved in ``folder``, and can be gone on from."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=2)
    mesh = dist.init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(accelerator.device)
    parallelize_module(model, mesh["tp"], {"0": zr.ColwiseParallel(), "2": zr.RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    optimizer = accelerator.prepare(optimizer)  # not the model: it is split already, and not to be wrapped
    balancer = zr.Balancer(model, optimizer)
    state = {**zr.sharded_state_dict(model, optimizer), "balancer": balancer, "scheduler": scheduler}
    if goes_on:
        dcp.load(state, storage_reader=zr.CheckpointReader(folder))

    batches = torch.randn(num_batches, 32, 16, generator=torch.Generator().manual_seed(1)).to(accelerator.device)
    losses = []
    for number in range(num_batches // 2 if goes_on else 0, num_batches):
        with accelerator.accumulate(model), accelerator.autocast():
            loss = (model(batches[number]) - batches[number]).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
            balancer.step()
        losses.append(loss.item())
        if number + 1 == num_batches // 2 and not goes_on:
            dcp.save(state, checkpoint_id=folder)  # whole tensors, wherever units are
    balancer.close(at_home=True)
    return losses


if __name__ == "__main__":
    print("losses:", *main(sys.argv[1]))
    dist.destroy_process_group()

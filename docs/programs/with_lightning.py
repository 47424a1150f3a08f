"""Lightning's ModelParallelStrategy: torchrun --nproc-per-node 2 docs/programs/with_lightning.py folder"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

import zeroresize as zr
from zeroresize.integrations.lightning import BalanceCallback


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.is_split, self.losses = False, []

    def configure_model(self):
        if self.is_split:
            return  # Lightning calls this again for what it does next
        self.is_split = True
        plan = {"0": zr.ColwiseParallel(), "2": zr.RowwiseParallel()}
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, x, number):
        loss = (self.model(x) - x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder, num_ranks=2, **options):
    """Losses of the batches of one epoch."""
    module = Regression()
    trainer = Trainer(
        devices=num_ranks,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=num_ranks),
        callbacks=[BalanceCallback(), ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")],
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # the ranks of a group read the same batches
        logger=False,
    )
    batches = torch.randn(16, 32, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(batches, batch_size=None), **options)
    return module.losses


if __name__ == "__main__":
    print("losses:", *main(sys.argv[1]))
    torch.distributed.destroy_process_group()

"""Accuracy with uneven batches: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m scripts.study.data_parallel

The ViT of a configuration of ``vit_examples`` (``--config``, with the changes of ``--set``) trains under
DistributedDataParallel, each cell with every seed from the same weights on the same global batches: ``even`` ones, or
such that a DataBalancer divides, with nobody slow or with products of one rank, another in each epoch, χ times as long.
The table goes to ``--csv`` as that of ``scripts.study``: what has a row there does not run again. Of ``even`` batches
the weights are the same whoever is slow.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import zeroresize as zr
from scripts.bench.common import join_ranks, parser_of, run, show
from scripts.study.__main__ import Rows, read_table, write_csv
from vit_examples.batches import normalise
from vit_examples.config import RunConfig, load_config
from vit_examples.data import Split, load_splits
from vit_examples.model import build_vit, classification_loss, num_correct
from vit_examples.run import commit_of_code


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """A split, of which a loader takes whole batches."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return normalise(self.split.images[indices]), self.split.labels[indices]


def train(config: RunConfig, splits: tuple[Split, Split], cell: str, epochs: int) -> dict[str, Any]:
    """Train a cell, such as "balanced χ=2"; returns its figures."""
    training, num_ranks, num_labels = config.training, dist.get_world_size(), config.model.num_labels
    kind, chi = re.fullmatch(r"(even|balanced) χ=([\d.]+)", cell).groups()  # type: ignore[union-attr]
    model = DistributedDataParallel(build_vit(config.model, num_ranks=1, seed=training.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    size, changes, seconds = training.batch_size, list[zr.ChangeRecord](), list[float]()
    balancer = zr.DataBalancer(
        model,
        optimizer,
        global_batch=size,
        counts=[size // num_ranks] * num_ranks if kind == "even" else None,
        on_change=changes.append,
    )
    data = Pictures(splits[0])
    sampler = balancer.sampler(data, seed=training.seed, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / (training.warmup_steps + 1), 1))
    schedule = zr.round_robin(chi=float(chi))
    with zr.StragglerInjector(model, process_group=dist.group.WORLD, schedule=schedule) as injector:
        for epoch in range(epochs):
            injector.set_epoch(epoch)
            begin = time.perf_counter()
            for images, labels in loader:
                loss = classification_loss(model(images).logits, labels, num_labels)
                (loss * balancer.loss_scale(len(labels))).backward()
                optimizer.step()
                warmup.step()
                optimizer.zero_grad()
                balancer.step()
                seconds.append(time.perf_counter() - begin)
                begin = time.perf_counter()
    balancer.close()
    made = sum(record.is_made for record in changes)
    accuracy = evaluate(model.module, splits[1], num_labels, size)
    return {"test_accuracy": accuracy, "mean_step_ms": 1e3 * statistics.fmean(seconds), "changes": made}


@torch.no_grad()
def evaluate(model: Any, test: Split, num_labels: int, size: int) -> float:
    """Share of the test pictures that are classified rightly, of which each rank computes some."""
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    correct = torch.zeros((), dtype=torch.int64)
    for images, labels in zip(test.images[mine].split(size), test.labels[mine].split(size), strict=True):
        correct += num_correct(model(normalise(images)).logits, labels, num_labels)
    dist.all_reduce(correct)
    return correct.item() / len(test)


def main() -> None:
    cells, small = ["even χ=1", "balanced χ=1", "balanced χ=4"], ["model.patch_size=8"]
    parser = parser_of(__doc__, config="cifar_small", set=small, epochs=2, seeds=[0, 1, 2], cells=cells)
    parser.add_argument("--csv", type=Path, default=Path("runs/studies/data_parallel.csv"))
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    table = read_table(options.csv) if options.csv.exists() else []
    join_ranks(rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    rows: Rows = {(row["cell"], row["seed"]): dict(row) for row in table}
    for seed in options.seeds:
        config = load_config(options.config, [*options.set, f"training.seed={seed}"])
        splits = load_splits(config.data, config.model)
        for cell in options.cells:
            if (cell, str(seed)) not in rows:
                figures = train(config, splits, cell, options.epochs)
                rows[cell, str(seed)] = {"cell": cell, "seed": seed, **figures, "epochs": options.epochs}
                rows[cell, str(seed)] |= {"ranks": dist.get_world_size(), "commit": commit_of_code()}
                if rank == 0:
                    write_csv(rows, options.csv)
                    print(cell, seed, figures, flush=True)
    if rank == 0:
        shown = []
        for cell in options.cells:
            of_cell = [rows[cell, str(seed)] for seed in options.seeds]
            accuracy = [100 * float(row["test_accuracy"]) for row in of_cell]
            spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
            step_ms = statistics.fmean(float(row["mean_step_ms"]) for row in of_cell)
            shown.append([cell, f"{statistics.fmean(accuracy):.1f} ± {spread:.1f}", f"{step_ms:.0f}"])
        show("", ["cell", "accuracy, %", "mean step, ms"], shown)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

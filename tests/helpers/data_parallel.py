"""Data-parallel training in batches that a DataBalancer divides, and the same by one process on global batches."""

import copy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import zeroresize as zr
from zeroresize.data.sampler import BalancedBatchSampler
from zeroresize.data.timetable import Timetable
from zeroresize.policy.data.division import Division

FEATURES, WORDS, TOKENS = 8, 11, 5


class Rows(torch.utils.data.Dataset):
    """Rows of random words with their targets, of which some tokens, and all of some rows, are masked (-100)."""

    def __init__(self, number, masked=False):
        generator = torch.Generator().manual_seed(5)
        self.words = torch.randint(WORDS, (number, TOKENS), generator=generator)
        self.targets = torch.randint(WORDS, (number, TOKENS), generator=generator)
        if masked:
            self.targets[torch.rand(number, TOKENS, generator=generator) < 0.4] = -100

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return self.words[index], self.targets[index]


def words_model(dtype=torch.float64):
    """A small model of rows of words, alike on all ranks."""
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, FEATURES), nn.Linear(FEATURES, 2 * FEATURES), nn.GELU()
    return nn.Sequential(*layers, nn.LayerNorm(2 * FEATURES), nn.Linear(2 * FEATURES, WORDS)).to(dtype)


def wrapped(model, kind, group):
    """A model whose gradients the ranks average."""
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=group)
    num_ranks = dist.get_world_size(group)
    shape, names = ((2, num_ranks // 2), ("replicate", "shard")) if kind == "hsdp" else ((num_ranks,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model[1], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def global_batches(num_samples, global_batch, *, seed=0, epochs=1, drop_last=False):
    """The samples of each global batch, as one process has them."""
    alone = Timetable(Division.of_counts((1.0,)), 0, global_batch)
    sampler = BalancedBatchSampler(alone, num_samples, None, seed, True, drop_last)
    batches = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches += sampler
    return batches


def sum_loss(model, rows):
    words, targets = rows
    return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def counted_in(rows):
    return int((rows[1] != -100).sum())


def draw_counts(chance, num_ranks, total, least):
    """Numbers of samples at random, some of them 0; each other at least ``least``."""
    weights = chance.random(num_ranks) * (chance.random(num_ranks) > 0.25)
    if not weights.any():
        weights[0] = 1.0
    return Division.of_counts(tuple(weights), least=least).counts(total)


def trained_apart(group, kind, dataset, *, global_batch, epochs, num_micro_batches=1, micro_batch_size=None, clip=None):
    """Train by divisions that are drawn for each step; return gradients of each step, and weights."""
    model = wrapped(words_model(), kind, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    balancer = zr.DataBalancer(
        model,
        optimizer,
        global_batch=global_batch,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        process_group=group,
    )
    loader = DataLoader(dataset, batch_sampler=balancer.sampler(dataset, seed=3))
    chance, num_ranks, gradients, num_steps = np.random.default_rng(7), dist.get_world_size(group), [], 0

    def draw():
        counts = draw_counts(chance, num_ranks, global_batch, num_micro_batches)
        limits = (float("inf"),) * num_ranks
        balancer._timetable.add(num_steps, Division.of_counts(counts, limits, num_micro_batches))

    draw()
    for _ in range(epochs):
        for micro_batches in balancer.steps(loader):
            counted = sum(map(counted_in, micro_batches))
            scale = balancer.loss_scale(counted)
            for number, rows in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                if kind == "ddp":
                    model.require_backward_grad_sync = is_last
                else:
                    model.set_requires_gradient_sync(is_last)
                (sum_loss(model, rows) / max(counted, 1) * scale).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            gradients.append({name: full(each.grad) for name, each in named(model)})
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
            draw()
            balancer.step()
    return gradients, {name: full(each) for name, each in named(model)}


def trained_whole(dataset, *, global_batch, epochs, clip=None):
    """The same by one process."""
    model = words_model()
    optimizer, gradients = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for batch in global_batches(len(dataset), global_batch, seed=3, epochs=epochs):
        rows = dataset.words[batch], dataset.targets[batch]
        (sum_loss(model, rows) / counted_in(rows)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, dict(copy.deepcopy(model).named_parameters())


def named(model):
    return [(name.removeprefix("module."), each) for name, each in model.named_parameters()]


def full(tensor):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def assert_alike(apart, whole, most=1e-12):
    """Each tensor's difference in norm, of its own norm."""
    assert apart.keys() == whole.keys()
    for name, tensor in whole.items():
        difference = (apart[name] - tensor).norm() / tensor.norm().clamp(min=1e-30)
        assert difference <= most, (name, float(difference))

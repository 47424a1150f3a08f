"""Attention under grouped queries whose heads are units, and its training beside the undivided model's."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from helpers.on_ranks import gathered
from zeroresize.layers.local_parts import local_of

HEAD, WIDTH, HEADS = 4, 12, 8
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self, of_group, bias=True):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias, dtype=torch.float64)
        self.k, self.v = (nn.Linear(WIDTH, HEADS // of_group * HEAD, bias, dtype=torch.float64) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD, WIDTH, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def whole_model(of_group=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Attention(of_group), Attention(of_group, bias=False))


def split(group, of_group=4, host=None):
    """A model of this package's layers, or of DTensors by styles of torch or of this package."""
    model = whole_model(of_group)
    if host is not None:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        plan = {f"{number}.{name}": host.ColwiseParallel() for number in range(2) for name in "qkv"}
        plan |= {f"{number}.out": host.RowwiseParallel() for number in range(2)}
        return parallelize_module(model, mesh, plan)
    for attention in model:
        for name, unit in {"q": HEAD, "k": 1, "v": 1}.items():  # k and v as convert may divide them anew
            linear = getattr(attention, name)
            layer = zr.ColumnParallelLinear.from_linear(linear, process_group=group, unit_size=unit)
            setattr(attention, name, layer)
        attention.out = zr.RowParallelLinear.from_linear(attention.out, process_group=group, unit_size=HEAD)
    return model


def segment(number, of_group=4, num_ranks=2, **options):
    named = {
        "column": [f"{number}.q"],
        "shared": [f"{number}.k", f"{number}.v"],
        "row": f"{number}.out",
        "unit_size": HEAD,
        "group_size": of_group,
        "kind": "heads",
        "min_units": int(of_group != 4 or num_ranks > 2),  # else whole groups pay where so much is k and v
        "on_change": lambda units: None,
    }
    return zr.Segment(**named | options)


def divided(group, of_group=4, host=None, divisible=False, **options):
    segments = [segment(number, of_group, group.size(), divisible=divisible) for number in range(2)]
    return zr.convert(split(group, of_group, host), process_group=group, segments=segments, **options)


def train(model, optimizer, num_steps, clip, after_step=lambda: None, micro_batches=2):
    values = []
    for _ in range(num_steps):
        for part in X.chunk(micro_batches):
            loss = model(part).square().mean() / micro_batches
            loss.backward()
            values.append(loss.item())
        values.append(clip(model.parameters(), 0.02).item())
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return values


def sent_in_two_steps(model, optimizer, balancer):
    """Bytes of each message that is summed over ranks in two steps of one micro-batch; norms are not asked for."""
    sent, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", counting)
        train(model, optimizer, 2, lambda *_: torch.zeros(()), balancer.step, micro_batches=1)
    return sent


def balanced(group, of_group=4, host=None, *, wrap=lambda model: model, of_optimizer=None, divisible=False, **config):
    model = divided(group, of_group, host, divisible)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **(of_optimizer or {}))
    config = zr.BalanceConfig(**{"mode": "off", **config})
    return model, optimizer, zr.Balancer(wrap(model), optimizer, config, process_group=group)


def counts_of(model):
    return [attention.out.segment.counts for attention in model]


def require_copies_alike(model, group):
    """Copies of a block are the same bits on all ranks that hold it."""
    for attention in model:
        for where in (each for each in attention.out.segment.tensors if each.block > 1):
            held = where.held(attention.out.segment.owned, dist.get_rank(group)).tolist()
            by_row = local_of(where.parameter).detach().movedim(where.dim, 0)
            blocks = by_row.unflatten(0, (-1, HEAD)) if held else []
            by_rank = gathered(group, dict(zip(held, blocks, strict=True)))
            for block in {number for of_rank in by_rank for number in of_rank}:
                first, *others = (of_rank[block] for of_rank in by_rank if block in of_rank)
                assert all(torch.equal(first, other) for other in others)


def check_saved(group, folder, shares, loaded, **options):
    """What is saved by these shares is the undivided model, and loads by others into models of other options."""
    model, optimizer, balancer = balanced(group, **options)
    balancer.move(shares)
    train(model, optimizer, 3, zr.clip_grad_norm_, balancer.step)
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder)
    whole = whole_model()
    train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 3, clip_grad_norm_)
    read = {key: torch.empty_like(value) for key, value in whole.state_dict().items()}
    dcp.load(read, checkpoint_id=folder)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(read[key], value, rtol=1e-9, atol=1e-12)
    for other_shares, other_options in loaded:
        other, others, its_balancer = balanced(group, **other_options)
        its_balancer.move(other_shares)
        dcp.load(zr.sharded_state_dict(other, others), checkpoint_id=folder)
        require_copies_alike(other, group)
        with its_balancer.at_home(), balancer.at_home():
            for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours, theirs)
                assert torch.equal(others.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    return model


class Alone:
    """In a balancer's place beside the undivided model."""

    def step(self):
        pass

    def move(self, shares):
        pass

    at_home = staticmethod(nullcontext)


def require_alike(group, run, *, tolerance=1e-10, made=None, **options):
    """``run(model, optimizer, balancer, clip)`` returns the same of the divided model and of the undivided one."""
    model, optimizer, balancer = made or balanced(group, **options)
    computed = run(model, optimizer, balancer, zr.clip_grad_norm_)
    require_copies_alike(model, group)
    whole = whole_model(options.get("of_group", 4))
    expected = run(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), Alone(), clip_grad_norm_)
    assert computed == pytest.approx(expected, rel=tolerance, abs=0.0)
    return model

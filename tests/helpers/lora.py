"""Decoders with LoRA of PEFT around all their layers, divided in several ways, and trained beside the undivided one."""

from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import zeroresize as zr
from helpers.dtensor_models import HEADS, WIDTH, batch, mesh_of, whole_model

COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.out", "mlp.down")
#: How a model is divided: PEFT comes first but for the last.
HOWS = ("layers", "styles", "host's styles", "styles of matrices", "split first")


def with_lora(model, targets=(*COLUMNS, *ROWS), **options):
    import peft

    torch.manual_seed(1)
    names = [name for name, _ in model.named_modules() if name.endswith(tuple(targets))]
    settings = {"r": 3, "init_lora_weights": False, "target_modules": names} | options
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


def whole_lora(**options):
    return with_lora(whole_model(), **options)


def blocks_of(model):
    return model.base_model.model.blocks


def divided(how, group, **options):
    """The model of :func:`whole_lora` on this rank, not converted yet."""
    if how == "split first":
        model = whole_model()
        split(model.blocks, ColwiseParallel, RowwiseParallel)
        return with_lora(model, **options)
    model = whole_lora(**options)
    if how == "layers":
        for block in blocks_of(model):
            for name in (*COLUMNS, *ROWS):
                made_by = zr.ColumnParallelLinear if name in COLUMNS else zr.RowParallelLinear
                replace_linear(block, name, partial(made_by.from_linear, process_group=group))
        return model
    styles = (zr.ColwiseParallel, zr.RowwiseParallel) if how == "styles" else (ColwiseParallel, RowwiseParallel)
    split(blocks_of(model), *styles)
    if how == "styles of matrices":
        split(blocks_of(model), *styles, matrices=True)
    return model


def replace_linear(holder, name, replace):
    """Of a wrapped layer the layer within."""
    module = holder.get_submodule(name)
    if hasattr(module, "base_layer"):
        module.base_layer = replace(module.base_layer)
    else:
        parent, _, leaf = name.rpartition(".")
        setattr(holder.get_submodule(parent), leaf, replace(module))


def split(blocks, column, row, *, matrices=False):
    """By styles: the layers, or of LoRA's matrices those that belong to units."""
    for block in blocks:
        plan = {}
        for name in (*COLUMNS, *ROWS):
            is_wrapped, is_column = hasattr(block.get_submodule(name), "base_layer"), name in COLUMNS
            matrix = ".lora_B.default" if is_column else ".lora_A.default"
            inner = matrix if matrices else ".base_layer" if is_wrapped else ""
            plan[f"{name}{inner}"] = column() if is_column else row()
        parallelize_module(block, mesh_of(), plan)


def heads_of(model):
    return [
        zr.Segment([attention.q, attention.k, attention.v], attention.out, WIDTH // HEADS, kind="heads", min_units=0)
        for attention in (block.attention for block in blocks_of(model))
    ]


def converted(how, group, saved=None, **options):
    """Divided and converted, with the numbers of the undivided model that is in ``saved``."""
    model = divided(how, group, **options)
    zr.convert(model, process_group=group, segments=heads_of(model))
    if saved is not None:
        dcp.load(zr.sharded_state_dict(model), storage_reader=zr.CheckpointReader(saved))
    return model


def adamw(model):
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def loss_of(model, seed):
    return functional.cross_entropy(model(batch(seed)).flatten(0, 1), batch(seed + 100).flatten())


def train(model, optimizer, num_steps, clip, after=lambda step: None, loss=loss_of, begin=0):
    """Losses and norms of steps of two micro-batches each."""
    values = []
    for step in range(begin, begin + num_steps):
        for part in range(2):
            of_part = loss(model, 2 * step + part) / 2
            of_part.backward()
            values.append(of_part.item())
        values.append(clip((each for each in model.parameters() if each.requires_grad), 0.2).item())
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return values

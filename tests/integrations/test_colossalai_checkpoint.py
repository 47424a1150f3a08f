"""Checkpoints of torch.distributed.checkpoint of models that Colossal-AI has divided."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.hosts import Host, batch, small_vit
from torch import nn

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segments import owned_segments

pytestmark = [pytest.mark.usefixtures("colossalai_vit_modules"), pytest.mark.slow]

CONFIG = zr.BalanceConfig(mode="exact")


def boosted(group, precision, shares, seed):
    """A ViT that Booster has divided, its units divided by ``shares``; the seed changes its weights."""
    model = small_vit()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    host = Host(group).boost(model, precision=precision)
    zr.convert(host.model, process_group=host.group, shares=shares, optimizer=host.optimizer)
    return host


def train(host, steps):
    losses = []
    for step in steps:
        images, labels = batch(step, next(host.model.parameters()).dtype)
        loss = F.cross_entropy(host.model(images).logits.float(), labels)
        host.booster.backward(loss, host.optimizer)
        host.optimizer.step()
        host.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_of(folder, has_masters):
    """All weights, moments and master weights in a file, read into a ViT that is not divided."""
    model = small_vit()
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.load(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder, no_dist=True)
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    if has_masters:
        masters = {f"optimizer.{name}.master_weight": torch.zeros_like(one) for name, one in model.named_parameters()}
        dcp.load(masters, checkpoint_id=folder, no_dist=True)
        tensors |= masters
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_boosted_vit_with_units_away_is_loaded_under_another_division(run_ranks, tmp_path, precision):
    first, second = str(tmp_path / "one"), str(tmp_path / "other")

    def save(rank, group):
        host = boosted(group, precision, (3, 1), 1)
        counts = {segment.counts for segment in owned_segments(balanced_layers(host.model))}
        assert counts == {(3, 1), (48, 16)}
        train(host, range(2))
        dcp.save(zr.sharded_state_dict(host.model, host.optimizer), checkpoint_id=first)
        return train(host, range(2, 5))

    def load(rank, group):
        host = boosted(group, precision, (0, 1), 2)
        dcp.load(zr.sharded_state_dict(host.model, host.optimizer), checkpoint_id=first)
        dcp.save(zr.sharded_state_dict(host.model, host.optimizer), checkpoint_id=second)
        return train(host, range(2, 5))

    losses, _ = run_ranks(save, 2)
    for next_losses in run_ranks(load, 2):
        assert next_losses == pytest.approx(losses, rel=1e-5 if precision == "fp32" else 2e-2)
    whole, again = whole_of(first, precision == "bf16"), whole_of(second, precision == "bf16")
    assert whole.keys() == again.keys()
    for name in whole:
        assert torch.equal(whole[name], again[name]), name
    query = "vit.encoder.layer.0.attention.attention.query.weight"
    assert whole[query].shape == whole[f"{query} exp_avg"].shape == (32, 32) and whole[f"{query} exp_avg"].all()


def test_a_vocabulary_is_saved_without_what_makes_it_divisible(run_ranks, tmp_path, colossalai_module):
    """30 words on two ranks become 64, and the second rank holds none of them; or 32, and it holds 14."""
    from colossalai.shardformer.layer import VocabParallelEmbedding1D

    folder = str(tmp_path / "checkpoint")
    torch.manual_seed(0)
    whole = nn.Embedding(30, 4)

    def check(rank, group):
        Host(group)
        for divisor, num_rows in ((32, 64), (8, 32)):
            embedding = nn.Embedding(30, 4)
            embedding.weight.data.copy_(whole.weight.data if divisor == 32 else torch.zeros(30, 4))
            split = VocabParallelEmbedding1D.from_native_module(embedding, group, make_vocab_size_divisible_by=divisor)
            model = nn.ModuleDict({"words": split})
            assert split.weight.shape[0] * 2 == num_rows
            state = zr.sharded_state_dict(model)
            assert state["words.weight"].shape == (30, 4)
            if divisor == 32:
                dcp.save(state, checkpoint_id=folder)
            else:
                dcp.load(state, checkpoint_id=folder)
                begin = 16 * dist.get_rank(group)
                assert torch.equal(split.weight.data[: 30 - begin], whole.weight.data[begin : begin + 16])

    run_ranks(check, 2)
    state = nn.ModuleDict({"words": nn.Embedding(30, 4)}).state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["words.weight"], whole.weight)


@pytest.mark.parametrize("name", ["FusedLinear1D_Col", "FusedLinear1D_Row", "GPT2FusedLinearConv1D_Col"])
@pytest.mark.parametrize("swap", [False, True])
def test_fused_layers_are_saved_as_they_are_undivided(run_ranks, tmp_path, colossalai_module, name, swap):
    """A shard holds a part of each of three layers; with and without being balanced."""
    import colossalai.shardformer.layer as layers
    from transformers.pytorch_utils import Conv1D

    folder = str(tmp_path / "checkpoint")
    torch.manual_seed(0)
    inputs, outputs, sizes = (16, 6, [8, 4, 4]) if name.endswith("Row") else (6, 16, [8, 4, 4])
    make = (lambda: Conv1D(outputs, inputs)) if name.startswith("GPT2") else (lambda: nn.Linear(inputs, outputs))
    whole = make()
    nn.init.normal_(whole.bias)

    def check(rank, group):
        host, copied = Host(group), make()
        copied.load_state_dict(whole.state_dict())
        split = getattr(layers, name).from_native_module(copied, process_group=group, split_sizes=sizes)
        if swap:
            assert isinstance(host.integration.swap_layer(split), BalancedLinear)
        dcp.save(zr.sharded_state_dict(nn.ModuleDict({"qkv": split})), checkpoint_id=folder)

    run_ranks(check, 2)
    state = nn.ModuleDict({"qkv": make()}).state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["qkv.weight"], whole.weight) and torch.equal(state["qkv.bias"], whole.bias)

"""Colossal-AI's HybridParallelPlugin with two replicas of two tensor-parallel ranks: units move in both alike."""

import pytest
import torch
from helpers.hosts import Host, batch, small_vit
from helpers.on_ranks import gathered, on_ranks

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

pytestmark = [pytest.mark.usefixtures("colossalai_vit_modules"), pytest.mark.slow]


def boosted(group, precision):
    """(model, optimizer, booster, plugin, balancer) of a small ViT."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    Host(group)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision=precision)
    booster = Booster(plugin=plugin)
    model = small_vit()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    config = zr.BalanceConfig(mode="off")
    zr.convert(model, process_group=plugin.tp_group)
    balancer = zr.Balancer(model, optimizer, process_group=plugin.tp_group, config=config)
    return model, optimizer, booster, plugin, balancer


def train(run, steps, dtype=torch.float32):
    """Losses, on batches that differ between the replicas."""
    model, optimizer, booster, plugin, balancer = run
    losses = []
    for step in steps:
        images, labels = batch(2 * step + torch.distributed.get_rank(plugin.dp_group), dtype)
        loss = torch.nn.functional.cross_entropy(model(images).logits.float(), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(4, timeout_s=120)
def test_training_goes_on_as_if_nothing_had_moved(rank, group, *, precision):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    expected = train(boosted(group, precision), range(6), dtype)
    run = boosted(group, precision)
    losses = train(run, range(2), dtype)
    run[-1].move((3, 1))
    losses += train(run, range(2, 4), dtype)
    counts = [segment.counts for segment in owned_segments(balanced_layers(run[0]))]
    model, optimizer, booster, *_ = run
    images, labels = batch(rank // 2, dtype)
    loss = torch.nn.functional.cross_entropy(model(images).logits.float(), labels)
    booster.backward(loss, optimizer)
    gradients = [one.grad.clone() for one in model.unwrap().parameters() if one.grad is not None]
    optimizer.zero_grad()
    run[-1].move((1, 1))
    losses += train(run, range(4, 6), dtype)
    results = gathered(group, (losses, expected, counts, gradients))
    rounding = 1e-4 if precision == "fp32" else 5e-2
    for rank, (losses, expected, counts, gradients) in enumerate(results):
        assert losses == pytest.approx(expected, abs=rounding, rel=rounding)
        assert set(counts) == {(3, 1), (48, 16)}
        others = results[(rank + 2) % 4][3]
        assert gradients and all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))

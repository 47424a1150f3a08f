"""A ViT sharded by Colossal-AI: without plans bit for bit what it was, with plans what the formulas say."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import parallel_layers
from helpers.hosts import DEPTH, HIDDEN, Host, batch, small_vit
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import plan_keeping
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from zeroresize import convert
from zeroresize.conversion import balanced_layers

pytestmark = pytest.mark.usefixtures("colossalai_vit_modules")


def train(host, steps):
    """Losses of training steps with Booster, or without where there is none."""
    losses = []
    for step in steps:
        images, labels = batch(step)
        loss = F.cross_entropy(host.model(images).logits, labels)
        host.booster.backward(loss, host.optimizer) if host.booster else loss.backward()
        host.optimizer.step()
        host.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def unwrap(model):
    """The model inside Booster's wrapper, if it has one."""
    return model.unwrap() if hasattr(model, "unwrap") else model


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(actual, expected):
    """Bit for bit."""
    assert list(actual) == list(expected)
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


# ---- without a plan -------------------------------------------------------------------------------------------------


TAKEN = [
    f"vit.encoder.layer.{depth}.{name}"
    for depth in range(DEPTH)
    for name in (
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    )
]


@pytest.mark.parametrize(("by", "from_the_start"), [("ShardFormer", True), ("Booster", False)])
@on_ranks(2, timeout_s=90)
def test_training_is_bitwise_colossalais(rank, group, *, by, from_the_start):
    """Five steps: the same losses and weights, the very Parameter objects, and a state_dict of the same contents."""

    def start(host, from_the_start):
        if by == "Booster":
            return host.boost(small_vit(), from_the_start)
        model = host.shard(small_vit(), from_the_start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return SimpleNamespace(model=model, optimizer=optimizer, booster=None, group=host.group)

    host = Host(group)
    original, converted = start(host, False), start(host, from_the_start)
    layers = [unwrap(converted.model).get_submodule(name) for name in TAKEN]
    assert {type(layer).__name__.startswith("Balanced") for layer in layers} == {from_the_start}
    assert balanced_layers(converted.model) == {}  # taken in by convert alone
    identities = {name: id(parameter) for name, parameter in converted.model.named_parameters()}

    assert convert(converted.model, process_group=converted.group) is converted.model

    assert list(balanced_layers(converted.model)) == TAKEN
    assert {name: id(parameter) for name, parameter in converted.model.named_parameters()} == identities
    assert train(original, range(5)) == train(converted, range(5))
    assert_same(weights(original.model), weights(converted.model))
    whole = unwrap(original.model).state_dict()  # a collective: gathers the shards
    assert whole["vit.encoder.layer.0.intermediate.dense.weight"].shape == (64, HIDDEN)
    assert_same(whole, unwrap(converted.model).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "unsharded"])
@pytest.mark.parametrize("saves", ["converted", "original"])
@on_ranks(2, timeout_s=90)
def test_booster_checkpoints_pass_between_converted_and_original_models(rank, group, *, tmp_path, saves, is_sharded):
    """Model and optimizer: what was loaded trains on, bit for bit, as what was saved."""

    host = Host(group)
    models = {"converted": host.boost(small_vit()), "original": host.boost(small_vit(initializer_range=0.5))}
    convert(models["converted"].model, process_group=models["converted"].group)
    saver = models.pop(saves)
    (loader,) = models.values()
    train(saver, range(2))

    saver.booster.save_model(saver.model, str(tmp_path / "model"), shard=is_sharded)
    saver.booster.save_optimizer(saver.optimizer, str(tmp_path / "optimizer"), shard=is_sharded)
    dist.barrier(group)
    loader.booster.load_model(loader.model, str(tmp_path / "model"))
    loader.booster.load_optimizer(loader.optimizer, str(tmp_path / "optimizer"))

    assert_same(weights(saver.model), weights(loader.model))
    assert train(saver, [2, 3]) == train(loader, [2, 3])
    assert_same(weights(saver.model), weights(loader.model))


# ---- with a plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_the_start", [False, True], ids=["swapped", "by policy"])
@on_ranks(2)
def test_a_pruned_vit_equals_one_with_masked_weights(rank, group, *, from_the_start):
    """Rank 1 prunes, rank 0 does not. An unsharded ViT with w ⊙ mask in place of w is what the two compute together."""

    model = Host(group).shard(small_vit().double(), from_the_start)
    convert(model, process_group=group)
    whole = small_vit().double()
    for position, (name, layer) in enumerate(balanced_layers(model).items()):
        keep = range(position % 3, layer.num_columns, 3)
        layer.plan = plan_keeping(keep, layer.num_columns) if rank == 1 else None
        mask_weight_of_rank_1(whole.get_submodule(name), parallel_layers.mask(keep, layer.num_columns), is_row(name))

    images, labels = batch(dtype=torch.float64)
    logits, masked_logits = model(images).logits, whole(images).logits
    F.cross_entropy(logits, labels).backward()
    F.cross_entropy(masked_logits, labels).backward()

    assert_close(logits, masked_logits, rtol=1e-10, atol=1e-12)
    masked = {name.replace("parametrizations.weight.original", "weight"): p for name, p in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, part(masked.pop(name).grad, parameter, name, rank), rtol=1e-9, atol=1e-12)
    assert not masked

    model.eval()  # computes in full
    assert_close(model(images).logits, small_vit().double()(images).logits, rtol=1e-10, atol=1e-12)


def is_row(layer_name):
    return layer_name.endswith("output.dense")


def mask_weight_of_rank_1(linear, kept_K, is_row):
    mask = torch.ones_like(linear.weight)
    if is_row:
        mask[:, mask.shape[1] // 2 :] = kept_K.double()
    else:
        mask[mask.shape[0] // 2 :] = kept_K.double()

    class Masked(nn.Module):
        def forward(self, weight):
            return weight * mask

    parametrize.register_parametrization(linear, "weight", Masked())


def part(whole, held, name, rank):
    """This rank's part: rows of a column-parallel layer's tensor, columns of a row-parallel one's."""
    if whole.shape == held.shape:
        return whole
    return whole.chunk(2, dim=1 if is_row(name.removesuffix(".weight")) else 0)[rank]

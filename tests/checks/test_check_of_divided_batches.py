"""check_parallel(counts=…) tells whether the gradients of a batch's parts are together that of the whole batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr

FEATURES = 6
CAUSE = "gradient depends on how the batch is divided"


def made(group, *layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), *layers, nn.GELU(), nn.Linear(8, FEATURES))
    return DistributedDataParallel(model, process_group=group)


def pairs(number=8):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(FEATURES, (number, 3), generator=generator)
    targets[2:5, 1:] = -100
    return {"x": torch.randn(number, FEATURES, generator=generator), "targets": targets, "scale": torch.ones(3)}


def mean_loss(model, batch):
    return (model(batch["x"]).square().mean(dim=1) * batch["targets"][:, 0]).mean()


def token_loss(model, batch):
    logits = model(batch["x"])[:, None].expand(-1, 3, -1) * batch["scale"][:, None]
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)


def num_tokens(batch):
    return (batch["targets"] != -100).sum()


def contrastive_loss(model, batch):
    """Each sample is told from all others of the batch."""
    features = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(features @ F.normalize(batch["x"], dim=1).T, torch.arange(len(features)))


def sum_loss(model, batch):
    return model(batch["x"]).square().sum()


@pytest.mark.slow
@on_ranks(2, [((5, 3),), ((4, 4),), ((8, 0),), ((2, 6),)])
def test_means_over_what_counts_are_fine_and_what_reads_several_samples_is_told(rank, group, counts):
    def causes(loss, model=None, **options):
        findings = zr.check_parallel(model or made(group), pairs(), loss, counts=counts, **options)
        return [(each.cause, each.layer, each.operation) for each in findings]

    assert causes(mean_loss) == []
    assert causes(token_loss, counted=num_tokens) == []
    assert causes(mean_loss, made(group, nn.LayerNorm(8))) == []
    assert causes(mean_loss, made(group, nn.BatchNorm1d(8)).eval()) == []
    assert causes(mean_loss, made(group, nn.Dropout(0.3))) == []
    if 0 in counts:
        return  # the whole batch is that of the first rank
    assert causes(token_loss) == [(CAUSE, "", "cross_entropy")]
    assert causes(contrastive_loss) == [(CAUSE, "", "cross_entropy")]
    assert causes(sum_loss) == [(CAUSE, "", "loss")]
    assert causes(mean_loss, made(group, nn.Dropout(0.3), nn.BatchNorm1d(8))) == [(CAUSE, "2", "batch norm")]


@on_ranks(4)
def test_four_ranks_of_which_two_are_replicas_of_each_other_are_asked_in_their_group(rank, group):
    first, last = (torch.distributed.new_group(ranks) for ranks in ([0, 1, 2], [3]))
    if rank < 3:
        (result,) = zr.check_parallel(made(first), pairs(), contrastive_loss, counts=(2, 5, 1))
        assert result.parameter and "[2, 5, 1] samples" in result.detail
        assert zr.check_parallel(made(first), pairs(), mean_loss, counts=(2, 0, 6)) == []
    else:
        assert zr.check_parallel(made(last), pairs(), contrastive_loss, counts=(8,)) == []


@on_ranks(2)
def test_a_model_in_training_by_a_data_balancer_is_as_it_was(rank, group):
    model = made(group, nn.BatchNorm1d(8))
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters())
    balancer = zr.DataBalancer(model, optimizer, global_batch=8, counts=(6, 2), process_group=group)
    x = pairs(16)["x"]
    for number, rows in enumerate(torch.utils.data.DataLoader(x, batch_sampler=balancer.sampler(x))):
        if number == 1:
            before = copy.deepcopy(model.module.state_dict()), balancer.state_dict(), torch.get_rng_state()
            assert zr.check_parallel(model, pairs(), mean_loss, counts=balancer.counts) == []
            assert all(map(torch.equal, before[0].values(), model.module.state_dict().values()))
            assert balancer.state_dict() == before[1] and torch.equal(torch.get_rng_state(), before[2])
            assert all(each.grad is None for each in model.parameters())
        (model(rows).square().mean() * balancer.loss_scale(len(rows))).backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()


@on_ranks(2)
def test_what_cannot_be_asked_is_an_error_on_all_ranks(rank, group):
    def check(model=None, batch=None, **options):
        return zr.check_parallel(model or made(group), pairs() if batch is None else batch, mean_loss, **options)

    for counts in ((8,), (9, -1), (0, 0)):
        with pytest.raises(ValueError, match="wanted are 2 numbers of samples"):
            check(counts=counts)
    with pytest.raises(ValueError, match="no tensor of the batch has 10 rows"):
        check(counts=(5, 5))
    with pytest.raises(ValueError, match="give the same arguments on every rank"):
        check(counts=(5, 3) if rank else (3, 5))
    with pytest.raises(ValueError, match="give the same arguments on every rank"):
        check(counts=(5, 3) if rank else None)
    with pytest.raises(ValueError, match="rank 1: ZeroDivisionError"):
        check(counts=(5, 3), counted=lambda batch: 1 / (1 - rank))
    row = nn.Sequential(zr.ColumnParallelLinear(FEATURES, 8, process_group=group))
    with pytest.raises(ValueError, match="is a shard"):
        check(row, counts=(5, 3))
    (result,) = check(batch={**pairs(), "x": pairs()["x"] + rank}, counts=(5, 3))
    assert result.cause == "inputs differ between ranks"

"""Gradients and weights of training in unevenly divided batches are those of one process on the whole ones."""

import math
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.data_parallel import (
    Rows,
    assert_alike,
    counted_in,
    full,
    global_batches,
    named,
    sum_loss,
    trained_apart,
    trained_whole,
    words_model,
    wrapped,
)
from helpers.on_ranks import gathered, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import zeroresize as zr
from zeroresize.policy.data.division import Division

OPTIONS = {
    "plain": {},
    "micro-batches": {"num_micro_batches": 3},
    "clipping": {"clip": 0.05},
    "micro-batches, clipping": {"num_micro_batches": 2, "clip": 0.05},
}


def compare(group, kind, **options):
    dataset = Rows(31, masked=True)
    sizes = {"global_batch": 12, "epochs": 2}
    gradients, weights = trained_apart(group, kind, dataset, **sizes, **options)
    expected, whole = trained_whole(dataset, **sizes, clip=options.get("clip"))
    assert len(gradients) == len(expected) == 6
    for apart, alone in zip(gradients, expected, strict=True):
        assert_alike(apart, alone)
    assert_alike(weights, whole)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2, [(name,) for name in OPTIONS])
def test_two_ranks_have_the_gradients_and_weights_of_one_process(rank, group, name, *, kind):
    compare(group, kind, **OPTIONS[name])


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
@on_ranks(4, [(name,) for name in ("plain", "micro-batches, clipping")])
def test_four_ranks_have_the_gradients_and_weights_of_one_process(rank, group, name, *, kind):
    compare(group, kind, **OPTIONS[name])


@on_ranks(2)
def test_unequally_many_micro_batches_of_a_size_have_them_too(rank, group):
    compare(group, "ddp", micro_batch_size=2)


class Counting(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x):
        self.num_forwards += 1
        return self.linear(x)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2)
def test_a_rank_without_samples_adds_nothing_not_even_nan_and_leaves_its_buffers(rank, group, *, kind):
    torch.manual_seed(0)
    model = Counting().double()
    if kind == "ddp":
        wrapper = DistributedDataParallel(model, process_group=group, broadcast_buffers=False)
    else:
        wrapper = torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    balancer = zr.DataBalancer(wrapper, optimizer, global_batch=4, counts=(4, 0), process_group=group)
    x = torch.rand(4, 4, dtype=torch.float64) + 0.5
    loader = DataLoader(x, batch_sampler=balancer.sampler(x, shuffle=False))
    for rows in loader:
        assert len(rows) == (4 if rank == 0 else 1)
        loss = wrapper(rows).mean() * (1.0 if rank == 0 else float("nan"))
        (loss * balancer.loss_scale()).backward()
        gradients = {name: full(each.grad) for name, each in named(wrapper)}
        optimizer.step()
        balancer.step()
    assert_alike({"weight": gradients["linear.weight"]}, {"weight": x.mean(dim=0, keepdim=True)})
    assert model.num_forwards == (1.0 if rank == 0 else 0.0)


@pytest.mark.parametrize("is_read", [True, False])
@on_ranks(2)
def test_a_mean_over_no_tokens_adds_nothing_and_no_other_backward_is_touched(rank, group, *, is_read):
    model = DistributedDataParallel(nn.Linear(4, 1).double(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balancer = zr.DataBalancer(model, optimizer, global_batch=4, process_group=group)
    if not is_read:  # as of a tensor on a GPU
        balancer._scale._sums_on_host, balancer._scale._counted_here = False, lambda counted: counted
    x = torch.rand(8, 4, dtype=torch.float64) + 0.5
    for rows in DataLoader(x, batch_sampler=balancer.sampler(x, shuffle=False)):
        mask = torch.full((len(rows), 1), 1.0 - rank, dtype=torch.float64)
        results = model(rows)
        results *= mask  # in place
        loss = results.sum() / mask.sum()  # of rank 1 NaN
        (loss * balancer.loss_scale(mask.sum())).backward()
        (first, _) = (parameter.grad for parameter in model.parameters())
        assert torch.isfinite(first).all()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        of_rows = rows.clone().requires_grad_()
        with model.no_sync():
            model(of_rows).sum().backward()
        assert of_rows.grad.abs().sum() > 0.0
        optimizer.zero_grad()


@on_ranks(2)
def test_what_one_rank_gives_wrongly_is_an_error_on_all(rank, group):
    for counted in (-1.0, float("nan"), torch.tensor(float("inf")), torch.ones(2)):
        *_, balancer = balanced(group)
        next(iter(balancer.sampler(range(8))))
        with pytest.raises((ValueError, RuntimeError), match=r"counted(=| of shape \(2,\) is not allowed)"):
            balancer.loss_scale(counted if rank else 4)
    for other in ({"seed": rank}, {"lengths": [1.0 + rank] * 8}, {"drop_last": rank == 0}, {"shuffle": rank == 0}):
        *_, balancer = balanced(group)
        next(iter(balancer.sampler(range(8), **other)))
        with pytest.raises(RuntimeError, match="differ in samples, lengths, seed, shuffle, drop_last, epoch or the"):
            balancer.loss_scale(4)
    with pytest.raises(ValueError, match="are not enough for num_micro_batches=2"):
        balanced(group, max_samples=1 if rank else 8, num_micro_batches=2)
    with pytest.raises(ValueError, match=r"are not enough .* counts=\(2, 6\)"):
        balanced(group, max_samples=5, counts=(2, 6))


@on_ranks(2)
def test_ranks_that_divide_differently_while_they_train_are_told(rank, group):
    dataset = Rows(200)
    for what in ("division", "epoch"):
        trained = balanced(group, update_every=4)
        loader = loader_of("data set", trained[2], 0)
        samples_of(group, trained, dataset, loader, num_steps=2, change_at=-1)
        if what == "epoch":
            trained[2]._source.set_epoch(3 + rank)
        else:
            trained[2]._timetable.add(100, Division.of_counts((1.0, 2.0 + rank)))
        with pytest.raises(RuntimeError, match="differ in how batches are divided"):
            samples_of(group, trained, dataset, loader, change_at=-1)


@pytest.mark.parametrize(("kind", "num_workers"), [("data set", 0), ("data set", 2), ("stream", 0), ("stream", 2)])
@on_ranks(2)
def test_no_sample_is_lost_by_looking_by_going_back_or_at_the_end_of_an_epoch(rank, group, *, kind, num_workers):
    dataset = Rows(50)
    trained = balanced(group)
    balancer, loader = trained[2], loader_of(kind, trained[2], num_workers)
    first = samples_of(group, trained, dataset, loader, num_steps=3)
    state = balancer.state_dict()
    rest = samples_of(group, trained, dataset, loader)
    balancer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="no batch of this step"):
        balancer.loss_scale(4)
    next(iter(loader))
    assert balancer.state_dict()["state"] == state["state"]
    again = samples_of(group, trained, dataset, loader, change_at=-1)
    assert sorted(first + again) == sorted(rest) == list(range(50))
    whole = samples_of(group, trained, dataset, loader, num_steps=7, change_at=-1)  # all of its steps, and no further
    state = balancer.state_dict()
    assert sorted(whole) == list(range(50))
    for _ in range(2):
        balancer.load_state_dict(state)
        assert kind == "stream" or loader.batch_sampler.position == (2, 0)
        balancer._source.set_epoch(2)
        assert sorted(samples_of(group, trained, dataset, loader, change_at=-1)) == list(range(50))


@on_ranks(2)
def test_a_loss_scaler_finds_and_leaves_the_same_gradients(rank, group):
    dataset = Rows(24)
    model = wrapped(words_model(torch.float32), "ddp", group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = zr.DataBalancer(model, optimizer, global_batch=8, counts=(6, 2), process_group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for rows in DataLoader(dataset, batch_sampler=balancer.sampler(dataset, seed=3)):
        loss = sum_loss(model, rows) / counted_in(rows) * balancer.loss_scale(counted_in(rows))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        balancer.step()
    whole = words_model(torch.float32)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for batch in global_batches(24, 8, seed=3):
        F.cross_entropy(whole(dataset.words[batch]).flatten(0, 1), dataset.targets[batch].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_alike({name: full(each) for name, each in named(model)}, dict(whole.named_parameters()), most=1e-5)


def balanced(group, **options):
    """A model in plain data parallelism, its optimizer and balancer."""
    model = wrapped(words_model(), "ddp", group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, zr.DataBalancer(model, optimizer, process_group=group, **{"global_batch": 8} | options)


def step(model, optimizer, balancer, rows):
    (sum_loss(model, rows) / counted_in(rows) * balancer.loss_scale(counted_in(rows))).backward()
    optimizer.step()
    optimizer.zero_grad()
    balancer.step()


def samples_of(group, trained, dataset, loader, num_steps=100, change_at=1):
    """The samples that all ranks have trained on, some steps from the first on; the division changes within."""
    model, optimizer, balancer = trained
    seen = []
    for number, indices in enumerate(loader):
        if number == num_steps:
            break
        seen += indices.tolist() if balancer._timetable.part.num_samples else []
        if number == change_at:
            ranks = dist.get_world_size(group)
            weights = tuple(float(1 + 6 * (rank == 0)) for rank in range(ranks))
            balancer._timetable.add(balancer._timetable.num_steps + 6, Division.of_counts(weights))
        step(model, optimizer, balancer, (dataset.words[indices], dataset.targets[indices]))
    return [sample for samples in gathered(group, seen) for sample in samples]


class Words(torch.utils.data.IterableDataset):
    """The numbers of samples, as a stream."""

    def __iter__(self):
        return iter(range(50))


def loader_of(kind, balancer, num_workers):
    options = {"num_workers": num_workers, "prefetch_factor": 2 if num_workers else None}
    if kind == "stream":
        return DataLoader(balancer.stream(Words()), batch_size=None, collate_fn=torch.tensor, **options)
    return DataLoader(range(50), batch_sampler=balancer.sampler(range(50), seed=1), **options)


@pytest.mark.parametrize(("kind", "num_workers"), [("data set", 0), ("data set", 2), ("stream", 0), ("stream", 3)])
@on_ranks(3)
def test_every_sample_is_seen_once_whatever_changes_and_on_however_many_ranks_training_goes_on(
    rank, group, *, kind, num_workers
):
    dataset = Rows(50)
    trained = balanced(group)
    first = samples_of(group, trained, dataset, loader_of(kind, trained[2], num_workers), num_steps=3)
    state = trained[2].state_dict()
    pair = dist.new_group([0, 1])
    rest = []
    if rank < 2:
        trained = balanced(pair)
        trained[2].load_state_dict(state)
        loader = loader_of(kind, trained[2], num_workers)
        rest = samples_of(pair, trained, dataset, loader)
        assert sorted(first + rest) == list(range(50))
        again = samples_of(pair, trained, dataset, loader, change_at=-1)
        assert sorted(again) == list(range(50))
        assert again != first + rest or kind == "stream"
    if kind == "data set":
        alone = global_batches(50, 8, seed=1)
        assert sorted(first) == sorted(sample for batch in alone[:3] for sample in batch)


@on_ranks(2)
def test_a_state_of_other_batches_is_refused(rank, group):
    *_, balancer = balanced(group)
    balancer.sampler(range(50), seed=1)
    state = balancer.state_dict()
    *_, another = balanced(group)
    another.load_state_dict(state)
    with pytest.raises(ValueError, match="seed: 1 was saved, 2 is here"):
        another.sampler(range(50), seed=2)
    *_, another = balanced(group, global_batch=10)
    another.sampler(range(50), seed=1)
    with pytest.raises(ValueError, match="global_batch: 8 was saved, 10 is here"):
        another.load_state_dict(state)


class Slow(nn.Module):
    """Sleeps for each row of its input, forward and backward."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(4, 1)

    def forward(self, x):
        time.sleep(self.seconds * len(x))
        return self.linear(x)


@on_ranks(2)
def test_a_slow_rank_is_given_fewer_samples_and_then_as_many_as_the_others(rank, group):
    model = DistributedDataParallel(Slow(0.001), process_group=group)
    optimizer, records = torch.optim.SGD(model.parameters(), lr=0.1), []
    options = {"global_batch": 24, "update_every": 4, "on_change": records.append}
    balancer = zr.DataBalancer(model, optimizer, process_group=group, **options)
    x = torch.randn(24 * 400, 4)
    batches = iter(DataLoader(x, batch_sampler=balancer.sampler(x)))

    def train(number):
        for _ in range(number):
            rows = next(batches)
            (model(rows).square().mean() * balancer.loss_scale()).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()

    train(16)
    assert balancer.counts == (12, 12)
    model.module.seconds *= 1.0 + 2.0 * rank
    balancer.pause(advice=True)
    train(24)
    assert balancer.counts == (12, 12)
    assert records and not any(record.is_made for record in records)
    status = balancer.status()
    assert status.state == "advice" and status.ranks[1].speed < 0.6 and status.ranks[1].share == 1.0
    assert status.even_step_s == status.expected_step_s and status.decided
    as_it_is, *others = balancer.what_if()
    assert as_it_is.counts == (12, 12) and others[0].share_saved > 0.3
    balancer.resume()
    train(30)
    assert 14 <= balancer.counts[0] <= 22  # 18 at exact times
    made = [record for record in records if record.is_made]
    assert made[0].kind == "samples" and made[0].before == (12, 12)
    assert made[0].scalars()["data_changes/left_out"] == 0.0
    assert gathered(group, balancer.counts) == [balancer.counts] * 2
    another = zr.DataBalancer(model, optimizer, process_group=group, **options)
    another.load_state_dict(balancer.state_dict())
    another.sampler(x)
    assert another.counts == balancer.counts
    another.close()
    model.module.seconds /= 1.0 + 2.0 * rank
    train(60)
    assert abs(balancer.counts[0] - 12) <= 2


@on_ranks(2)
def test_of_a_step_with_a_closure_only_what_follows_is_the_optimizers(rank, group):
    model = DistributedDataParallel(Slow(0.005 * (1 + 2 * rank)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = zr.DataBalancer(model, optimizer, global_batch=8, update_every=4, process_group=group)
    x = torch.randn(8 * 40, 4)
    for rows in DataLoader(x, batch_sampler=balancer.sampler(x)):

        def closure(rows=rows):
            optimizer.zero_grad()
            loss = model(rows).square().mean() * balancer.loss_scale()
            loss.backward()
            return loss

        optimizer.step(closure)
        balancer.step()
    assert balancer.counts[0] > balancer.counts[1]  # what follows the closure is not taken for seconds of samples
    with pytest.raises(RuntimeError, match="without loss_scale"):
        optimizer.step(lambda: model(x[:1]).sum())


@on_ranks(2)
def test_samples_of_different_lengths_are_divided_so_that_ranks_take_equally_long(rank, group):
    lengths = torch.randint(1, 400, (64,), generator=torch.Generator().manual_seed(0)).double()
    *_, balancer = balanced(group, global_batch=16)
    sampler = balancer.sampler(range(64), lengths, seed=4)
    batches = gathered(group, list(sampler))
    for index, whole in enumerate(global_batches(64, 16, seed=4)):
        parts = [batch[index] for batch in batches]
        assert sorted(parts[0] + parts[1]) == sorted(whole)
        sums = [float(lengths[part].sum()) for part in parts]
        assert max(sums) <= 1.03 * sum(sums) / 2


@on_ranks(2)
def test_what_would_train_wrongly_is_an_error_before_weights_change(rank, group):
    dataset = Rows(50)
    model, optimizer, balancer = balanced(group)
    with pytest.raises(RuntimeError, match=r"no batch of this step came from the sampler: .* after load_state_dict"):
        balancer.loss_scale(1)
    batches = iter(loader_of("data set", balancer, 0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    indices = next(batches)
    sum_loss(model, (dataset.words[indices], dataset.targets[indices])).backward()
    with pytest.raises(RuntimeError, match=r"without loss_scale.* before the first backward, and close\(\) a balancer"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="without loss_scale"):
        balancer.step()
    assert all(map(torch.equal, before, model.parameters()))
    balancer.loss_scale(4)
    with pytest.raises(RuntimeError, match=r"called twice in step 0: .* steps\(\)\), and step\(\) after each step"):
        balancer.loss_scale(4)
    with pytest.raises(ValueError, match=r"divides a data set, or stream, already: .* validate with any other"):
        balancer.sampler(dataset)
    balancer.close()


@pytest.mark.parametrize("lengths", [[1.0, 0.0], [2.0], [], [1.0, math.nan]])
def test_lengths_that_are_not_allowed_are_told(lengths):
    least = min(lengths[::-1], default=math.inf)
    with pytest.raises(ValueError, match=rf"lengths \({len(lengths)},\), at least {least}, are not allowed: 2 finite"):
        zr.DataBalancer(None, None, global_batch=2).sampler(range(2), lengths)


DIFFERENT = {
    "seed": lambda balancer, rank: balancer.sampler(range(50), seed=rank),
    "size": lambda balancer, rank: balancer.sampler(range(50 + rank)),
    "lengths": lambda balancer, rank: balancer.sampler(range(50), lengths=[1.0] * 49 + [2.0 + rank]),
    "drop_last": lambda balancer, rank: balancer.sampler(range(50), drop_last=rank == 1),
    "epoch": lambda balancer, rank: (sampler := balancer.sampler(range(50)), sampler.set_epoch(rank))[0],
    "stream": lambda balancer, rank: balancer.stream(range(50)) if rank else balancer.sampler(range(50)),
}


@on_ranks(2, [(name,) for name in DIFFERENT])
def test_ranks_that_would_divide_different_samples_are_told_before_the_first_backward(rank, group, name):
    *_, balancer = balanced(group)
    next(iter(DIFFERENT[name](balancer, rank)))
    with pytest.raises(RuntimeError, match="differ in samples, lengths, seed, shuffle, drop_last, epoch or the state"):
        balancer.loss_scale(4)
    balancer.close()


@on_ranks(2)
def test_a_loader_that_does_not_keep_the_order_of_batches_is_refused(rank, group):
    *_, balancer = balanced(group)
    loader = DataLoader(range(50), batch_sampler=balancer.sampler(range(50)), num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="in_order=False of the loader is not allowed"):
        next(balancer.steps(loader))
    assert balancer._timetable.fetched == 0


@on_ranks(2)
def test_workers_of_a_stream_may_fetch_further_ahead_in_each_step(rank, group):
    dataset = Rows(80)
    model, optimizer, balancer = balanced(group)
    for number, indices in enumerate(loader_of("stream", balancer, 0)):
        balancer._timetable._fetched[1] = 3 * number + 3  # which begins later, and is faster than the steps
        step(model, optimizer, balancer, (dataset.words[indices], dataset.targets[indices]))
    assert number == 6


@on_ranks(2)
def test_training_that_went_on_behind_the_last_whole_batch_goes_on_with_the_next_epoch_without_its_rest(rank, group):
    dataset = Rows(20)
    model, optimizer, balancer = balanced(group)
    for indices, _ in zip(balancer.sampler(dataset), range(2), strict=False):
        step(model, optimizer, balancer, (dataset.words[indices], dataset.targets[indices]))
    state = balancer.state_dict()
    *_, balancer = balanced(group)
    balancer.load_state_dict(state)
    sampler = balancer.sampler(dataset, drop_last=True)
    assert sampler.position == (1, 0) and len(list(sampler)) == 2


@on_ranks(2)
def test_a_model_that_is_refused_on_one_rank_is_left_as_it_was_on_all(rank, group):
    model = wrapped(words_model(), "ddp", group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = zr.DataBalancer(None, None, global_batch=8, process_group=group)
    hooks = model._forward_hooks, model._forward_pre_hooks
    with pytest.raises((ValueError, RuntimeError), match="neither DistributedDataParallel nor fully_shard"):
        balancer.attach(model.module if rank else model, optimizer)
    optimizer.step()
    assert not any(hooks)
    balancer.attach(model, optimizer)
    with pytest.raises(RuntimeError, match="without loss_scale"):
        optimizer.step()
    balancer.close()
    optimizer.step()


@pytest.mark.parametrize("counts", [None, (6, 2)])
@on_ranks(2)
def test_a_balancer_that_is_closed_leaves_the_training_as_it_was(rank, group, *, counts):
    model = wrapped(words_model(), "ddp", group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = model._forward_hooks, model._forward_pre_hooks
    balancer = zr.DataBalancer(model, optimizer, global_batch=8, counts=counts, process_group=group)
    assert (balancer._steps is None) == (counts is not None)  # nobody asks for times then
    with pytest.raises(RuntimeError, match="without loss_scale"):
        optimizer.step()
    balancer.close()
    optimizer.step()
    assert not any(hooks)


@on_ranks(2)
def test_a_loader_that_is_divided_again_is_noticed(rank, group):
    """As by Accelerate's ``prepare``, which gives each rank every second batch."""
    dataset = Rows(200)
    trained = balanced(group)

    class Again(torch.utils.data.Sampler):
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            for number, batch in enumerate(self.sampler):
                if number % 2 == rank:
                    yield batch

    loader = DataLoader(range(200), batch_sampler=Again(trained[2].sampler(range(200))))
    with pytest.raises(RuntimeError, match=r"no batch of this step|something divides the sampler's batches"):
        samples_of(group, trained, dataset, loader)


@on_ranks(2)
def test_models_that_have_no_such_gradient_are_refused_by_name(rank, group):
    optimizer = torch.optim.SGD(words_model().parameters(), lr=0.1)
    with pytest.raises((ValueError, RuntimeError), match="neither DistributedDataParallel nor fully_shard"):
        zr.DataBalancer(words_model(), optimizer, global_batch=8, process_group=group)
    with pytest.raises((ValueError, RuntimeError), match="which gathers parameters in every"):
        sharded = wrapped(words_model(), "fsdp", group)
        zr.DataBalancer(sharded, optimizer, global_batch=8, micro_batch_size=2, process_group=group)
    norms = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), process_group=group)
    optimizer = torch.optim.SGD(norms.parameters(), lr=0.1)
    balancer = zr.DataBalancer(norms, optimizer, global_batch=8, process_group=group)
    next(iter(balancer.sampler(range(8))))
    with pytest.raises(ValueError, match=r"batch norm \(module.1\) normalises by the samples of a rank"):
        balancer.loss_scale(4)
    norms.eval()
    assert balancer.loss_scale(4) == 1.0


@pytest.mark.parametrize("counted", [None, 4])
@on_ranks(2)
def test_batch_norm_that_one_rank_alone_trains_is_an_error_on_all(rank, group, *, counted):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = zr.DataBalancer(model, optimizer, global_batch=8, process_group=group)
    next(iter(balancer.sampler(range(8))))
    model.module[1].train(rank == 1)
    with pytest.raises((ValueError, RuntimeError), match=r"batch norm \(module.1\) normalises") as error:
        balancer.loss_scale(counted)
    assert rank == 1 or "ranks [1] of the group failed" in str(error.value)
    model.eval()
    assert balancer.loss_scale(counted) == 1.0


@on_ranks(2)
def test_ranks_that_are_given_different_numbers_are_told(rank, group):
    with pytest.raises((ValueError, RuntimeError), match="global_batch"):
        balanced(group, global_batch=8 + 2 * rank)
    with pytest.raises((ValueError, RuntimeError), match="counts"):
        balanced(group, counts=(4, 4) if rank else (5, 3))
    with pytest.raises(ValueError, match=r"counts=\[4, 5\] are not allowed"):
        balanced(group, counts=(4, 5))
    with pytest.raises(ValueError, match=r"max_samples of all ranks, \[3.0, 3.0\], are fewer"):
        balanced(group, max_samples=3)


def test_one_rank_alone_trains_as_ever():
    model, dataset = words_model(), Rows(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = zr.DataBalancer(model, optimizer, global_batch=8)
    for rows in DataLoader(dataset, batch_sampler=balancer.sampler(dataset)):
        assert balancer.loss_scale(counted_in(rows)) == 1.0
        optimizer.step()
        balancer.step()
    assert balancer.state_dict()

"""Heads and neurons that ranks do not divide: whole units, moved and saved as any other, exactly as undivided."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import zeroresize as zr
from zeroresize.resharding.segments import search_segments

HEAD, WIDTH = 4, 12
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        sizes = {"q": num_heads * HEAD, "k": num_heads * HEAD, "v": num_heads * HEAD}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, size, dtype=torch.float64))
        self.head_dim = HEAD
        self.out = nn.Linear(num_heads * HEAD, WIDTH, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, num_heads, num_neurons):
        super().__init__()
        self.attention = Attention(num_heads)
        self.up = nn.Linear(WIDTH, num_neurons, dtype=torch.float64)
        self.down = nn.Linear(num_neurons, WIDTH, dtype=torch.float64)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(functional.gelu(self.up(x)))


def whole_block(num_heads, num_neurons):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Block(num_heads, num_neurons)


def with_plain_layers(block, group):
    def split(layer, kind, unit_size):
        return kind.from_linear(layer, process_group=group, unit_size=unit_size)

    for name in ("q", "k", "v"):
        layer = getattr(block.attention, name)
        setattr(block.attention, name, split(layer, zr.ColumnParallelLinear, HEAD))
    block.attention.out = split(block.attention.out, zr.RowParallelLinear, HEAD)
    block.up, block.down = split(block.up, zr.ColumnParallelLinear, 1), split(block.down, zr.RowParallelLinear, 1)
    return block


def with_dtensors(block, group):
    heads = {f"attention.{name}": zr.ColwiseParallel(unit_size=HEAD) for name in ("q", "k", "v")}
    return parallelize_module(
        block,
        DeviceMesh.from_group(group, "cpu"),
        heads
        | {
            "attention.out": zr.RowwiseParallel(unit_size=HEAD),
            "up": zr.ColwiseParallel(unit_size=1),
            "down": zr.RowwiseParallel(unit_size=1),
        },
    )


def with_styles_of_torch(block, group):
    """Which cut through heads, where they do not refuse."""
    columns = dict.fromkeys(("attention.q", "attention.k", "attention.v", "up"), ColwiseParallel())
    rows = dict.fromkeys(("attention.out", "down"), RowwiseParallel())
    return parallelize_module(block, DeviceMesh.from_group(group, "cpu"), columns | rows)


HOSTS = {"plain": with_plain_layers, "dtensor": with_dtensors, "torch": with_styles_of_torch}


def converted(block, split, group, **options):
    heads = zr.Segment(
        ["attention.q", "attention.k", "attention.v"],
        "attention.out",
        unit_size=HEAD,
        kind="heads",
        on_change=lambda units: None,
    )
    return zr.convert(split(block, group), process_group=group, segments=[heads], **options)


def train(model, optimizer, num_steps, after_step=lambda: None):
    losses = []
    for _ in range(num_steps):
        for half in X.chunk(2):
            loss = model(half).square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return losses


def check(rank, group, host, num_heads, num_neurons, moves):
    num_ranks = dist.get_world_size(group)
    whole = whole_block(num_heads, num_neurons)
    model = converted(copy.deepcopy(whole), HOSTS[host], group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="off"), process_group=group)
    segments = [model.attention.out.segment, model.down.segment]
    home = [segment.owned.counts for segment in segments]
    for counts, total in zip(home, (num_heads, num_neurons), strict=True):
        assert sum(counts) == total and max(counts) - min(counts) <= 1 and list(counts) == sorted(counts)[::-1]
    losses = train(model, optimizer, 2, balancer.step)
    for shares in moves:
        balancer.move(shares)
        assert [segment.owned.counts for segment in segments] != home
        losses += train(model, optimizer, 2, balancer.step)
        with balancer.at_home():
            assert [segment.owned.counts for segment in segments] == home
    balancer.move((1,) * num_ranks)
    assert [segment.owned.counts for segment in segments] == home
    losses += train(model, optimizer, 2, balancer.step)
    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 2 * (2 + len(moves)))
    assert losses == pytest.approx(expected, rel=1e-10, abs=0.0)
    return model, optimizer, balancer, whole


MOVES = {2: [(1, 2), (5, 1)], 3: [(1, 1, 4), (3, 1, 0)], 4: [(1, 3, 1, 1)], 8: [(1, 1, 1, 5, 1, 1, 1, 1)]}


@on_ranks(2, [(host,) for host in HOSTS])
def test_three_heads_on_two_ranks_train_as_the_undivided_model(rank, group, host):
    check(rank, group, host, 3, 13, MOVES[2])


@pytest.mark.slow
@on_ranks(3, [(host,) for host in HOSTS])
def test_thirty_two_neurons_and_seven_heads_on_three_ranks_do(rank, group, host):
    check(rank, group, host, 7, 32, MOVES[3])


@pytest.mark.slow
@on_ranks(8, [(host,) for host in HOSTS])
def test_twenty_eight_heads_on_eight_ranks_do(rank, group, host):
    check(rank, group, host, 28, 61, MOVES[8])


def what_is_saved_at_home_or_away_is_the_undivided_model(rank, group, host, *, tmp_path):
    model, optimizer, balancer, whole = check(rank, group, host, 3, 13, MOVES[2][:1])
    for name, shares in (("home", (1, 1)), ("away", (1, 2))):
        balancer.move(shares)
        folder = tmp_path / name
        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder)
        read = {key: torch.empty_like(value) for key, value in whole.state_dict().items()}
        dcp.load(read, checkpoint_id=folder)
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(read[key], value, rtol=1e-9, atol=1e-12)
    # And into another division, of one that was never trained.
    other = converted(whole_block(3, 13), HOSTS[host], group, shares=(1, 2))
    others = torch.optim.AdamW(other.parameters(), lr=1e-2)
    state = zr.sharded_state_dict(other, others)
    dcp.load(state, checkpoint_id=tmp_path / "home")
    again = zr.Balancer(other, others, zr.BalanceConfig(mode="off"), process_group=group)
    assert train(other, others, 2, again.step) == pytest.approx(train(model, optimizer, 2, balancer.step), rel=1e-10)


test_what_is_saved_at_home_or_away_is_the_undivided_model = on_ranks(2, [("plain",)])(
    what_is_saved_at_home_or_away_is_the_undivided_model
)
test_what_other_hosts_save_at_home_or_away_is_the_undivided_model = pytest.mark.slow(
    on_ranks(2, [(host,) for host in HOSTS if host != "plain"])(what_is_saved_at_home_or_away_is_the_undivided_model)
)


@on_ranks(3, [("plain", True), ("dtensor", False)])
def test_a_checkpoint_of_two_ranks_is_read_on_three_and_on_one_and_back(rank, group, host, is_converted, *, tmp_path):
    two, (alone, *_) = dist.new_group([0, 1]), [dist.new_group([rank], use_local_synchronization=True)]
    folders = [tmp_path / f"{host} {is_converted} {number}" for number in (2, 3)]

    def divided(ranks):
        block = whole_block(3, 13)
        model = converted(block, HOSTS[host], ranks) if is_converted else HOSTS[host](block, ranks)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def read_and_train(model, optimizer, folder, ranks):
        state = zr.sharded_state_dict(model, optimizer)
        dcp.load(state, storage_reader=zr.CheckpointReader(folder), process_group=ranks)
        return train(model, optimizer, 2)

    whole = whole_block(3, 13)
    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 6)
    if rank < 2:
        model, optimizer = divided(two)
        if is_converted:
            balancer = zr.Balancer(
                model, optimizer, zr.BalanceConfig(mode="off"), process_group=two, data_parallel_group=alone
            )
            balancer.move((1, 2))
        assert train(model, optimizer, 2) == pytest.approx(expected[:4], rel=1e-10)
        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folders[0], process_group=two)
    dist.barrier(group)
    model, optimizer = divided(group)
    assert read_and_train(model, optimizer, folders[0], group) == pytest.approx(expected[4:8], rel=1e-9)
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folders[1], process_group=group)
    undivided = whole_block(3, 13)
    read = undivided, torch.optim.AdamW(undivided.parameters(), lr=1e-2), folders[1], alone
    assert read_and_train(*read) == pytest.approx(expected[8:], rel=1e-9)
    if rank < 2:
        assert read_and_train(*divided(two), folders[1], two) == pytest.approx(expected[8:], rel=1e-9)


@on_ranks(2, [(4, 1), (1, 4), (4, None)])
def test_layers_of_a_segment_that_are_split_by_other_units_compute_nothing_wrong(rank, group, of_column, of_row):
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)).double()
    model[0] = zr.ColumnParallelLinear.from_linear(model[0], process_group=group, unit_size=of_column)
    model[2] = zr.RowParallelLinear.from_linear(model[2], process_group=group, unit_size=of_row)
    model = zr.convert(model, process_group=group)
    assert model[2].segment is None and "not by whole units" in model[2].stays_even
    with pytest.raises(ValueError, match="does not fit weight"):
        model(X)


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_fails_alone_tells_those_that_are_about_to_hold_whole_units(rank, group, *, monkeypatch):
    for mistake, message in (("gradient", "has a gradient"), ("search", "no such thing")):
        block = with_styles_of_torch(whole_block(3, 12), group)
        if rank == 0 and mistake == "gradient":
            block.attention.k.weight.grad = torch.zeros_like(block.attention.k.weight)
        elif rank == 0:
            monkeypatch.setattr(search_segments, "find_segments", failing)
        with pytest.raises((ValueError, RuntimeError), match=message):
            converted(block, lambda block, group: block, group)
        dist.barrier()


def failing(*_):
    raise ValueError("no such thing")

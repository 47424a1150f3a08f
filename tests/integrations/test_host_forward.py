"""Layers that keep their host's own forward, fused or quantised: measured, moved, saved; nothing is lent or dropped."""

import copy
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from helpers.processes import caught_log_lines
from helpers.segments import train_by_halves
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.integrations import HostForwardClasses, hosts, known_modules, register_host, register_segments
from zeroresize.layers.segments import all_segments
from zeroresize.resharding.agreement import CannotMoveError

WIDTH, NEURONS = 12, 24
ROOT = Path(__file__).parents[2]


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.contiguous().clone()
        dist.all_reduce(dx)
        return dx


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


class Layer(nn.Module):
    """Of a host: what is divided over two ranks, or not divided; ``dims`` says along which dimension."""

    dims: ClassVar = {}

    def divide(self, rank):
        """Keep this rank's part."""
        for name, at in self.dims.items():
            whole = getattr(self, name)
            if at is not None and whole is not None:
                dim, parts = at if isinstance(at, tuple) else (at, 1)
                pieces = [part.chunk(2, dim)[rank] for part in whole.detach().chunk(parts, dim)]
                part = torch.cat(pieces, dim)
                setattr(self, name, nn.Parameter(part) if isinstance(whole, nn.Parameter) else part)
        self.process_group, self.entering, self.leaving = dist.group.WORLD, SumBackward.apply, SumForward.apply
        return self

    process_group = None
    entering = leaving = staticmethod(lambda x: x)


class Column(Layer):
    """Weights in two blocks of input features, and a factor and a bias for each output channel."""

    dims: ClassVar = {"weight": 1, "factor": 0, "steps": 0, "bias": 0, "amax": None}

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, NEURONS, WIDTH // 2) / 3)
        self.factor, self.bias = nn.Parameter(torch.rand(NEURONS)), nn.Parameter(torch.randn(NEURONS))
        self.register_buffer("steps", torch.rand(NEURONS) + 1)
        self.register_buffer("amax", torch.ones(()))

    def forward(self, x, scale=1.0):
        left, right = self.entering(x).chunk(2, -1)
        y = left @ self.weight[0].t() + right @ self.weight[1].t()
        return y * self.factor * self.steps * self.amax * scale + self.bias


class Row(Layer):
    dims: ClassVar = {"weight": 0, "bias": None}

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NEURONS, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.leaving(x @ self.weight) + self.bias


class GatedMlp(Layer):
    dims: ClassVar = {"down": 1, "gate_up": (0, 2), "interleaved": 0}

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2 * NEURONS, WIDTH) / 3)
        self.interleaved = nn.Parameter(torch.rand(2 * NEURONS))
        self.down = nn.Parameter(torch.randn(WIDTH, NEURONS) / 3)
        self.num_neurons = NEURONS

    def forward(self, x):
        gate, up = (self.entering(x) @ self.gate_up.t()).chunk(2, -1)
        scale, shift = self.interleaved.view(self.num_neurons, 2).unbind(1)
        return self.leaving((F.silu(gate) * up * scale + shift) @ self.down.t())


def host(**options):
    return HostForwardClasses({Column: Column.dims}, {Row: Row.dims}, {GatedMlp: GatedMlp.dims}, **options)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The registries as they were, once a test ends."""
    monkeypatch.setattr(hosts, "_hosts", list(hosts._hosts))
    monkeypatch.setattr(known_modules, "_adapters", dict(known_modules._adapters))


def whole_model():
    torch.manual_seed(0)
    return nn.Sequential(Column(), nn.GELU(), Row(), GatedMlp()).double()


def divided_model(rank):
    model = whole_model()
    for layer in model:
        if isinstance(layer, Layer):
            layer.divide(rank)
    model[3].num_neurons = NEURONS // 2
    return model


def segment_of(mlp):
    def follow(neurons):
        mlp.num_neurons = len(neurons)

    return zr.Segment([], mlp, on_change=follow, min_units=0, kind="neurons")


def converted_model(rank):
    register_host(host())
    register_segments(GatedMlp, segment_of)
    return zr.convert(divided_model(rank))


def held(model, optimizer):
    """Copies of parameters, buffers and what the optimizer keeps."""
    kept = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers(), *kept)]


@on_ranks(2)
def test_units_move_and_are_saved_as_in_the_undivided_model(rank, group, *, tmp_path):
    model, whole = converted_model(rank), whole_model()
    assert [(each.kind, each.layers) for each in all_segments(balanced_layers(model))] == [
        ("neurons", ("0", "2")),
        ("neurons", ("3",)),
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, optimizer)
    moves = {0: (3, 1), 2: (1, 3), 3: (1, 1), 4: (3, 1)}

    def after(step):
        balancer.step()
        if step in moves:
            balancer.move(moves[step])

    computed = train_by_halves(WIDTH, model, optimizer, 6, zr.clip_grad_norm_, after)
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    assert computed == pytest.approx(train_by_halves(WIDTH, whole, whole_optimizer, 6, clip_grad_norm_), rel=1e-10)
    here = NEURONS * (3, 1)[rank] // 4
    assert model[0].weight.shape == (2, here, WIDTH // 2) and model[0].steps.shape == model[0].factor.shape == (here,)
    assert model[2].weight.shape == (here, WIDTH) and model[3].gate_up.shape == (2 * here, WIDTH)
    assert type(model[3].down) is nn.Parameter and model[3].num_neurons == here
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path)
    read = {key: torch.empty_like(value) for key, value in whole.state_dict().items()}
    dcp.load(read, checkpoint_id=tmp_path)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(read[key], value, rtol=0, atol=1e-9)
    with pytest.raises(RuntimeError, match="is divided unevenly"):
        model.state_dict()

    balancer.move((1, 1))
    before = held(model, optimizer)
    for shares in ((3, 1), (1, 3), (1, 1)):
        balancer.move(shares)
    assert all(map(torch.equal, held(model, optimizer), before))
    plain = divided_model(rank)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    assert torch.equal(plain(x), model(x))
    assert all(check.problem is None for check in zr.check_segments(model, torch.randn(2, 3, WIDTH)))

    other = zr.convert(divided_model(rank), shares=(1, 3))
    others = torch.optim.AdamW(other.parameters(), lr=1e-2)
    dcp.load(zr.sharded_state_dict(other, others), storage_reader=zr.CheckpointReader(tmp_path))
    expected = train_by_halves(WIDTH, whole, whole_optimizer, 1, clip_grad_norm_)
    assert train_by_halves(WIDTH, other, others, 1, zr.clip_grad_norm_) == pytest.approx(expected, rel=1e-10)


@on_ranks(2)
def test_a_converted_model_is_the_hosts_bit_for_bit(rank, group):
    models = divided_model(rank), converted_model(rank)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    results = []
    for model in models:
        given = x.clone().requires_grad_()
        y = model(given)
        y.square().sum().backward()
        results.append([y, given.grad, *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *results))
    assert torch.equal(models[1][0](x, scale=2.0), models[0][0](x, 2.0))
    with torch.no_grad():
        assert torch.equal(*(model.eval()(x) for model in models))
    copied = copy.deepcopy(models[1])
    assert torch.equal(copied(x), y) and type(copied[3]).__name__ == "MovedGatedMlp"
    assert zr.check_parallel(models[1], x, lambda model, x: model(x).square().mean()) == []


@on_ranks(2)
def test_what_lends_or_drops_is_refused_by_name_on_all_ranks_at_once(rank, group):
    model = converted_model(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    for mode in ("zero-rd", "zero-pri", "zero-pridiff", "semi", "mig"):
        began = time.perf_counter()
        refusal = (
            rf"layer 0 \(MovedColumn\) computes by its host's own forward.*{mode}.*allowed are mode='exact' and 'off'"
        )
        with pytest.raises(ValueError, match=refusal):
            zr.Balancer(model, optimizer, zr.BalanceConfig(mode=mode))
        assert time.perf_counter() - began < 5.0


class Quantised(Column):
    """With a scale for each block of so many output channels."""

    dims: ClassVar = {**Column.dims, "scales": 0}

    def __init__(self, size):
        super().__init__()
        self.scales = nn.Parameter(torch.rand(size), requires_grad=False)


@on_ranks(2)
def test_a_tensor_that_cannot_be_attributed_to_units_is_named(rank, group):
    def left(dims, size):
        hosts._hosts[:] = [HostForwardClasses({Quantised: dims}, {Row: Row.dims}), *hosts._hosts]
        model = nn.Sequential(Quantised(size).divide(rank), nn.GELU(), Row().divide(rank))
        with caught_log_lines() as lines:
            zr.convert(model)
        layers = balanced_layers(model)
        return " ".join(map(str, lines)) if "0" not in layers else layers["0"].stays_even

    said = left(Column.dims, 24)
    assert rank or "0 is left alone: scales, of shape (12,), is not attributed to units" in said
    said = left({**Quantised.dims, "scales": (0, 5)}, 24)
    assert rank or "scales, of shape (12,), has no dimension 0 of 5 equal parts" in said
    reason = (
        "0.scales has 8 entries in dimension 0 on this rank, which are not equally many in 1 parts for each of its 12"
    )
    assert reason in left(Quantised.dims, 16)
    assert left(Quantised.dims, 24) is None
    assert left(Quantised.dims, 48) is None


def test_classes_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="Row: no tensor is said to hold units"):
        HostForwardClasses(rows={Row: {"weight": None}})
    with pytest.raises(ValueError, match="columns"):
        HostForwardClasses({Row: "weight"})


@on_ranks(2)
def test_a_segment_that_is_named_wrongly_is_found_out(rank, group):
    register_host(host())
    model = divided_model(rank)
    zr.convert(model, segments=[zr.Segment([], "3", min_units=0, kind="neurons", on_change=lambda neurons: None)])
    with pytest.raises(ValueError, match=r"1 of 2 segments do not move soundly: 3 \(neurons\)"):
        zr.check_segments(model, torch.randn(2, 3, WIDTH))
    with pytest.raises(ValueError, match="it names no column-parallel layer"):
        zr.convert(divided_model(rank), segments=[zr.Segment([], "2", kind="neurons")])


class DroppingMlp(GatedMlp):
    def forward(self, x):
        gate, up = (self.entering(x) @ self.gate_up.t()).chunk(2, -1)
        return self.leaving(F.dropout(F.silu(gate) * up) @ self.down.t())


@on_ranks(2)
def test_what_is_drawn_within_a_layer_leaves_what_is_drawn_behind_it_alike_on_all_ranks(rank, group):
    register_host(HostForwardClasses(segments={DroppingMlp: GatedMlp.dims}))
    register_segments(DroppingMlp, segment_of)
    torch.manual_seed(0)
    model = nn.Sequential(DroppingMlp().divide(rank), nn.Dropout(), nn.Linear(WIDTH, 4))
    balancer = zr.Balancer(model, torch.optim.SGD(model.parameters(), lr=0.1), zr.BalanceConfig(start_checks=False))
    torch.manual_seed(1)
    for shares in ((1, 1), (3, 1)):
        balancer.move(shares)
        model(torch.ones(5, WIDTH)).sum().backward()
        for here in (model[2].weight.grad, torch.get_rng_state()):
            both = [torch.empty_like(here) for _ in range(2)]
            dist.all_gather(both, here)
            assert torch.equal(*both), shares
        balancer.step()
    balancer.close()


@on_ranks(2)
def test_a_layer_may_have_none_of_a_tensor(rank, group):
    register_host(HostForwardClasses({Plain: Column.dims}, {Row: Row.dims}))
    model = nn.Sequential(Plain().divide(rank), nn.GELU(), Row().divide(rank))
    balancer = zr.Balancer(model, torch.optim.SGD(model.parameters(), lr=0.1), zr.BalanceConfig(start_checks=False))
    y = model(torch.ones(2, WIDTH))
    balancer.move((3, 1))
    torch.testing.assert_close(model(torch.ones(2, WIDTH)), y)
    balancer.close()


class Plain(Column):
    """Without a bias."""

    def __init__(self):
        super().__init__()
        self.bias = None

    def forward(self, x):
        left, right = self.entering(x).chunk(2, -1)
        return (left @ self.weight[0].t() + right @ self.weight[1].t()) * self.factor * self.steps * self.amax


class Renewing(Column):
    """Puts another Parameter in place of one of its own in every forward."""

    def forward(self, x):
        self.amax = nn.Parameter(self.amax + 1, requires_grad=False)
        return super().forward(x)


@on_ranks(2)
def test_what_a_forward_puts_in_place_of_its_parameters_stays(rank, group):
    register_host(HostForwardClasses({Renewing: Column.dims}, {Row: Row.dims}))
    layer = Renewing()
    del layer.amax
    layer.amax = nn.Parameter(torch.ones(()), requires_grad=False)
    model = zr.convert(nn.Sequential(layer.divide(rank), nn.GELU(), Row().divide(rank)))
    balancer = zr.Balancer(model, torch.optim.SGD(model.parameters(), lr=0.1), zr.BalanceConfig(start_checks=False))
    for _ in range(3):
        model(torch.ones(2, WIDTH))
    assert model[0].amax.item() == 4
    balancer.move((3, 1))
    model[0].amax.data += rank
    with pytest.raises(CannotMoveError, match=r"0\.amax, which serves all units, is not the same on all ranks"):
        balancer.move((1, 3))
    balancer.close(at_home=True)


@on_ranks(2)
def test_units_stay_where_ranks_scale_a_weight_by_different_factors(rank, group):
    model = converted_model(rank)
    balancer = zr.Balancer(model, torch.optim.AdamW(model.parameters()), zr.BalanceConfig(start_checks=False))
    model[0].amax += rank
    with pytest.raises(CannotMoveError, match=r"0\.amax, which serves all units, is not the same on all ranks"):
        balancer.move((3, 1))
    model[0].amax -= rank
    balancer.move((3, 1))
    balancer.close()


@on_ranks(2)
def test_no_decision_moves_units_once_a_graph_holds_what_it_does_not_measure(rank, group):
    model = converted_model(rank)
    balancer = zr.Balancer(model, torch.optim.AdamW(model.parameters()), zr.BalanceConfig(start_checks=False))
    balancer.move((3, 1))
    balancer.move((1, 1))
    balancer.move((3, 1))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 3, WIDTH).double()).sum().backward()
    with balancer.at_home():
        assert len(model[0].bias) == NEURONS // 2
    mover = balancer._parts.mover
    mover._decider.hold_owned((1.0, 3.0))
    with caught_log_lines() as lines:
        mover.follow(1)
    assert "a compiled graph holds it, in which that is not measured" in " ".join(map(str, lines)) or rank
    assert len(model[0].bias) == (18, 6)[rank]
    balancer.close(at_home=True)


class Narrow(GatedMlp):
    """A rank has as many neurons as each of them multiplies numbers, and an entry for each."""

    dims: ClassVar = {"down": 1, "gate_up": 0}

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.ones(4 * WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH, 4 * WIDTH))
        del self.interleaved
        self.steps = torch.rand(2 * WIDTH)

    def forward(self, x):
        return self.leaving((F.silu(self.entering(x) @ self.gate_up.t()) * self.steps) @ self.down.t())


@on_ranks(2)
def test_what_is_of_a_ranks_units_is_found_whatever_the_sizes_of_the_layer(rank, group):
    register_host(HostForwardClasses(segments={Narrow: Narrow.dims}))
    model = nn.Sequential(Narrow().divide(rank))
    with pytest.raises(ValueError, match=r"steps, of shape \[24\], seems to be of the 24 units"):
        zr.convert(model, segments=[zr.Segment([], "0", kind="neurons", on_change=lambda units: None)])


class SlowColumn(Column):
    """Takes seconds for each of its units on a slow rank, forward and backward."""

    seconds = 0.0

    def forward(self, x):
        return Sleep.apply(super().forward(x), self)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, layer):
        ctx.layer = layer
        time.sleep(layer.seconds * len(layer.bias))
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.layer.seconds * len(ctx.layer.bias))
        return dy, None


@pytest.mark.slow
@on_ranks(2)
def test_exact_measures_whole_layers_and_moves_units_off_a_slow_rank(rank, group):
    register_host(HostForwardClasses({SlowColumn: Column.dims}, {Row: Row.dims}))
    torch.manual_seed(0)
    model = nn.Sequential(SlowColumn().divide(rank), nn.GELU(), Row().divide(rank)).double()
    model[0].seconds = (0.5e-3, 2e-3)[rank]  # of a step 12 and 48 ms
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact", update_every=5))
    train_by_halves(WIDTH, model, optimizer, 60, zr.clip_grad_norm_, lambda step: balancer.step())
    times = balancer.layer_times()
    asleep = 4 * model[0].seconds * len(model[0].bias)
    assert asleep < times["0"] < 3 * asleep and times["2"] < times["0"]  # without its waits for the other rank
    assert balancer.plan.ranks[1].owned < 0.75 < 1.25 < balancer.plan.ranks[0].owned
    assert len(model[0].bias) == pytest.approx(NEURONS / 2 * balancer.plan.ranks[rank].owned, abs=1)
    balancer.close()


def test_the_program_of_the_docs_moves_units_of_its_fused_layer_and_trains_as_one_process(run_ranks):
    program = ROOT / "docs/programs/own_forward.py"
    names = {"__name__": "own_forward"}
    exec(compile(program.read_text(), str(program), "exec"), names)
    (losses, counts), (others, _) = run_ranks(lambda rank, group: names["main"](group), 2)
    assert losses == others and counts == (96, 32)
    torch.manual_seed(0)
    whole = nn.Sequential(*(names["FusedMlp"](16, 128) for _ in range(2)))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = []
    for step in range(12):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (whole(x) - x).square().mean()
        loss.backward()
        clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)

"""torchao's layers: weights of float8 training move to the bit, and quantised ones are refused by name on all ranks."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import caught_log_lines
from test_host_forward import SumBackward, SumForward, held
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr
from zeroresize.integrations import HostForwardClasses, hosts, register_host

float8 = pytest.importorskip("torchao.float8")
quantization = pytest.importorskip("torchao.quantization")
Float8Linear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear

pytestmark = pytest.mark.hosts
WIDTH, NEURONS = 16, 64


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(hosts, "_hosts", list(hosts._hosts))


def whole_model(*, is_float8=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, NEURONS), nn.GELU(), nn.Linear(NEURONS, WIDTH, bias=False))
    if not is_float8:
        return model
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    object.__setattr__(config, "emulate", True)  # on a CPU
    return float8.convert_to_float8_training(model, config=config)


class Column(Float8Linear):
    def forward(self, x):
        return super().forward(SumBackward.apply(x))


class Row(Float8Linear):
    def forward(self, x):
        return SumForward.apply(super().forward(x))


def divided(rank, group):
    """The same over two ranks, by a host's layers."""
    model = whole_model(is_float8=True)
    for number, kind, dims in ((0, Column, {"weight": 0, "bias": 0}), (2, Row, {"weight": 1})):
        layer = model[number]
        layer.__class__, layer.process_group = kind, group
        for name, dim in dims.items():
            part = getattr(layer, name).detach().chunk(2, dim)[rank].clone()
            setattr(layer, name, nn.Parameter(part))
    return model


def losses(model, optimizer, num_steps, after=lambda step: None):
    values = []
    for step in range(num_steps):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
        after(step)
    return values


def outputs(layer, rank, group):
    """What a column-parallel layer computes, in the order of all units."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9))
    units = layer.segment.owned.units_of(rank).tolist()
    of_ranks = gathered(group, dict(zip(units, layer(x).detach().t(), strict=True)))
    return torch.stack([y for _, y in sorted((of_ranks[0] | of_ranks[1]).items())])


@on_ranks(2)
def test_weights_of_float8_training_move_to_the_bit_and_train_as_in_the_undivided_model(rank, group, *, tmp_path):
    register_host(HostForwardClasses({Column: {"weight": 0, "bias": 0}}, {Row: {"weight": 1, "bias": None}}))
    model, whole = divided(rank, group), whole_model(is_float8=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, optimizer)
    moves = {1: (3, 1), 3: (1, 3)}

    def after(step):
        balancer.step()
        if step in moves:
            balancer.move(moves[step])

    expected = losses(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 6)
    # A row-parallel layer's x is scaled by what of it a rank has, so float8 rounds it otherwise.
    assert losses(model, optimizer, 6, after) == pytest.approx(expected, rel=0.02)
    assert type(model[0]).__name__ == "MovedColumn" and model[0].weight.shape == ((16, 48)[rank], WIDTH)
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path)
    balancer.move((1, 1))
    before = held(model, optimizer)
    y = outputs(model[0], rank, group)
    balancer.move((3, 1))
    assert torch.equal(outputs(model[0], rank, group), y)  # each row of its weight has a scale of its own
    balancer.move((1, 1))
    assert all(map(torch.equal, held(model, optimizer), before))
    read = {name: torch.empty_like(each) for name, each in whole.state_dict().items()}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["0.weight"].chunk(2)[rank], model[0].weight)
    balancer.close()


def quantised(model):
    model.requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def split(model, group):
    return nn.Sequential(
        zr.ColumnParallelLinear.from_linear(model[0], process_group=group),
        nn.GELU(),
        zr.RowParallelLinear.from_linear(model[2], process_group=group),
    )


WHY = "a Int8Tensor, which holds its numbers in other tensors, as quantised weights do, that would not move"


@on_ranks(2)
def test_quantised_weights_are_refused_by_name(rank, group):
    with pytest.raises(ValueError, match=rf"from_linear needs a whole .*found one whose weight is {WHY}"):
        split(quantised(whole_model()), group)
    with pytest.raises(ValueError, match=r"from_linear needs a whole .*found a Float8Linear with a forward of its own"):
        split(whole_model(is_float8=True), group)

    late = split(whole_model(), group)
    optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
    late_balancer = zr.Balancer(late, optimizer, zr.BalanceConfig(start_checks=False))
    weight = quantised(nn.Linear(WIDTH, NEURONS // 2)).weight
    late[0].weight = weight
    with pytest.raises((ValueError, RuntimeError), match=r"0\.weight was replaced by another Parameter"):
        late_balancer.move((3, 1))
    late_balancer.close()
    for mode in ("exact", "off", "mig"):
        with pytest.raises(ValueError, match=f"layer 0 cannot be balanced: its weight is {WHY}"):
            zr.Balancer(late, optimizer, zr.BalanceConfig(mode=mode))

    early = split(whole_model(), group)
    early[0].weight = weight
    with caught_log_lines() as lines:
        zr.convert(early)
    assert rank or f"layer 0 is left alone: its weight is {WHY}" in " ".join(map(str, lines))


class PlainColumn(nn.Linear):
    process_group = None

    def forward(self, x):
        return super().forward(SumBackward.apply(x))


class PlainRow(nn.Linear):
    process_group = None

    def forward(self, x):
        return SumForward.apply(super().forward(x))


@on_ranks(2)
def test_a_host_whose_weights_are_quantised_late_keeps_its_units(rank, group):
    dims = {"weight": 0, "bias": 0}, {"weight": 1, "bias": None}
    register_host(HostForwardClasses({PlainColumn: dims[0]}, {PlainRow: dims[1]}))

    def made():
        model = nn.Sequential(PlainColumn(WIDTH, NEURONS // 2), nn.GELU(), PlainRow(NEURONS // 2, WIDTH, bias=False))
        for layer in (model[0], model[2]):
            layer.process_group = group
        return model

    before = quantised(made())
    with caught_log_lines() as lines, pytest.raises(ValueError, match="no layer that can be balanced"):
        zr.convert(before)
    assert rank or "weight is a Int8Tensor, which holds its numbers in other tensors" in " ".join(map(str, lines))
    after = quantised(zr.convert(made()))
    balancer = zr.Balancer(
        after, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), zr.BalanceConfig(mode="off", start_checks=False)
    )
    with pytest.raises((ValueError, RuntimeError), match=rf"0\.weight is {WHY}"):
        balancer.move((3, 1))
    balancer.close()


@on_ranks(2)
def test_layers_of_torchs_styles_that_torchao_has_changed_are_left_alone_or_fail(rank, group):
    mesh = init_device_mesh("cpu", (2,))
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    for styles, why in (
        ((ColwiseParallel(), RowwiseParallel()), "a Float8Linear with a forward of its own"),
        ((Float8ColwiseParallel(), Float8RowwiseParallel()), "how it was split is not known: torchao"),
    ):
        model = parallelize_module(whole_model(is_float8=True), mesh, dict(zip("02", styles, strict=True)))
        with caught_log_lines() as lines, pytest.raises(ValueError, match="no layer that can be balanced"):
            zr.convert(model)
        assert rank or f"layer 0 is left alone: {why}" in " ".join(map(str, lines))
    styles = {"0": zr.ColwiseParallel(), "2": zr.RowwiseParallel()}
    model = zr.convert(parallelize_module(whole_model(), mesh, styles))
    again = float8.convert_to_float8_training(copy.deepcopy(model), config=float8.Float8LinearConfig(emulate=True))
    with pytest.raises(Exception, match="DTensor"):  # it takes layers apart that have DTensors, and knows no style
        again(torch.ones(4, WIDTH))

"""Segments of plain torch models: proven by tracing, named by the user, registered, and why the others stay even."""

import pytest
import torch
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import assert_any_owner_computes_the_same
from helpers.processes import for_each, in_first_rank
from helpers.segments import convert_and_find
from torch import nn

from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.conversion import balanced_layers
from zeroresize.integrations import known_modules
from zeroresize.layers.segment import Segment

WIDTH, INNER = 8, 12


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What a test registers is forgotten again."""
    monkeypatch.setattr(known_modules, "_adapters", dict(known_modules._adapters))
    monkeypatch.setattr(known_modules, "_registered", set(known_modules._registered))


class Layers:
    """Makes parallel layers of a group, in float64."""

    def __init__(self, group):
        self._made_for = {"process_group": group, "dtype": torch.float64}

    def col(self, num_inputs=WIDTH, num_outputs=INNER, **options):
        return ColumnParallelLinear(num_inputs, num_outputs, **self._made_for, **options)

    def row(self, num_inputs=INNER, num_outputs=WIDTH, **options):
        return RowParallelLinear(num_inputs, num_outputs, **self._made_for, **options)


def module(forward, **parts):
    """One whose forward is ``forward(self, x)``."""

    class Module(nn.Module):
        pass

    Module.forward = forward
    made = Module()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def found_in(model, group, named=()):
    torch.manual_seed(0)
    return convert_and_find(model, group, named)


def mlp(layers, act=None):
    return nn.Sequential(layers.col(), nn.GELU() if act is None else act, layers.row())


def gated(layers):
    return module(
        lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x) * 0.5),
        gate=layers.col(bias=False),
        up=layers.col(),
        down=layers.row(),
    )


def fused(layers):
    def forward(self, x, scale=None):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.sigmoid(gate).mul(up).to(x.dtype))

    return module(forward, gate_up=layers.col(WIDTH, 2 * INNER), down=layers.row())


def glu(layers):
    return module(
        lambda self, x: self.down(self.glu(self.fc(x))),
        fc=layers.col(WIDTH, 2 * INNER),
        glu=nn.GLU(),
        down=layers.row(),
    )


def nested(layers):
    def forward(self, x):
        return x + self.outside["fc2"](self.drop(self.inside(self.norm(x)).relu()))

    inside = module(lambda self, x: torch.tanh(self.fc1(x)), fc1=layers.col())
    return module(
        forward,
        norm=nn.LayerNorm(WIDTH, dtype=torch.float64),
        inside=inside,
        drop=nn.Dropout(0.0),
        outside=nn.ModuleDict({"fc2": layers.row()}),
    )


def experts(layers):
    """Two of them, each with an argument that need not be given, and tokens that go to one or the other."""

    def expert():
        def forward(self, x, scale=None, keep=True):
            h = F.silu(self.up(x))
            return self.down(h if scale is None else h * 2.0)

        return module(forward, up=layers.col(), down=layers.row())

    def forward(self, x):
        y = torch.zeros_like(x)
        for number, expert_there in enumerate(self.experts):
            mask = (x.sum(-1) > 0).long() == number
            y[mask] = expert_there(x[mask])
        return y

    return module(forward, experts=nn.ModuleList([expert(), expert()]))


PROVEN = {
    "Sequential": (mlp, {"2": (["0"], 1)}),
    "gate and up": (gated, {"down": (["gate", "up"], 1)}),
    "gate and up in one": (fused, {"down": (["gate_up"], 2)}),
    "GLU": (glu, {"down": (["fc"], 2)}),
    "submodules": (nested, {"outside.fc2": (["inside.fc1"], 1)}),
    "experts": (experts, {f"experts.{n}.down": ([f"experts.{n}.up"], 1) for n in (0, 1)}),
    "flat in one": (
        lambda layers: nn.Sequential(*mlp(layers), nn.LayerNorm(WIDTH, dtype=torch.float64), *mlp(layers)),
        {"2": (["0"], 1), "6": (["4"], 1)},
    ),
}


@on_ranks(2, PROVEN.values())
def test_a_proven_segment_computes_the_same_whoever_owns_its_neurons(rank, group, build, expected):
    torch.manual_seed(0)
    model = build(Layers(group))
    segments, reasons = found_in(model, group)
    assert reasons == {}
    assert [one.name for one in segments] == list(expected)
    for segment in segments:
        columns, num_parts = expected[segment.name]
        assert list(segment.layers) == [*columns, segment.name] and segment.kind == "neurons"
        assert len(segment.owned.owners) == INNER and segment.owned.is_home
        *of_columns, of_row = segment.tensors
        assert {(one.dim, one.rows) for one in of_columns} == {(0, (1,) * num_parts)}
        assert (of_row.name, of_row.dim, of_row.rows) == (f"{segment.name}.weight", 1, (1,))
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_any_owner_computes_the_same(model, segments, lambda model: model(x), group)


@on_ranks(2)
@in_first_rank
def test_neurons_change_hands_by_eights_or_fours_where_there_are_enough(rank, group):
    layers = Layers(group)
    sizes = [2048, 2064, 1536, 2056, 128]
    model = nn.ModuleList(nn.Sequential(layers.col(WIDTH, n), nn.ReLU(), layers.row(n)) for n in sizes)
    segments, _ = found_in(model, group)
    assert [one.quantum for one in segments] == [8, 8, 4, 4, 1]


def odd(forward, **more):
    return lambda layers: module(forward, a=layers.col(), b=layers.row(), **more)


def attention(layers):
    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (one(x).view(batch, tokens, 2, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))

    return module(forward, **{name: layers.col() for name in "qkv"}, out=layers.row())


def branching(self, x):
    return self.b(self.a(x) if x.sum() > 0 else self.a(x).softmax(-1))


def hooked(layers):
    model = mlp(layers)
    model[1].register_forward_hook(lambda module, inputs, output: output.softmax(-1))
    return model


def in_two_places(layers):
    shared = layers.col()
    return nn.ModuleList(
        [nn.Sequential(shared, nn.ReLU(), layers.row()), module(lambda self, x: self.a(x).sum(), a=shared)]
    )


def tied(layers):
    model = nn.ModuleList([mlp(layers), nn.Linear(WIDTH, INNER // 2, dtype=torch.float64)])
    model[1].weight = model[0][0].weight
    return model


def replaced_forward(layers):
    model = gated(layers)
    model.forward = lambda x: model.down((model.gate(x) * model.up(x)).softmax(-1))
    return model


def keeping(self, x):
    self.seen = self.a(x).relu()
    return self.b(self.seen)


NOT_PROVEN = {
    "softmax": (odd(lambda self, x: self.b(self.a(x).softmax(-1))), "softmax()"),
    "LayerNorm": (
        lambda layers: mlp(layers, nn.LayerNorm(INNER // 2, dtype=torch.float64)),
        "not proven element-wise: 1",
    ),
    "in place": (odd(lambda self, x: [h := self.a(x), h.cumsum_(-1), self.b(h)][2]), "also used by cumsum_()"),
    "its own parameter": (
        odd(lambda self, x: self.b(self.a(x) * self.scale), scale=nn.Parameter(torch.ones(6))),
        "scale",
    ),
    "two outputs": (odd(lambda self, x: [h := self.a(x).relu(), (self.b(h), h)][1][0] + h.sum()), "sum()"),
    "kept": (odd(keeping), "its forward keeps something from call to call: Module.seen"),
    "another input": (odd(lambda self, x: self.b(self.a(x) + x)), "no output of a column-parallel layer"),
    "branches": (odd(branching), "torch.fx cannot trace the model (Module): TraceError"),
    "attention": (attention, "not proven element-wise: view()"),
    "a hook": (hooked, "1 has a forward hook"),
    "another forward around": (
        replaced_forward,
        "cannot trace the model (Module): TypeError: its forward was replaced",
    ),
    "in two places": (in_two_places, "0.0 is registered in the model at several places"),
    "a shared weight": (tied, "0.0 shares its weight with another module"),
    "a whole input": (
        lambda layers: nn.Sequential(layers.col(gather_output=True), nn.ReLU(), layers.row(input_is_parallel=False)),
        "it takes the whole input and splits it evenly itself",
    ),
    "row after row": (
        lambda layers: nn.Sequential(*mlp(layers), layers.row(WIDTH * 2, WIDTH), layers.col()),
        "its input is no output of a column-parallel layer",
    ),
    "row alone": (lambda layers: nn.Sequential(layers.row(), nn.ReLU()), "no output of a column-parallel layer"),
}


def test_what_is_not_proven_stays_even_with_the_reason(run_ranks):
    @for_each(NOT_PROVEN.items())
    def check(rank, group, kind, case):
        build, reason = case
        model = build(Layers(group))
        segments, reasons = found_in(model, group)
        in_segments = {name for one in segments for name in one.layers}
        assert in_segments.isdisjoint(reasons) and in_segments | set(reasons) == set(balanced_layers(model))
        assert any(reason in one for one in reasons.values()), reasons
        assert len(segments) == (kind == "row after row")
        assert model.training

    run_ranks(in_first_rank(check), 2)


@on_ranks(2)
def test_a_user_names_what_cannot_be_proven(rank, group):
    torch.manual_seed(0)
    model = nn.Sequential(attention(Layers(group)), mlp(Layers(group)))
    attn = model[0]
    heads = {"now": 1}

    def forward(x):
        batch, tokens, _ = x.shape
        q, k, v = (one(x).view(batch, tokens, heads["now"], 6).transpose(1, 2) for one in (attn.q, attn.k, attn.v))
        return attn.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, -1))

    attn.forward = forward
    named = Segment(
        column=["0.q", attn.k, "0.v"],
        row=attn.out,
        unit_size=6,
        on_change=lambda units: heads.update(now=len(units)),
        kind="heads",
    )
    segments, reasons = found_in(model, group, named=[named])
    assert reasons == {} and [one.name for one in segments] == ["0.out", "1.2"]
    assert segments[0].kind == "heads" and segments[0].owned.counts == (1, 1)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_any_owner_computes_the_same(model, segments, lambda model: model(x), group)


MISTAKES = {
    "unknown": (Segment(["0.nothing"], "0.out"), "the model has no layer '0.nothing'"),
    "no layer": (Segment(["1.1"], "1.2"), "layer 1.1 is not converted; allowed are 0.q, 0.k, 0.v, 0.out, 1.0, 1.2"),
    "row as column": (Segment(["0.out"], "1.2"), "layer 0.out is row-parallel, and column must name column-parallel"),
    "nothing": (Segment([], "1.2"), "it names no column-parallel layer"),
    "twice": (Segment(["1.0", "1.0"], "1.2"), "layer 1.0 is in it twice"),
    "unit_size": (Segment(["1.0"], "1.2", unit_size=4), "1.0 is divided 1 : 1, .* of unit_size=4"),
    "parts": (Segment(["1.0"], "1.2", parts=5), "1.0: parts=5 is not allowed: .* equal parts the 12 features are"),
    "min_units": (Segment(["1.0"], "1.2", min_units=7), "min_units=7: allowed are 0 to 6"),
}


def test_a_named_segment_that_cannot_be_is_an_error(run_ranks):
    @for_each(MISTAKES.values())
    def check(rank, group, segment, message):
        model = nn.Sequential(attention(Layers(group)), mlp(Layers(group)))
        with pytest.raises(ValueError, match=message) as error:
            found_in(model, group, named=[segment])
        assert str(error.value).startswith("Segment(column=[")

    run_ranks(in_first_rank(check), 2)

"""How a step's work lies in a model's layers."""

from helpers.on_ranks import on_ranks
from torch import nn

from zeroresize import ColumnParallelLinear, RowParallelLinear, convert
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import moving_weights, segments_of_layers


@on_ranks(1)
def test_ranks_meet_after_row_parallel_layers(rank, group):
    def layers_of(kinds):
        kind_of = {"c": ColumnParallelLinear, "r": RowParallelLinear}
        return {f"{kind}{place}": kind_of[kind](4, 4, process_group=group) for place, kind in enumerate(kinds)}

    assert [
        "/".join("".join(name[0] for name in segment) for segment in segments_of_layers(layers_of(kinds)))
        for kinds in ("cccrcr", "ccr", "rc", "crrc", "c", "")
    ] == ["cccr/cr", "ccr", "r/c", "crr/c", "c", ""]


@on_ranks(2)
def test_of_the_trained_weights_those_of_units_can_change_hands(rank, group):
    up, down = ColumnParallelLinear(4, 8, process_group=group), RowParallelLinear(8, 4, process_group=group)
    model = nn.Sequential(nn.Sequential(up, nn.GELU(), down), nn.LayerNorm(4))
    convert(model, process_group=group)
    moving, staying = 16 + 4 + 16, 4 + 8  # weights and bias of its units; the bias of the sum, the norm
    assert moving_weights(balanced_layers(model), model) == moving / (moving + staying)
    model[1].requires_grad_(False)
    assert moving_weights(balanced_layers(model), model) == moving / (moving + 4)
    model.requires_grad_(False)
    assert moving_weights(balanced_layers(model), model) == 0.0

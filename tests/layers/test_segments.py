"""How a step's work lies in a model's layers."""

from helpers.on_ranks import on_ranks

from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segments import segments_of_layers


@on_ranks(1)
def test_ranks_meet_after_row_parallel_layers(rank, group):
    def layers_of(kinds):
        kind_of = {"c": ColumnParallelLinear, "r": RowParallelLinear}
        return {f"{kind}{place}": kind_of[kind](4, 4, process_group=group) for place, kind in enumerate(kinds)}

    assert [
        "/".join("".join(name[0] for name in segment) for segment in segments_of_layers(layers_of(kinds)))
        for kinds in ("cccrcr", "ccr", "rc", "crrc", "c", "")
    ] == ["cccr/cr", "ccr", "r/c", "crr/c", "c", ""]

"""Layers begin where their parameters are divided evenly."""

from torch import nn

from zeroresize.pipeline import Pipeline
from zeroresize.pipeline.stage_layers import divided_by_parameters


def layers_of(*sizes):
    return [nn.Linear(size, 1, bias=False, device="meta") if size else nn.Identity() for size in sizes]


def test_the_largest_stage_is_as_small_as_can_be():
    layers = layers_of(40, 10, 10, 10, 10, 10, 30)
    assert divided_by_parameters(layers, 3).boundaries == (0, 1, 5, 7)


def test_equally_many_layers_stay_where_no_division_is_better():
    assert divided_by_parameters(layers_of(*[4] * 8), 3).boundaries == (0, 3, 6, 8)
    assert divided_by_parameters(layers_of(0, 0, 0, 0), 2).boundaries == (0, 2, 4)
    assert divided_by_parameters(layers_of(9, 1, 1, 1, 1), 2).boundaries == (0, 1, 5)


def test_layers_that_share_parameters_are_not_parted():
    first, second, *others = layers_of(40, 40, 10, 10)
    assert divided_by_parameters([first, second, *others], 2).boundaries == (0, 1, 4)
    second.weight = first.weight
    assert divided_by_parameters([first, second, *others], 2).boundaries == (0, 2, 4)


def test_a_pipeline_begins_with_it_unless_somebody_says_so(run_ranks):
    def run(rank, group):
        begun = []
        for boundaries in (None, (0, 2, 4)):
            layers, loss = [nn.Linear(*sizes) for sizes in ((8, 8), (8, 2), (2, 2), (2, 2))], nn.functional.mse_loss
            pipeline = Pipeline(layers, loss, num_microbatches=2, process_group=group, boundaries=boundaries)
            begun.append(pipeline.boundaries)
        return begun

    assert run_ranks(run, 2) == [[(0, 1, 4), (0, 2, 4)]] * 2

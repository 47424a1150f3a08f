"""local_weight: a layer whose parameter has another form than what this rank multiplies by is balanced all the same."""

import torch
from torch import nn

import zeroresize as zr
from zeroresize.conversion import balanced_layers

FEATURES = 16
PADDING = 3


class PaddedLayer:
    """Keeps its weight [N, K] as the first columns of a wider parameter, as a host that pads to a block does."""

    @property
    def local_weight(self):
        return self.weight[:, : self.weight.shape[1] - PADDING]


class PaddedColumn(PaddedLayer, zr.ColumnParallelLinear):
    pass


class PaddedRow(PaddedLayer, zr.RowParallelLinear):
    pass


def padded(layer, layer_class):
    layer.__class__ = layer_class
    layer.weight = nn.Parameter(torch.nn.functional.pad(layer.weight.detach(), (0, PADDING), value=9.0))
    return layer


def pair(group, is_padded):
    torch.manual_seed(0)
    up, down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)
    column = zr.ColumnParallelLinear.from_linear(up, process_group=group)
    row = zr.RowParallelLinear.from_linear(down, process_group=group)
    if is_padded:
        column, row = padded(column, PaddedColumn), padded(row, PaddedRow)
    return nn.Sequential(column, nn.GELU(), row)


def test_a_padded_parameter_trains_as_the_plain_one_does(run_ranks):
    """Plans, lineage, statistics, calibration and products are all of the K columns that this rank multiplies by."""

    def train(rank, group, is_padded):
        config = zr.BalanceConfig(mode="zero-pri", priority="variation", ratio=0.5, ranks=[0], update_every=2)
        model = zr.convert(pair(group, is_padded), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
        x = torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(1))
        losses = []
        for step in range(9):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
            if step % 3 == 2:
                balancer.epoch_end()
            losses.append(loss.item())
        layers = balanced_layers(model)
        return (
            losses,
            {name: layer.num_columns for name, layer in layers.items()},
            {name: [] if (own := balancer.lineage.pruned(name, "w")) is None else own.tolist() for name in layers},
            {name: steps.tolist() for name, steps in balancer.pruned_steps().items()},
            balancer.metrics()["balance/statistic_bytes"],
            {name: layer.local_weight.detach().tolist() for name, layer in layers.items()},
        )

    plain, wide = run_ranks(train, 2, False), run_ranks(train, 2, True)
    assert wide == plain
    assert plain[0][1] == {"0": FEATURES, "2": FEATURES}
    assert all(plain[0][2].values()), "the rank prunes"

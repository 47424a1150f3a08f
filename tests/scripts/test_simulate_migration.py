"""What the model of Table I counts is what training moves."""

import pytest
import torch
import torch.distributed as dist
from helpers.parallel_layers import randn

import zeroresize as zr
from scripts.bench.simulate_migration import (
    Layer,
    Traffic,
    all_reduce_values,
    layers_of_vit,
    traffic_of_layer,
    traffic_of_step,
)
from zeroresize.config.keys import MIGRATION_TRANSPORTS

IN, HIDDEN, TOKENS = 24, 48, 10


@pytest.mark.parametrize("num_ranks, num_owners", [(2, 1), (3, 1), (4, 1), (4, 2), (3, 2)])
def test_it_counts_the_bytes_that_a_step_moves(run_ranks, num_ranks, num_owners):
    def moved(rank, group):
        up = zr.ColumnParallelLinear(IN, HIDDEN, process_group=group)
        down = zr.RowParallelLinear(HIDDEN, IN, process_group=group)
        counted = {}
        for migration_transport in MIGRATION_TRANSPORTS:
            config = zr.BalanceConfig(
                mode="mig", ratio=0.5, ranks=tuple(range(num_owners)), migration_transport=migration_transport
            )
            model = zr.convert(torch.nn.Sequential(up, down), process_group=group)
            balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), process_group=group, config=config)
            x = randn(TOKENS, IN, dtype=torch.float32).requires_grad_(True)
            model(x).square().sum().backward()
            total = torch.tensor(float(balancer.bytes_migrated))
            dist.all_reduce(total, group=group)
            counted[migration_transport] = total.item()
            balancer.close()
        return counted

    up, down = Layer(HIDDEN // num_ranks, IN, True), Layer(IN, HIDDEN // num_ranks, False)
    expected = {
        migration_transport: sum(
            4.0
            * num_owners
            * traffic_of_layer(migration_transport, layer, TOKENS, layer.num_columns // 2, num_ranks, num_owners).values
            for layer in (up, down)
        )
        for migration_transport in MIGRATION_TRANSPORTS
    }
    assert run_ranks(moved, num_ranks) == [expected] * num_ranks


def test_what_one_receiver_gets_costs_the_link_the_same_either_way_but_for_what_is_merged():
    layer = Layer(8, 16, False)
    by_collectives, apart = (traffic_of_layer(way, layer, 100, 4, 2, 1) for way in MIGRATION_TRANSPORTS)
    assert apart.link_values - by_collectives.link_values == 8 * 100, "y is merged"


def test_collectives_of_two_owners_come_one_after_the_other():
    layers = layers_of_vit(64, 1, 8)
    of_one_owner, of_two_owners = (
        traffic_of_step("broadcast-reduce", layers, 100, 0.5, 8, num_owners) for num_owners in (1, 2)
    )
    assert of_two_owners.link_values > 1.5 * of_one_owner.link_values


def test_a_step_sums_y_and_dx_of_every_attention_and_feed_forward_part():
    values = all_reduce_values(layers_of_vit(64, 3, 4), 100, 4)
    assert values == 2 * 3 / 4 * (3 * 2) * 2 * (100 * 64), "a ring sends 2 (e − 1) / e of what it sums"


def test_a_vit_has_six_layers_a_block_whose_parameters_are_divided():
    layers = layers_of_vit(64, 3, 4)
    assert len(layers) == 18
    assert sum(layer.num_rows * layer.num_columns for layer in layers) == 3 * 12 * 64 * 64 // 4
    assert traffic_of_step("scatter-gather", layers, 10, 0.0, 4, 1) == Traffic()

"""What migration costs on more GPUs than there are here (Table I): python -m scripts.bench.simulate_migration

Counts what each way of migrating moves in a training step of a ViT, layer by layer, and from that the time on an
owner's link: a broadcast or a reduce is pipelined, so the link carries each value once however many ranks there are,
but those of all owners, which come one after the other; from point to point it carries every receiver's copy. Nothing
overlaps, so the times are upper bounds. Receivers compute 1 + γ ν / (e − ν) of their products. RT(0) is the products
and the all-reduces of y and dx. Speeds are those of V100 on PCIe 3, as the paper's, unless told otherwise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from zeroresize.config.keys import MIGRATION_TRANSPORTS

BYTES_PER_VALUE = 4
#: y, dx and dw.
NUM_PRODUCTS = 3


@dataclass(frozen=True)
class Layer:
    """A parallel linear layer on one rank: its weight is [N, K].

    Attributes:
        num_rows, num_columns: N and K.
        is_column_parallel: x is everywhere and y the owner's; otherwise x is the owner's and y everywhere.
    """

    num_rows: int
    num_columns: int
    is_column_parallel: bool


@dataclass(frozen=True)
class Traffic:
    """The traffic of one loan in one step.

    Attributes:
        values: what arrives anywhere, each arrival counted.
        link_values: what passes an owner's link, in one direction after the other.
        transfers: how many messages or collectives an owner waits for.
    """

    values: int = 0
    link_values: int = 0
    transfers: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.values + other.values, self.link_values + other.link_values, self.transfers + other.transfers
        )


def layers_of_vit(hidden: int, depth: int, num_ranks: int) -> list[Layer]:
    """Queries, keys and values, their output, and both layers of the feed-forward part of every block."""
    wide, narrow = 4 * hidden // num_ranks, hidden // num_ranks
    attention = [Layer(narrow, hidden, True)] * 3 + [Layer(hidden, narrow, False)]
    return [*attention, Layer(wide, hidden, True), Layer(hidden, wide, False)] * depth


def traffic_of_layer(
    way: str, layer: Layer, num_tokens: int, num_lent: int, num_ranks: int, num_owners: int
) -> Traffic:
    """What one owner's ``num_lent`` columns of a layer move in a step, in each direction.

    Args:
        way: one of :data:`~zeroresize.config.keys.MIGRATION_TRANSPORTS`.
    """
    receivers = num_ranks - num_owners
    w, y, x = layer.num_rows * num_lent, layer.num_rows * num_tokens, num_lent * num_tokens

    def apart(size: int) -> Traffic:
        """Disjoint pieces, a receiver's each."""
        return Traffic(size, size, receivers)

    def copies(size: int) -> Traffic:
        """All of it to or from every receiver, point to point."""
        return Traffic(size * receivers, size * receivers, receivers)

    def collective(size: int) -> Traffic:
        """A broadcast to, or a reduce from, all ranks; every owner's passes every link."""
        return Traffic(size * (num_ranks - 1), size * num_owners, math.ceil(math.log2(num_ranks)) * num_owners)

    if way == "scatter-gather":
        if layer.is_column_parallel:
            return apart(w) + copies(y) + copies(y) + apart(x) + apart(w)
        return apart(x) + apart(w) + copies(y) + apart(x) + apart(w)
    if layer.is_column_parallel:
        sum_of_y = collective(y) if receivers > 1 else copies(y)  # one addend is sent and added
        return collective(w) + sum_of_y + collective(y) + apart(w)
    return collective(x) + collective(w) + apart(x) + apart(w)


def traffic_of_step(
    way: str, layers: Sequence[Layer], num_tokens: int, ratio: float, num_ranks: int, num_owners: int
) -> Traffic:
    """One owner's share of a step's traffic at γ = ``ratio``."""
    lent = [(layer, round(ratio * layer.num_columns)) for layer in layers]
    traffic = [
        traffic_of_layer(way, layer, num_tokens, number, num_ranks, num_owners) for layer, number in lent if number
    ]
    return sum(traffic, Traffic())


def all_reduce_values(layers: Sequence[Layer], num_tokens: int, num_ranks: int) -> float:
    """What a rank sends in a step's all-reduces, in a ring: y of row-parallel layers, and dx before their inputs."""
    summed = sum(2 * layer.num_rows * num_tokens for layer in layers if not layer.is_column_parallel)
    return 2 * (num_ranks - 1) / num_ranks * summed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--owners", type=int, nargs="+", default=[1, 4], help="ν, how many ranks lend")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64 * 65, help="of a batch")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--teraflops", type=float, default=12.0, help="that a rank's products reach")
    parser.add_argument("--gigabytes", type=float, default=12.0, help="a second, of a link in one direction")
    parser.add_argument("--latency-us", type=float, default=10.0, help="of a transfer")
    arguments = parser.parse_args()

    layers = layers_of_vit(arguments.hidden, arguments.depth, arguments.ranks)
    multiplied = sum(layer.num_rows * layer.num_columns for layer in layers) * arguments.tokens
    products_s = 2 * NUM_PRODUCTS * multiplied / (arguments.teraflops * 1e12)
    values_per_s = arguments.gigabytes * 1e9 / BYTES_PER_VALUE
    all_reduces_s = all_reduce_values(layers, arguments.tokens, arguments.ranks) / values_per_s
    for num_owners in arguments.owners:
        table = Table("γ", *(f"{way}: {what}" for way in MIGRATION_TRANSPORTS
                             for what in ("GB a step", "ms on a link", "RT")),
                      title=f"ν = {num_owners} of {arguments.ranks} ranks; RT(0): products {1e3 * products_s:.0f} ms, "
                      f"all-reduces {1e3 * all_reduces_s:.0f} ms",
                      title_justify="left")  # fmt: skip
        for ratio in arguments.ratios:
            cells = []
            computed = 1.0 + ratio * num_owners / (arguments.ranks - num_owners)
            for way in MIGRATION_TRANSPORTS:
                traffic = traffic_of_step(way, layers, arguments.tokens, ratio, arguments.ranks, num_owners)
                seconds = traffic.link_values / values_per_s + traffic.transfers * arguments.latency_us / 1e6
                ratio_of_steps = (computed * products_s + all_reduces_s + seconds) / (products_s + all_reduces_s)
                gigabytes = num_owners * traffic.values * BYTES_PER_VALUE / 1e9
                cells += [f"{gigabytes:.2f}", f"{1e3 * seconds:.0f}", f"{ratio_of_steps:.2f}"]
            table.add_row(f"{ratio:g}", *cells)
        Console(width=130).print(table)


if __name__ == "__main__":
    main()

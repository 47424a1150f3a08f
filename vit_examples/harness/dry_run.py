"""What ranks would need, as a table: a dry run finds it out on any machine, with the model on torch's meta device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from zeroresize.utils.console import plain_console


@dataclass(frozen=True)
class Needs:
    """Of one rank: ``parameters`` are counted, everything else is in bytes.

    Attributes:
        what: which part of the model, in words; may be empty.
        optimizer: its state, and master weights where there are any.
        activations: an estimate.
    """

    what: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The most at any time."""
        return self.weights + self.gradients + self.optimizer + self.activations


def show_needs(title: str, needs: Mapping[str, Sequence[Needs]], notes: Sequence[str] = ()) -> None:
    """Print, on rank 0 if under torchrun, what ranks need under each heading; ranks that need the same share a row."""
    if os.environ.get("RANK", "0") != "0":
        return
    table = Table(title=title, title_justify="left")
    headings = ["weights", "gradients", "optimizer", "activations, estimated"]
    for heading in ("", "ranks", "holds"):
        table.add_column(heading)
    for heading in ("parameters", *headings, "at most"):
        table.add_column(heading, justify="right")
    for name, of_ranks in needs.items():
        first = 0
        for need, alike in itertools.groupby(of_ranks):
            end = first + len(list(alike))
            sizes = [need.weights, need.gradients, need.optimizer, need.activations, need.total]
            ranks = str(first) if end == first + 1 else f"{first} to {end - 1}"
            texts = [f"{size / 2**20:,.1f} MiB" for size in sizes]
            is_last = end == len(of_ranks)
            table.add_row("" if first else name, ranks, need.what, f"{need.parameters:,}", *texts, end_section=is_last)
            first = end
    console = plain_console()
    if needs:
        console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)

"""The pictures of a run's report."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from scripts.report_run import RunFolder

#: Legends, rows and numbers for every rank, or every loan, are readable up to so many.
MOST_RANKS = 16
WORK_LABELS = ("its own, computed here", "lent to others", "dropped", "borrowed from others")
WORK_COLORS = ("#4c72b0", "#dd8452", "#dddddd", "#55a868")


def _in_ms(series: tuple[Sequence[int], Sequence[float]]) -> tuple[Sequence[int], np.ndarray]:
    steps, seconds = series
    return steps, 1e3 * np.array(seconds)


def times_picture(run: RunFolder) -> Figure:
    """Step time beside what it would be without balancing, each rank's busy time, and its γ."""
    figure, (wall, busy, ratio) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8), layout="constrained")
    # Times are of the steps before a line or record, a plan is of those after it.
    steps, step_ms = _in_ms(run.step_times())
    wall.stairs(step_ms, [0, *steps], baseline=None, color="black", label="measured")
    wall.plot(*_in_ms(run.slowest_at_full_work()), "--", color="firebrick", drawstyle="steps-pre",
              label="slowest rank at full work, without collectives: a step takes longer unbalanced")  # fmt: skip
    wall.plot(*_in_ms(run.series(next(iter(run.records)), "predicted_step_s")), ":", color="steelblue",
              drawstyle="steps-post", label="predicted")  # fmt: skip
    wall.set_ylabel("step time, ms")
    for rank in run.records:
        busy.plot(*_in_ms(run.series(rank, "busy_s")), label=f"rank {rank}", drawstyle="steps-pre")
        ratio.plot(*run.series(rank, "ratio"), label=f"rank {rank}", drawstyle="steps-post")
    busy.set_ylabel("busy time at\nfull work, ms")
    ratio.set_ylabel("γ, pruned and lent")
    ratio.set_ylim(-0.02, 1.02)
    ratio.set_xlabel("optimizer step")
    for axes in (wall, busy):
        axes.set_ylim(bottom=0)
    for axes in (wall, busy, ratio):
        axes.grid(alpha=0.3)
    wall.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small")
    if len(run.records) <= MOST_RANKS:
        busy.legend(loc="upper left", ncols=4, fontsize="small")
    return figure


def work_picture(run: RunFolder) -> Figure:
    """What becomes of every rank's products: computed at home, by others or not at all; and what it borrows."""
    ranks = list(run.records)[:MOST_RANKS]
    size = (9, 0.8 + 1.3 * len(ranks))
    figure, rows = pyplot.subplots(len(ranks), 1, sharex=True, sharey=True, squeeze=False, figsize=size,
                                   layout="constrained")  # fmt: skip
    for axes, rank in zip(rows[:, 0], ranks, strict=True):
        steps, pruned = run.series(rank, "pruned_share")
        lent, borrowed = (run.series(rank, name)[1] for name in ("lent_share", "borrowed_share"))
        own = [1 - one - other for one, other in zip(pruned, lent, strict=True)]
        axes.stackplot(steps, own, lent, pruned, borrowed, step="post", colors=WORK_COLORS, labels=WORK_LABELS)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel(f"rank {rank}")
    most = max(np.nanmax(run.series(rank, "borrowed_share")[1]) for rank in ranks)
    rows[0, 0].set_ylim(0, 1.05 * (1 + most))  # the axes share it
    rows[-1, 0].set_xlabel("optimizer step")
    figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize="small")
    return figure


def loans_picture(run: RunFolder) -> Figure:
    """Who lent how much to whom: mean over the run's steps, in units of a rank's own products."""
    ranks = list(run.records)
    lent = np.array([[run.mean_lent(owner, receiver) for receiver in ranks] for owner in ranks])
    size = 2.5 + 0.5 * len(ranks)
    figure, axes = pyplot.subplots(figsize=(size + 1, size), layout="constrained")
    image = axes.imshow(lent, vmin=0, vmax=max(lent.max(), 1e-9), cmap="viridis")
    for (owner, receiver), share in np.ndenumerate(lent) if len(ranks) <= MOST_RANKS else ():
        if share > 0:
            axes.text(
                receiver,
                owner,
                f"{share:.2f}",
                ha="center",
                va="center",
                color="white" if share < lent.max() / 2 else "black",
            )
    axes.set_xticks(range(len(ranks)), ranks)
    axes.set_yticks(range(len(ranks)), ranks)
    axes.set_xlabel("computed by rank")
    axes.set_ylabel("lent by rank")
    figure.colorbar(image, label="share of the lender's products")
    return figure


def loans_over_time_picture(run: RunFolder) -> Figure:
    """A line for each lender and receiver: the share of the lender's products, against steps."""
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    loans = run.loans()
    colors = pyplot.get_cmap("tab20")
    for number, (owner, receiver) in enumerate(loans):
        steps, shares = run.lent_over_time(owner, receiver)
        ends = [*steps, max(run.num_steps, steps[-1])]
        axes.plot(ends, [*shares, shares[-1]], color=colors(number % colors.N), drawstyle="steps-post", linewidth=1.2,
                  label=f"rank {owner} to {receiver}")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("share of the lender's products")
    axes.grid(alpha=0.3)
    if len(loans) <= MOST_RANKS:
        axes.legend(loc="upper left", ncols=4, fontsize="small")
    return figure


def layers_picture(run: RunFolder, rank: int) -> Figure:
    """What share of each layer's columns a rank prunes, over the steps."""
    records = run.records[rank]
    layers = list(records[0]["layer_shares"])
    shares = np.array([[record["layer_shares"][layer] for record in records] for layer in layers])
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(layers)), layout="constrained")
    begins = [record["step"] for record in records]  # each is in force from its step to the next one's
    edges = [*begins, max(run.num_steps, begins[-1] + 1)]
    mesh = axes.pcolormesh(edges, np.arange(len(layers) + 1), shares, vmin=0, vmax=1, cmap="viridis")
    axes.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("optimizer step")
    figure.colorbar(mesh, label="share of columns pruned")
    return figure


def columns_picture(run: RunFolder, rank: int, bins: int = 192) -> Figure:
    """In how many steps a rank pruned each column of each layer, up to ``bins`` points a layer."""
    counts = run.columns[rank]
    most = max(int(steps.max()) for steps in counts.values())
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(counts)), layout="constrained")
    rows = [[part.mean() for part in np.array_split(steps, min(bins, len(steps)))] for steps in counts.values()]
    for position, row in enumerate(rows):
        edges = np.linspace(0, 1, len(row) + 1)
        mesh = axes.pcolormesh(edges, [position, position + 1], [row], vmin=0, vmax=max(most, 1), cmap="magma")
    axes.set_yticks(np.arange(len(counts)) + 0.5, list(counts), fontsize=7)
    axes.set_ylim(len(counts), 0)
    axes.set_xlabel("column, as a share of the layer's input features")
    figure.colorbar(mesh, label="steps pruned")
    return figure

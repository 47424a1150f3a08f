"""The pictures of a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scripts.report.gain import Gain, gain_of
from scripts.report.run import WORK, RunFolder

#: Legends, rows and numbers for every rank, or every loan, are readable up to so many.
MOST_RANKS = 16
#: Of WORK, in its order.
WORK_LABELS = (
    "its own, computed here", "lent to others", "dropped", "moved to others", "taken over from others",
    "borrowed from others",
)  # fmt: skip
WORK_COLORS = ("#4c72b0", "#dd8452", "#dddddd", "#f2e2a0", "#8172b3", "#55a868")


def _in_ms(series: tuple[Sequence[int], Sequence[float]]) -> tuple[Sequence[int], np.ndarray]:
    steps, seconds = series
    return steps, 1e3 * np.array(seconds)


def _to_the_end(run: RunFolder, plans: tuple[Sequence[int], Sequence[float]]) -> tuple[list[int], np.ndarray]:
    """The last plan is in force until the run's last step, so it is told there once more."""
    begins, values = plans
    return [*begins, max(run.num_steps, begins[-1])], np.array([*values, values[-1]])


def _computed(run: RunFolder, rank: int) -> tuple[list[int], list[float]]:
    """What a rank computes in all, as a multiple of an even share."""
    parts = [run.work(rank, name) for name in ("kept", "taken", "borrowed")]
    return parts[0][0], [sum(own) for own in zip(*(values for _, values in parts), strict=True)]


def _over_steps(axes: Axes) -> None:
    """The x-axis is of optimizer steps."""
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def times_picture(run: RunFolder) -> Figure:
    """Step time, and of those steps without balancing that tell what it brought; T*; each rank's busy time, and its γ.

    Where units move, in place of γ what each rank computes, since γ is of what it owns by then.
    """
    figure, (wall, busy, ratio) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8), layout="constrained")
    # Times are of the steps before a line or record, a plan is of those after it.
    ends, step_ms = _in_ms(([end for end, _ in run.logged], [seconds for _, seconds in run.logged]))
    if len(ends):
        wall.stairs(step_ms, [0, *ends], baseline=None, color="black", label="measured")
    gain = gain_of(run)
    if isinstance(gain, Gain):
        points = [((one.begin + one.end) / 2, 1e3 * one.seconds) for one in gain.unbalanced if one.seconds is not None]
        wall.plot(*zip(*points, strict=True), "o", color="firebrick", markersize=4, label="without balancing")
    predicted = run.plans(next(iter(run.records)), "predicted_step_s")
    if np.isfinite(predicted[1]).any():
        wall.plot(*_in_ms(predicted), ":", color="steelblue", drawstyle="steps-post", label="predicted")
    bound = run.plans(next(iter(run.records)), "bound_s")
    if np.isfinite(bound[1]).any():
        label = "T*, the least that drops nothing"
        wall.plot(*_in_ms(bound), "--", color="seagreen", drawstyle="steps-post", label=label)
    wall.set_ylabel("step time, ms")
    for rank in run.records:
        busy.plot(*_in_ms(run.series(rank, "busy_s")), label=f"rank {rank}", drawstyle="steps-pre")
        plans = _computed(run, rank) if run.has_moved else run.plans(rank, "ratio")
        ratio.plot(*_to_the_end(run, plans), label=f"rank {rank}", drawstyle="steps-post")
    if run.has_moved:
        busy.set_ylabel("busy time at\neven shares, ms")
        ratio.set_ylabel("computed here,\nas a multiple of\nan even share")
        ratio.set_ylim(bottom=-0.02)
    else:
        busy.set_ylabel("busy time at\nfull work, ms")
        ratio.set_ylabel("γ, pruned and lent")
        ratio.set_ylim(-0.02, 1.02)
    _over_steps(ratio)
    settled_ms = step_ms[1:][np.isfinite(step_ms[1:])]  # the first steps warm up
    wall.set_ylim(0, 1.15 * settled_ms.max() if len(settled_ms) else None)
    busy.set_ylim(bottom=0)
    for axes in (wall, busy, ratio):
        axes.grid(alpha=0.3)
    if wall.get_legend_handles_labels()[0]:
        wall.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize="small")
    if 1 < len(run.records) <= MOST_RANKS:
        busy.legend(loc="lower left", ncols=4, fontsize="small")
    return figure


def work_picture(run: RunFolder) -> Figure:
    """What becomes of every rank's products: computed at home, by others or not at all; and what it takes in.

    In all pictures the black line is what its host gave the rank.
    """
    ranks = list(run.records)[:MOST_RANKS]
    size = (9, 0.8 + 1.3 * len(ranks))
    figure, rows = pyplot.subplots(len(ranks), 1, sharex=True, sharey=True, squeeze=False, figsize=size,
                                   layout="constrained")  # fmt: skip
    shares = {rank: [_to_the_end(run, run.work(rank, name))[1] for name in WORK] for rank in ranks}
    is_there = [True, *(any(own[at].any() for own in shares.values()) for at in range(1, len(WORK)))]
    colors, labels = (list(compress(all_of_them, is_there)) for all_of_them in (WORK_COLORS, WORK_LABELS))
    for axes, rank in zip(rows[:, 0], ranks, strict=True):
        steps, _ = _to_the_end(run, run.plans(rank, "ratio"))
        axes.stackplot(steps, *compress(shares[rank], is_there), step="post", colors=colors, labels=labels)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel(f"rank {rank}")
    most = max(np.nanmax(np.sum(own, axis=0)) for own in shares.values())
    rows[0, 0].set(xlim=(0, run.num_steps), ylim=(0, 1.05 * max(most, 1.0)))  # the axes share them
    _over_steps(rows[-1, 0])
    if len(labels) > 1:
        figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize="small")
    return figure


def units_picture(run: RunFolder) -> Figure:
    """How many units of each kind every rank owns."""
    kinds = run.kinds_of_units
    figure, rows = pyplot.subplots(len(kinds), 1, sharex=True, squeeze=False, figsize=(9, 0.8 + 2.2 * len(kinds)),
                                   layout="constrained")  # fmt: skip
    for axes, kind in zip(rows[:, 0], kinds, strict=True):
        for rank in run.records:
            owned = _to_the_end(run, run.units_over_time(rank, kind))
            axes.plot(*owned, label=f"rank {rank}", drawstyle="steps-post")
        axes.set_ylabel(f"{kind} of all layers")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    _over_steps(rows[-1, 0])
    if len(run.records) <= MOST_RANKS:
        figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=8, fontsize="small")
    return figure


def loans_picture(run: RunFolder) -> Figure:
    """Draw who lent how much to whom: mean over the run's steps, in units of a rank's even share of products."""
    ranks = list(run.records)
    lent = np.array([[run.mean_lent(owner, receiver) for receiver in ranks] for owner in ranks])
    size = 1.5 + 0.4 * len(ranks)
    figure, axes = pyplot.subplots(figsize=(size + 1, size), layout="constrained")
    image = axes.imshow(lent, vmin=0, vmax=max(lent.max(), 1e-9), cmap="viridis")
    for (owner, receiver), share in np.ndenumerate(lent) if len(ranks) <= MOST_RANKS else ():
        if share > 0:
            color = "white" if share < lent.max() / 2 else "black"
            axes.text(receiver, owner, f"{share:.2f}", ha="center", va="center", color=color, fontsize="small")
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
        axes.plot(*_to_the_end(run, run.lent_over_time(owner, receiver)), color=colors(number % colors.N),
                  drawstyle="steps-post", linewidth=1.2, label=f"rank {owner} to {receiver}")  # fmt: skip
    axes.set_ylim(bottom=0)
    _over_steps(axes)
    axes.set_ylabel("share of the lender's products")
    axes.grid(alpha=0.3)
    if len(loans) <= MOST_RANKS:
        axes.legend(loc="upper left", ncols=4, fontsize="small")
    return figure


def layers_picture(run: RunFolder, rank: int) -> Figure:
    """What share of each layer's columns a rank prunes, over the steps."""
    records = run.records[rank]
    layers = list(records[0]["layer_shares"])
    shares = np.array([[record["layer_shares"].get(layer, np.nan) for record in records] for layer in layers])
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(layers)), layout="constrained")
    begins = run.plan_begins(rank)
    edges = [*begins, max(run.num_steps, begins[-1] + 1)]
    mesh = axes.pcolormesh(edges, np.arange(len(layers) + 1), shares, vmin=0, vmax=1, cmap="viridis")
    axes.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=7)
    axes.invert_yaxis()
    _over_steps(axes)
    figure.colorbar(mesh, label="share of columns pruned")
    return figure


def columns_picture(run: RunFolder, rank: int, bins: int = 192) -> Figure:
    """Draw in how many steps a rank pruned each column of each layer, by up to ``bins`` points a layer."""
    # Of a layer of which the rank owns nothing there is no column.
    counts = {name: steps if len(steps) else np.zeros(1, dtype=int) for name, steps in run.columns[rank].items()}
    most = max(int(steps.max()) for steps in counts.values())
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(counts)), layout="constrained")
    rows = [[part.mean() for part in np.array_split(steps, min(bins, len(steps)))] for steps in counts.values()]
    for position, row in enumerate(rows):
        edges = np.linspace(0, 1, len(row) + 1)
        mesh = axes.pcolormesh(edges, [position, position + 1], [row], vmin=0, vmax=max(most, 1), cmap="magma")
    axes.set_yticks(np.arange(len(counts)) + 0.5, list(counts), fontsize=7)
    axes.set_ylim(len(counts), 0)
    axes.set_xlabel("column, as a share of the layer's input features")
    figure.colorbar(mesh, label="steps pruned", ticks=MaxNLocator(integer=True))
    return figure

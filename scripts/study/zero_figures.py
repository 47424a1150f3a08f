"""Draws the ZERO-resizing paper's figures of accuracy at this scale: python -m scripts.study.zero_figures

Figs. 5, 7 and 9, and with the larger model 6 and 8, are other views of the cells of ``accuracy_selectors`` and
``accuracy_large``, whose pruning ratios γ are pinned: a straggler catches up by γ = 1 − 1/χ, and PriDiffE always prunes
half. Nothing slept, so below accuracy is not a step's time but the products of the rank that takes longest, in those of
an even share.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from scripts.study.__main__ import read_table
from scripts.study.plot import draw_lines, lines_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
#: χ at which a line that does not depend on it is drawn, and Baseline's products.
SKEWNESSES = (1, 2, 4, 8, 10)
Rows = list[dict[str, str]]


def imputations() -> Rows:
    """Fig. 3: what stands in for pruned columns: the epochs of ``fig3``, and the ends of ``accuracy_zero_rd``."""
    names = {
        "Baseline": "Baseline",
        **{f"ZERO-Rd γ=1/2{name}": name.strip() or "zero" for name in ("", " average", " same")},
    }
    ends = [
        {**row, "cell": f"{names[row['cell']]} epoch={row['epochs']}"}
        for row in read_table(RESULTS / "accuracy_zero_rd.csv")
        if row["cell"] in names
    ]
    return ends + [
        {**row, "cell": f"{row['cell']} epoch={epoch}", "test_accuracy": accuracy}
        for row in (read_table(RESULTS / "fig3.csv") if (RESULTS / "fig3.csv").is_file() else [])
        for epoch, accuracy in enumerate(row["accuracy_by_epoch"].split(), 1)
    ]


def by_ratio(rows: Rows, which: str, chi: int) -> Rows:
    """Figs. 5 to 8: Baseline, and Rd and Pri by γ, of all ranks or of one that is χ times as slow."""
    chosen = []
    for row in rows:
        if row["cell"] == "Baseline":
            chosen.append({**row, "products": str(chi)})
        elif match := re.fullmatch(rf"(Rd|Pri) γ=([\d/]+) {which}", row["cell"]):
            left = chi * (1 - Fraction(match[2]))
            products = left if which == "all" else max(1, left)
            chosen.append({**row, "cell": f"{match[1]} γ={match[2]}", "products": str(float(products))})
    return chosen


def by_skewness(rows: Rows) -> Rows:
    """Fig. 9: the straggler prunes what Eq. (1) asks for, Pri and PriDiffR, or half of its columns, PriDiffE."""
    chosen = []
    for row in rows:
        match = re.fullmatch(r"(Pri|PriDiff) γ=([\d/]+) one", row["cell"])
        if row["cell"] == "Baseline":
            chosen += [row] + [
                {**row, "cell": f"Baseline χ={chi}", "test_accuracy": "", "products": str(chi)} for chi in SKEWNESSES
            ]
        elif match is not None:
            chi = 1 / (1 - Fraction(match[2]))
            line = "Pri" if match[1] == "Pri" else "PriDiffR"
            chosen.append({**row, "cell": f"{line} χ={chi}", "products": "1"})
            if row["cell"] == "PriDiff γ=1/2 one":
                chosen += [
                    {**row, "cell": f"PriDiffE χ={chi}", "products": str(max(1, chi / 2))} for chi in SKEWNESSES[1:]
                ]
    return chosen


def main() -> None:
    small = read_table(RESULTS / "accuracy_selectors.csv")
    figures = {
        "Fig. 3: γ=1/2, one rank": ("epoch", imputations()),
        "Fig. 5: all ranks prune": ("γ", by_ratio(small, "all", 1)),
        "Fig. 7: one rank prunes, χ=2": ("γ", by_ratio(small, "one", 2)),
        "Fig. 9: one rank prunes": ("χ", by_skewness(small)),
    }
    if (RESULTS / "accuracy_large.csv").is_file():
        large = read_table(RESULTS / "accuracy_large.csv")
        figures["Fig. 6: as 5, larger model"] = "γ", by_ratio(large, "all", 1)
        figures["Fig. 8: as 7, larger model"] = "γ", by_ratio(large, "one", 2)
    figure, panels = pyplot.subplots(2, len(figures), figsize=(4 * len(figures), 7), layout="constrained")
    for (accuracy, products), (title, (x, rows)) in zip(panels.T, figures.items(), strict=True):
        lines = lines_of(rows, x)
        draw_lines(accuracy, lines, "test_accuracy", 100.0)
        accuracy.set(title=title, xlabel=x, ylabel="test accuracy, %")
        accuracy.set_xlim(left=0)
        accuracy.legend(fontsize="small")
        draw_lines(products, lines, "products", 1.0)
        products.set(xlabel=x, ylabel="products of the slowest rank", xlim=accuracy.get_xlim())
        products.set_ylim(bottom=0)
        products.set_visible(any("products" in row for row in rows))
    figure.savefig(RESULTS / "zero_figures.png", dpi=80)


if __name__ == "__main__":
    main()

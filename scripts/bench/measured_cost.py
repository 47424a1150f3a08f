"""What pruning costs a ViT of hidden 768 on a CPU, as measured: for simulations."""

from zeroresize.policy.tensor.costs import ResizingCost, spread_ratios

#: Share of a step outside the multiplications.
REST_SHARE = 0.08
#: Shares of the multiplications, and shares of a step that gathers and fills take.
COST = ResizingCost(spread_ratios(0.9), (1.0, 0.85, 0.68, 0.51, 0.33, 0.14), (0.0, 0.03, 0.03, 0.027, 0.022, 0.018))

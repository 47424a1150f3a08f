"""The three products on kept columns, as their formulas say, in float64: for the reference and for other kernels."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from zeroresize.kernels.probe import Probes
from zeroresize.plan.layer import LayerPlan

PRODUCTS = ("forward", "dgrad", "wgrad")


def drawn_plan(num_columns, num_kept, num_lent, imputation, seed=0, block=1):
    """A plan of ``LayerPlan.from_pruned`` whose columns are drawn in blocks."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(-(-num_columns // block), generator=generator)
    columns = (block * order[:, None] + torch.arange(block)).flatten()
    columns = columns[columns < num_columns]
    lent, pruned = columns[num_kept : num_kept + num_lent], columns[num_kept + num_lent :]
    return LayerPlan.from_pruned(pruned, num_columns, imputation=imputation, lent=lent)


@st.composite
def cases(draw, most=70):
    """Tokens, outputs, and a plan."""
    tokens, outputs, num_columns = (draw(st.integers(1, most)) for _ in range(3))
    block = draw(st.sampled_from([1, 16, 32]))
    kept = draw(st.integers(0, num_columns)) // block * block
    lent = num_columns if kept == 0 else draw(st.integers(0, num_columns - kept))
    imputation = draw(st.sampled_from(["zero", "average", "same"]))
    return tokens, outputs, drawn_plan(num_columns, kept, lent, imputation, draw(st.integers(0, 2**31)), block)


@dataclasses.dataclass
class Operands:
    """Of all products; what is not to be read is NaN."""

    x_TK: Tensor
    w_NK: Tensor
    bias_N: Tensor | None
    dy_TN: Tensor
    last_dx_TK: Tensor
    last_dw_NK: Tensor

    @classmethod
    def random(cls, tokens, outputs, plan, dtype, device="cpu", seed=0):
        generator = torch.Generator().manual_seed(seed)
        T, N, K = tokens, outputs, plan.num_columns
        sizes = ((T, K), (N, K), (N,), (T, N), (T, K), (N, K))
        x, w, bias, dy, *last = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
        for columns in (plan.pruned, plan.lent):
            x[:, columns] = w[:, columns] = torch.nan
        for columns in (plan.keep_P, plan.lent):
            last[0][:, columns] = last[1][:, columns] = torch.nan
        return cls(x, w, bias, dy, *last)

    def lie_as_they_like(self):
        """Let rows and columns lie anyhow in memory, of dy all at the same place."""
        tokens, outputs = self.dy_TN.shape
        self.x_TK = self.x_TK.t().contiguous().t()
        wide = self.w_NK.new_full((2 * outputs, 3 * self.w_NK.shape[1]), torch.nan)
        wide[::2, ::3] = self.w_NK
        self.w_NK, self.bias_N = wide[::2, ::3], self.bias_N.repeat_interleave(2)[::2]
        self.dy_TN = self.dy_TN[:1, :1].expand(tokens, outputs)  # as sum().backward() gives it
        self.last_dw_NK = self.last_dw_NK.t().contiguous().t()

    def of(self, product, plan):
        """The operands of a product."""
        return {
            "forward": (self.x_TK, self.w_NK, self.bias_N, plan),
            "dgrad": (self.dy_TN, self.w_NK, plan, self.last_dx_TK),
            "wgrad": (self.dy_TN, self.x_TK, plan, self.last_dw_NK),
        }[product]


def by_formula(product: str, operands: Operands, plan: LayerPlan) -> Tensor:
    """A product, element by element as the formulas say."""
    names = [field.name for field in dataclasses.fields(operands)]
    tensors = [None if t is None else t.double().cpu() for t in (getattr(operands, name) for name in names)]
    x, w, bias, dy, *lasts = tensors
    keep, pruned = plan.keep_P.cpu(), plan.pruned.cpu()
    if product == "forward":
        y = x[:, keep] @ w[:, keep].T
        return y if bias is None else y + bias
    (a, b), last = ((dy, w), lasts[0]) if product == "dgrad" else ((dy.T, x), lasts[1])
    computed = a @ b[:, keep]
    full = torch.zeros(len(a), plan.num_columns, dtype=torch.float64)
    full[:, keep] = computed
    if plan.imputation == "average" and len(pruned):
        full[:, pruned] = computed.mean(1, keepdim=True)
    if plan.imputation == "same":
        full[:, pruned] = last[:, pruned]
    return full


def agree_with_formulas(kernels: ModuleType, operands: Operands, plan: LayerPlan) -> None:
    """All three products: sums in float32, rounded once to their dtype."""
    for product in PRODUCTS:
        result = getattr(kernels, product)(*operands.of(product, plan), Probes())
        assert result.dtype == operands.x_TK.dtype and result.is_contiguous()
        assert_close(
            result.double().cpu(),
            by_formula(product, operands, plan),
            rtol=torch.finfo(result.dtype).eps,
            atol=2**-14,
            msg=lambda text, product=product: f"{product}, {plan.imputation}: {text}",
        )

"""Gradual global magnitude pruning (DynMo, section 3.2.1, after Zhu and Gupta 2017).

The smallest weights of all blocks' linear layers together are pruned, more of them every so many steps. So some layers
lose more than others, as weights differ in size. Embedding, norms, biases and the head stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lm_examples.cases.dynamic_case import CaseConfig, DynamicCase, dense_products
from lm_examples.cases.sparse_linear import SparseLinear
from lm_examples.gpt import Block, ModelConfig
from lm_examples.sections import Share
from vit_examples.harness.checked_fields import Count, Natural
from vit_examples.harness.program import of_all_ranks
from zeroresize.pipeline import Pipeline
from zeroresize.utils.value_checks import at_least, number


@dataclass(frozen=True, kw_only=True)
class PruningConfig(CaseConfig):
    """When how much is pruned.

    Attributes:
        initial_sparsity, final_sparsity: share of pruned weights at the first and after the last pruning step.
        start, end: the first and the last pruning step.
        every: steps from one pruning step to the next.
        sparse_below: share of kept weights of one matrix below which only those are stored and computed. Measured on a
            CPU core at hidden size 256 and 512, forward and backward of a whole block then take 1.0 of the dense time
            at a share of 0.25, 0.85 at 0.2 and 0.5 at 0.1: a kept weight takes longer in a sparse product.
    """

    name: str = "pruning"
    initial_sparsity: Share = 0.0
    final_sparsity: Share = 0.9
    start: Natural = 3000
    end: Count = 7000
    every: Count = 1000
    sparse_below: Annotated[float, partial(number, least=0, most=1)] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        number("case.final_sparsity", self.final_sparsity, least=self.initial_sparsity, below=1)
        at_least("case.end", self.end, self.start + 1)
        if (self.end - self.start) % self.every:
            raise ValueError(
                f"case.every={self.every} is not allowed: the steps from case.start={self.start} to "
                f"case.end={self.end} must be a multiple of it"
            )

    def sparsity_at(self, step: int) -> float | None:
        """Eq. (3): the share of weights that are pruned after this step; None if nothing is pruned in it."""
        if not self.start <= step <= self.end or (step - self.start) % self.every:
            return None
        left = 1.0 - (step - self.start) / (self.end - self.start)
        return self.final_sparsity + (self.initial_sparsity - self.final_sparsity) * left**3


class PrunableBlock(Block):
    """A block whose linear layers can be pruned."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self._model = model
        for parent in (self.attention, self.mlp):
            for name, linear in list(parent.named_children()):
                setattr(parent, name, _as_sparse(linear))

    @property
    def linears(self) -> list[SparseLinear]:
        return [one for one in self.modules() if isinstance(one, SparseLinear)]

    def forward(self, x_BTD: Tensor) -> Tensor:
        num_tokens = x_BTD.shape[1]
        skipped = sum(one.in_features * one.out_features - one.num_products for one in self.linears)
        self.work = 1.0 - skipped * num_tokens / dense_products(self._model, num_tokens)
        return super().forward(x_BTD)


class Pruning(DynamicCase):
    """Blocks lose their smallest weights by and by."""

    Config: ClassVar[type[CaseConfig]] = PruningConfig

    def block(self, number: int) -> nn.Module:
        return PrunableBlock(self.model)

    def after_step(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int, loss: float | None) -> bool:
        sparsity = self.options.sparsity_at(step)
        if sparsity is None:
            return False
        linears = _linears_of(pipeline.layers[number] for number in pipeline.present)

        num_kept = round((1.0 - sparsity) * _num_weights(_linears_of(pipeline.layers)))
        candidates = [linear.candidates() for linear in linears]
        masks = global_top_k(candidates, num_kept, pipeline.process_group)
        for linear, keep in zip(linears, masks, strict=True):
            linear.prune(keep, optimizer, self.options.sparse_below)
        return True

    def figures(self, pipeline: Pipeline) -> dict[str, float]:
        linears = _linears_of(pipeline.layers[number] for number in pipeline.present)
        if not linears:
            return {}
        return {"sparsity": 1.0 - sum(one.num_kept for one in linears) / _num_weights(linears)}


def _as_sparse(linear: nn.Linear) -> SparseLinear:
    """With the same parameters."""
    with torch.device("meta"):
        sparse = SparseLinear(linear.in_features, linear.out_features)
    sparse.weight, sparse.bias = linear.weight, linear.bias
    return sparse


def _linears_of(layers: Iterable[nn.Module]) -> list[SparseLinear]:
    return [one for layer in layers if isinstance(layer, PrunableBlock) for one in layer.linears]


def _num_weights(linears: Iterable[SparseLinear]) -> int:
    """Pruned ones and others."""
    return sum(one.in_features * one.out_features for one in linears)


def global_top_k(tensors: Sequence[Tensor], k: int, process_group: ProcessGroup) -> list[Tensor]:
    """Masks, True for the ``k`` numbers of largest magnitude of all ranks' tensors; collective.

    All magnitudes are brought together, as in the paper's Algorithm 1. Of equal ones the first are kept, in the order
    of ranks, tensors and elements; NaN counts as the largest.

    Args:
        tensors: [P] each, of this rank, of floating dtypes; there may be none.
        k: the same on all ranks.
    """
    here = torch.cat([torch.zeros(0, dtype=torch.float64), *(each.abs().double() for each in tensors)])
    of_ranks = of_all_ranks(here, process_group)
    magnitudes = torch.cat(of_ranks)
    keep = torch.zeros_like(magnitudes, dtype=torch.bool)
    keep[magnitudes.sort(descending=True, stable=True).indices[:k]] = True
    of_rank = keep.split([len(each) for each in of_ranks])[dist.get_rank(process_group)]
    return list(of_rank.split([len(each) for each in tensors]))

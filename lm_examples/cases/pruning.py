"""Gradual global magnitude pruning (DynMo, section 3.2.1, after Zhu and Gupta 2017).

The smallest weights of all blocks' linear layers together are pruned, more of them every so many steps. So some layers
lose more than others, as weights differ in size. Embedding, norms, biases and the head stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.cases.global_top_k import global_top_k
from lm_examples.cases.multiplications import dense_products
from lm_examples.cases.sparse_linear import SparseLinear, require_prunable_state
from lm_examples.gpt import Block, ModelConfig
from zeroresize.pipeline import Pipeline
from zeroresize.resharding.agreement import meet_prepared
from zeroresize.utils.value_checks import at_least, number


@dataclass(frozen=True, kw_only=True)
class PruningOptions:
    """When how much is pruned.

    Attributes:
        initial_sparsity, final_sparsity: share of pruned weights at the first and after the last pruning step.
        start, end: the first and the last pruning step.
        every: steps from one pruning step to the next.
        sparse_below: share of kept weights of one matrix below which only those are stored and computed. Measured on a
            CPU core at hidden size 256 and 512, forward and backward of a whole block then take 1.0 of the dense time
            at a share of 0.25, 0.85 at 0.2 and 0.5 at 0.1: a kept weight takes longer in a sparse product.
    """

    initial_sparsity: float = 0.0
    final_sparsity: float = 0.9
    start: int = 3000
    end: int = 7000
    every: int = 1000
    sparse_below: float = 0.25

    def __post_init__(self) -> None:
        number("pruning.initial_sparsity", self.initial_sparsity, least=0, below=1)
        number("pruning.final_sparsity", self.final_sparsity, least=self.initial_sparsity, below=1)
        number("pruning.sparse_below", self.sparse_below, least=0, most=1)
        at_least("pruning.start", self.start, 0)
        at_least("pruning.every", self.every, 1)
        at_least("pruning.end", self.end, self.start + 1)
        if (self.end - self.start) % self.every:
            raise ValueError(
                f"pruning.every={self.every} is not allowed: the steps from pruning.start={self.start} to "
                f"pruning.end={self.end} must be a multiple of it"
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

    Options: ClassVar[type[Any]] = PruningOptions

    def block(self, number: int) -> nn.Module:
        return PrunableBlock(self.model)

    def after_step(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int, loss: float | None) -> bool:
        """See the base.

        Raises:
            ValueError: for an optimizer whose state cannot be pruned; the other ranks raise a RuntimeError.
        """
        sparsity = self.options.sparsity_at(step)
        if sparsity is None:
            return False
        linears = _linears_of(pipeline.layers[number] for number in pipeline.present)
        can_be_pruned: tuple[float, float] | Exception = (0.0, 0.0)
        try:
            for linear in linears:
                require_prunable_state(linear.weight, optimizer.state.get(linear.weight, {}))
        except ValueError as error:  # the others must hear of it
            can_be_pruned = error
        meet_prepared(pipeline.meet(), can_be_pruned)
        num_kept = round((1.0 - sparsity) * _num_weights(_linears_of(pipeline.layers)))
        candidates = [one.candidates() for one in linears]
        for linear, keep in zip(
            linears, global_top_k(candidates, num_kept, pipeline.process_group, pipeline.device), strict=True
        ):
            linear.prune(keep, optimizer, self.options.sparse_below)
        return True

    def figures(self, pipeline: Pipeline) -> dict[str, float]:
        linears = _linears_of(pipeline.layers[number] for number in pipeline.present)
        if not linears:
            return {}
        return {"sparsity": 1.0 - sum(one.num_kept for one in linears) / _num_weights(linears)}


def _as_sparse(linear: nn.Linear) -> SparseLinear:
    """With the same parameters."""
    sparse = SparseLinear(0, 0)
    sparse.in_features, sparse.out_features = linear.in_features, linear.out_features
    sparse.weight, sparse.bias = linear.weight, linear.bias
    return sparse


def _linears_of(layers: Iterable[nn.Module]) -> list[SparseLinear]:
    return [one for layer in layers if isinstance(layer, PrunableBlock) for one in layer.linears]


def _num_weights(linears: Iterable[SparseLinear]) -> int:
    """Pruned ones and others."""
    return sum(one.in_features * one.out_features for one in linears)

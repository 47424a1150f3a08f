"""Gradual global magnitude pruning (DynMo, section 3.2.1, after Zhu and Gupta 2017).

The smallest weights of all blocks' linear layers together are pruned, more of them every so many steps. So some layers
lose more than others, as weights differ in size. Embedding, norms, biases and the head stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lm_examples.cases.dynamic_case import DynamicCase, dense_products
from lm_examples.cases.sparse_linear import SparseLinear, require_prunable_state
from lm_examples.gpt import Block, ModelConfig
from zeroresize.comm.collectives import all_reduce, group_rank, group_size, message_device
from zeroresize.pipeline import Pipeline
from zeroresize.resharding.agreement import agreed
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

        def require() -> None:
            for linear in linears:
                require_prunable_state(linear.weight, optimizer.state.get(linear.weight, {}))

        agreed(pipeline.meet(), require)
        num_kept = round((1.0 - sparsity) * _num_weights(_linears_of(pipeline.layers)))
        candidates = [linear.candidates() for linear in linears]
        masks = global_top_k(candidates, num_kept, pipeline.process_group, pipeline.device)
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
    sparse = SparseLinear(0, 0)
    sparse.in_features, sparse.out_features = linear.in_features, linear.out_features
    sparse.weight, sparse.bias = linear.weight, linear.bias
    return sparse


def _linears_of(layers: Iterable[nn.Module]) -> list[SparseLinear]:
    return [one for layer in layers if isinstance(layer, PrunableBlock) for one in layer.linears]


def _num_weights(linears: Iterable[SparseLinear]) -> int:
    """Pruned ones and others."""
    return sum(one.in_features * one.out_features for one in linears)


def global_top_k(tensors: Sequence[Tensor], k: int, process_group: ProcessGroup, device: torch.device) -> list[Tensor]:
    """Masks, True for the ``k`` numbers of largest magnitude of all ranks' tensors; collective.

    All magnitudes are brought together, as in the paper's Algorithm 1. Of equal ones the first are kept, in the order
    of ranks, tensors and elements; NaN counts as the largest.

    Args:
        tensors: [P] each, of this rank, of floating dtypes; there may be none.
        k: the same on all ranks.
        device: where the tensors are.
    """
    rank, num_ranks = group_rank(process_group), group_size(process_group)
    sizes_R = torch.zeros(num_ranks, dtype=torch.int64, device=message_device(process_group, device))
    sizes_R[rank] = sum(map(len, tensors))
    all_reduce(sizes_R, process_group)
    sizes = sizes_R.tolist()
    magnitudes = torch.zeros(sum(sizes), dtype=torch.float64, device=sizes_R.device)
    begin = sum(sizes[:rank])
    if tensors:
        magnitudes[begin : begin + sizes[rank]] = torch.cat([each.abs().double() for each in tensors])
    all_reduce(magnitudes, process_group)
    keep = torch.zeros_like(magnitudes, dtype=torch.bool)
    keep[magnitudes.sort(descending=True, stable=True).indices[:k]] = True
    return list(keep[begin : begin + sizes[rank]].to(device).split([len(each) for each in tensors]))

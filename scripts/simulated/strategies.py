"""Strategies on a simulated cluster: what layers of a LLaMA-like model cost by arithmetic.

``T`` tokens, ``n`` ranks of a tensor-parallel group. For the slides' Table 3 (HotSPa); what they do not tell is an
assumption that a field here states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.simulated.llama_tensors import LlamaShape, llama_tensors
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.layer_cost_table import LayerCost, LayerCostTable
from zeroresize.policy.strategy.packing import pack
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds

_BF16 = 2


@dataclass(frozen=True)
class GpuCluster:
    """Describe nodes of equal GPUs; by default the 32 A800 of HotSPa's slides.

    Attributes:
        flops_per_s: peak of a GPU in bfloat16.
        efficiency: share of the peak that matrix products and attention reach. It does not fall with the size of a
            rank's part of a matrix, although a real one does.
        within_bytes_per_s: of a GPU to others of its node, one way: half of NVLink's 400 GB/s.
        between_bytes_per_s: of a GPU to other nodes, one way: an InfiniBand adapter of 200 Gb/s for each.
        message_s: what each collective takes besides.
    """

    num_nodes: int = 4
    gpus_per_node: int = 8
    flops_per_s: float = 312e12
    efficiency: float = 0.5
    within_bytes_per_s: float = 200e9
    between_bytes_per_s: float = 25e9
    message_s: float = 20e-6

    @property
    def num_gpus(self) -> int:
        """Return how many GPUs there are."""
        return self.num_nodes * self.gpus_per_node

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of an all-reduce of neighbours, by rings that use all links of the group.

        Between nodes every GPU has its own adapter.
        """
        speed = self.within_bytes_per_s
        if num_ranks > self.gpus_per_node:
            speed = min(speed, self.gpus_per_node * self.between_bytes_per_s)
        return 2.0 * (num_ranks - 1) / num_ranks * num_bytes / speed


def llama_layer_costs(shape: LlamaShape, cluster: GpuCluster, degrees: Sequence[int]) -> LayerCostTable:
    """Return the seconds and bytes of a LLaMA-like model's blocks in bfloat16, nothing recomputed.

    Products take 6 FLOPs a weight and token, forward and backward; causal attention takes 7 · hidden · length² with
    its scores computed again in the backward (FlashAttention-2). Four all-reduces a block (slides), as reduce-scatters
    and all-gathers where sequence parallelism divides what lies between (Korthikanti et al.), so that a block keeps 34
    · hidden bytes a token, divided by n. The embedding is looked up for nothing; the head multiplies and keeps logits
    in bfloat16 and fp32. As :func:`llama_tensors` has it, both belong to the blocks beside them.
    """
    head_size = shape.hidden // shape.num_heads
    weights = shape.hidden * (2 * shape.hidden + 2 * shape.num_groups * head_size + 3 * shape.feed_forward)
    rate = cluster.flops_per_s * cluster.efficiency

    def cost(n: int, num_weights: int, kept_bytes: float) -> LayerCost:
        all_reduces_s = 4 * cluster.all_reduce_s(_BF16 * shape.hidden, n)
        return LayerCost(
            8 * cluster.message_s if n > 1 else 0.0,
            6 * num_weights / (rate * n) + all_reduces_s,
            7 * shape.hidden / (rate * n),
            kept_bytes / n,
        )

    head, block_bytes = shape.hidden * shape.vocabulary, 34.0 * shape.hidden
    costs = {
        "block": {n: cost(n, weights, block_bytes) for n in degrees},
        "last": {n: cost(n, weights + head, block_bytes + 6 * shape.vocabulary) for n in degrees},
    }
    return LayerCostTable(("block",) * (shape.num_layers - 1) + ("last",), costs, _BF16 * shape.hidden)


def llama_cost_model(shape: LlamaShape, cluster: GpuCluster, degrees: Sequence[int]) -> CostModel:
    """Return the costs of training in bfloat16 with Adam and weights in fp32 beside.

    That is 12 bytes of state for 2 of a weight.
    """
    return CostModel(
        llama_layer_costs(shape, cluster, degrees),
        tuple(llama_tensors(shape, _BF16)),
        tuple(rank // cluster.gpus_per_node for rank in range(cluster.num_gpus)),
        LinkSpeeds(cluster.within_bytes_per_s, cluster.between_bytes_per_s),
        optimizer_ratio=6.0,
    )


def padded_rows(lengths: Sequence[int], max_tokens: int, dp: int) -> list[list[list[int]]]:
    """Pack as HotSPa's published code does: rows padded to ``max_tokens``, dealt in turn.

    Attention is over the whole row.
    """
    rows = [[max_tokens]] * len(pack(lengths, max_tokens))
    return [rows[replica::dp] for replica in range(dp)]

"""Strategies on a simulated cluster: what layers of a LLaMA-like model cost by arithmetic, and long-tailed lengths.

``T`` tokens, ``n`` ranks of a tensor-parallel group. For the slides' Table 3 (HotSPa); what they do not tell is an
assumption that a field here states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from zeroresize.simulate.llama_tensors import LlamaShape, llama_tensors
from zeroresize.strategy.costs.cost_model import CostModel
from zeroresize.strategy.costs.layer_costs import LayerCost, LayerCosts
from zeroresize.strategy.running.packing import pack
from zeroresize.strategy.switching.switch_plan import LinkSpeeds

_BF16 = 2


@dataclass(frozen=True)
class GpuCluster:
    """Nodes of equal GPUs; as it stands the slides' 32 A800.

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
        return self.num_nodes * self.gpus_per_node

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Of neighbours, by rings that use all links of the group; between nodes every GPU has its own adapter."""
        speed = self.within_bytes_per_s
        if num_ranks > self.gpus_per_node:
            speed = min(speed, self.gpus_per_node * self.between_bytes_per_s)
        return 2.0 * (num_ranks - 1) / num_ranks * num_bytes / speed


def llama_layer_costs(shape: LlamaShape, cluster: GpuCluster, degrees: Sequence[int]) -> LayerCosts:
    """Seconds and bytes of a LLaMA-like model's blocks in bfloat16, nothing recomputed.

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
    return LayerCosts(("block",) * (shape.num_layers - 1) + ("last",), costs, _BF16 * shape.hidden)


def llama_cost_model(shape: LlamaShape, cluster: GpuCluster, degrees: Sequence[int]) -> CostModel:
    """Of training in bfloat16 with Adam and weights in fp32 beside: 12 bytes of state for 2 of a weight."""
    return CostModel(
        llama_layer_costs(shape, cluster, degrees),
        tuple(llama_tensors(shape, _BF16)),
        tuple(rank // cluster.gpus_per_node for rank in range(cluster.num_gpus)),
        LinkSpeeds(cluster.within_bytes_per_s, cluster.between_bytes_per_s),
        optimizer_ratio=6.0,
    )


@dataclass(frozen=True)
class LengthDistribution:
    """Log-normal lengths; what is longer than the context is cut off and what is very short dropped.

    Attributes:
        mu, sigma: mean and standard deviation of the logarithm, before anything is cut off or dropped.
        context: tokens of the longest sequence.
        shortest: tokens of the shortest one.
    """

    mu: float
    sigma: float
    context: int = 32768
    shortest: int = 128

    @classmethod
    def fitted(cls, up_to: Sequence[int], token_shares: Sequence[float]) -> LengthDistribution:
        """The one whose shares of tokens in ranges of lengths come nearest to the given ones (least squares).

        Args:
            up_to: rising ends of the ranges, the last one the context.
            token_shares: of each range; their sum is 1.
        """
        from scipy.optimize import minimize

        def error(values: Sequence[float]) -> float:
            own = cls(float(values[0]), float(values[1]), up_to[-1])
            return math.fsum((one - told) ** 2 for one, told in zip(own.token_shares(up_to), token_shares, strict=True))

        starts = ((mu, sigma) for mu in (4.0, 6.0, 8.0) for sigma in (1.0, 2.0))
        bounds = [(0.0, 12.0), (0.3, 3.0)]
        found = min(
            (minimize(error, start, method="Nelder-Mead", bounds=bounds) for start in starts), key=lambda one: one.fun
        )
        return cls(float(found.x[0]), float(found.x[1]), up_to[-1])

    def token_shares(self, up_to: Sequence[int]) -> list[float]:
        """The share of all tokens that lies in sequences of each range."""
        normal = NormalDist()
        # Of a log-normal variable tokens are log-normal, too, with the mean of the logarithm moved by sigma².
        places = [(math.log(one) - self.mu) / self.sigma for one in (self.shortest, *up_to)]
        tokens = [normal.cdf(place - self.sigma) for place in places]
        cut = (1.0 - normal.cdf(places[-1])) * self.context / math.exp(self.mu + self.sigma**2 / 2)
        parts = np.diff([*tokens[:-1], tokens[-1] + cut])
        return (parts / parts.sum()).tolist()

    def sample(self, num_batches: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
        """The lengths of mini-batches that end with the sequence that brings them to so many tokens."""
        generator, normal = np.random.default_rng(seed), NormalDist(self.mu, self.sigma)
        dropped = normal.cdf(math.log(self.shortest))
        found: list[list[int]] = []
        for _ in range(num_batches):
            lengths, left = list[int](), num_tokens
            while left > 0:
                quantile = min(float(generator.uniform(dropped, 1.0)), 1.0 - 1e-12)
                lengths.append(min(math.ceil(math.exp(normal.inv_cdf(quantile))), self.context))
                left -= lengths[-1]
            found.append(lengths)
        return found


def padded_rows(lengths: Sequence[int], max_tokens: int, dp: int) -> list[list[list[int]]]:
    """As HotSPa's published code packs: rows padded to ``max_tokens``, dealt in turn; attention over the whole row."""
    rows = [[max_tokens]] * len(pack(lengths, max_tokens))
    return [rows[replica::dp] for replica in range(dp)]

"""Few keys' heads at scale, by the decisions of training: python -m scripts.bench.query_heads_simulated

Steps of LLaMA-3, and of three heads a rank, at TP 8 with one slow rank, when whole groups of queries' heads move, when
single heads do, and when ranks divide heads, of the homogeneous step, by the FLOPs of products; and what copies of
keys' and values' heads cost.
"""

from __future__ import annotations

import dataclasses

from scripts.bench.common import parser_of, run, save, show
from zeroresize.plan.ownership import (
    COPY_GAIN,
    CopyCosts,
    OwnershipMap,
    SegmentWork,
    neuron_quantum,
    slices_of,
    unit_counts,
    units_by_block,
)
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.ownership import owned_step_s, wanted_shares, work_conserving_bound_s

RANKS, HEAD = 8, 128
#: Hidden size, neurons, queries' and keys' heads.
MODELS = {"LLaMA-3 8B": (4096, 14336, 32, 8), "LLaMA-3 70B": (8192, 28672, 64, 8), "24 heads": (3072, 8192, 24, 24)}
#: Products take as long as their share of FLOPs.
IDEAL = ResizingCost.linear(0.96)


def segments_of(hidden: int, neurons: int, heads: int, kv_heads: int) -> tuple[SegmentWork, SegmentWork]:
    """Attention and feed-forward layers of a block."""
    keys, attention = 2 * hidden * kv_heads * HEAD, 2 * hidden * (heads + kv_heads) * HEAD
    everything, group = attention + 3 * hidden * neurons, heads // kv_heads
    return (
        SegmentWork(heads, 1, attention / everything, block=group, shared=keys / attention),
        SegmentWork(neurons, neuron_quantum(neurons, RANKS), 1.0 - attention / everything),
    )


def main() -> None:
    options = parser_of(__doc__, chi=[1.25, 1.5, 2.0, 3.0, 4.0]).parse_args()
    rows, results = [], []
    for name, (hidden, *sizes) in MODELS.items():
        attention, feed_forward = segments_of(hidden, *sizes)
        for chi in options.chi:
            times = [RankTimes(0.0, chi if rank == 0 else 1.0, 1.0, IDEAL) for rank in range(RANKS)]
            bound = work_conserving_bound_s([0.0] * RANKS, [each.gemm_s for each in times], [0.0] * RANKS)
            for units, quantum in (("groups", attention.block), ("heads", 1)):
                segments = dataclasses.replace(attention, quantum=quantum), feed_forward
                shares = wanted_shares(times, [rank == 0 for rank in range(RANKS)], segments)
                step, counts = owned_step_s(times, shares, segments), unit_counts(shares, segments[0])
                removed, copies = (chi - step) / (chi - bound), Copies.of(counts, attention.block, hidden)
                rows.append([name, chi, units, f"{step:.3f}", f"{removed:.2f}", counts, copies.sent, copies.held])
                results.append({"model": name, "chi": chi, "units": units, "step": step, "removed": removed})
            slices = slices_of(attention.num_units, RANKS)
            cut = {"num_units": slices * attention.num_units, "block": slices * attention.block, "slices": slices}
            segments = dataclasses.replace(attention, **cut, copies=CopyCosts(any_whole=COPY_GAIN)), feed_forward
            step = owned_step_s(times, wanted_shares(times, [rank == 0 for rank in range(RANKS)], segments), segments)
            rows.append([name, chi, "parts", f"{step:.3f}", f"{(chi - step) / (chi - bound):.2f}", "", "", ""])
            rows.append([name, chi, "T*", f"{bound:.3f}", "1.00", "", "", ""])
    columns = ["model", "χ", "units", "step", "of the removable", "heads", "MB a layer and step", "k and v a token"]
    show(f"Steps of {RANKS} ranks, of the homogeneous one", columns, rows)
    save("query_heads_simulated", {"options": vars(options), "results": results})


@dataclasses.dataclass
class Copies:
    """What copies cost in bfloat16: MB of gradients in a step of one micro-batch; row blocks of k and v by rank."""

    sent: str
    held: str

    @classmethod
    def of(cls, counts: tuple[int, ...], group: int, hidden: int) -> Copies:
        """Of so many heads on each rank."""
        owned = OwnershipMap.home(sum(counts), RANKS, group).with_counts(counts)
        num_apart = len(owned.apart)
        by_rank = [units_by_block(owned.units_of(rank), group) for rank in range(RANKS)]
        blocks = [sum(held.values()) // (of_each or 1) for held, of_each in by_rank]
        return cls(f"{num_apart * 2 * 2 * HEAD * hidden * 2 / 1e6:.1f}", "·".join(map(str, blocks)))


if __name__ == "__main__":
    run(main)

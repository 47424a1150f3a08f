"""What migration costs where nobody is slow (Table I): torchrun --nproc-per-node 2 -m scripts.bench.migration

The first ν ranks of a homogeneous group lend a forced share γ of their columns, by broadcast-reduce and by
scatter-gather. Copies of a ViT under Colossal-AI, one a setting, train in the same processes and take turns. Told are
the step time as a ratio to the one without migration, beside what the work that moved must cost at least (a receiver
computes 1 + γ ν/(e − ν) of its products), bytes a step, and the seconds of a step that ranks spend in collectives: the
least of a rank is what communication takes, the most includes that a lender waits for its receivers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zeroresize as zr
from scripts.bench.colossalai_ranks import ColossalAIRanks, Trainer
from scripts.bench.common import gather_from_ranks, interval_of_ratio, save
from vit_examples.config import ModelConfig
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.measure import waits


@dataclass
class WaitClock:
    """Seconds that this process has spent in collectives."""

    seconds: float = 0.0
    _began: float = 0.0

    def wait_begins(self) -> None:
        self._began = time.perf_counter()

    def wait_ends(self) -> None:
        self.seconds += time.perf_counter() - self._began

    __hash__ = object.__hash__


@dataclass
class Setting:
    """One way of migrating at one γ, and what was measured of it."""

    migration_transport: str
    ratio: float
    trainer: Trainer
    balancer: zr.Balancer
    step_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    bytes_moved: list[float] = field(default_factory=list)

    def window(self, num_steps: int, clock: WaitClock) -> None:
        """Measure some steps after one that is not counted."""
        self.trainer.step()
        for _ in range(num_steps):
            dist.barrier()
            waited_s, moved = clock.seconds, self.balancer.bytes_migrated
            self.step_s.append(self.trainer.timed_step())
            self.waited_s.append(clock.seconds - waited_s)
            self.bytes_moved.append(self.balancer.bytes_migrated - moved)


def settings_of(
    ranks: ColossalAIRanks, shape: ModelConfig, batch_size: int, ratios: list[float], num_owners: int
) -> list[Setting]:
    """The unmigrated model first, then every way at every γ."""
    wanted = [
        ("", 0.0),
        *((migration_transport, ratio) for migration_transport in MIGRATION_TRANSPORTS for ratio in ratios),
    ]
    settings = []
    for migration_transport, ratio in wanted:
        trainer = ranks.trainer(shape, batch_size=batch_size)
        config = zr.BalanceConfig(mode="off", update_every=2)
        if migration_transport:
            config = zr.BalanceConfig(
                mode="mig", migration_transport=migration_transport, ratio=ratio, ranks=tuple(range(num_owners))
            )
        settings.append(Setting(migration_transport, ratio, trainer, ranks.balance(trainer, config)))
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--owners", type=int, default=1, help="ν, how many ranks lend")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in a window")
    arguments = parser.parse_args()

    ranks = ColossalAIRanks()
    shape = ModelConfig(hidden_size=arguments.hidden, depth=arguments.depth, num_heads=16)
    settings = settings_of(ranks, shape, arguments.batch, arguments.ratios, arguments.owners)
    clock = WaitClock()
    waits.listen(clock)
    for _ in range(arguments.rounds):
        for setting in settings:
            setting.window(arguments.steps, clock)
    waits.stop_listening(clock)

    metrics = settings[0].balancer.metrics()
    free = statistics.median(settings[0].step_s)
    product_share = statistics.fmean(gather_from_ranks(metrics["balance/gemm_s"])) / free
    table = Table(
        "way", "γ", "step / unmigrated", "95 %", "at least", "excess", "MB a step", "s in collectives",
        title=f"ν = {arguments.owners} of {ranks.num_ranks} ranks, unmigrated step {1e3 * free:.0f} ms, "
        f"products {product_share:.3f} of it",
    )  # fmt: skip
    rows = []
    for setting in settings:
        ratio = statistics.median(setting.step_s) / free
        low, high = interval_of_ratio(setting.step_s, settings[0].step_s)
        moved = setting.ratio * arguments.owners / (ranks.num_ranks - arguments.owners)
        least = 1.0 + moved * product_share
        megabytes = sum(gather_from_ranks(statistics.median(setting.bytes_moved))) / 1e6
        waited_s = sorted(gather_from_ranks(statistics.median(setting.waited_s)))
        table.add_row(
            setting.migration_transport or "none", f"{setting.ratio:g}", f"{ratio:.3f}", f"[{low:.3f}, {high:.3f}]",
            f"{least:.3f}", f"{ratio - least:+.3f}", f"{megabytes:.1f}", f"{waited_s[0]:.3f} to {waited_s[-1]:.3f}",
        )  # fmt: skip
        rows.append({"way": setting.migration_transport, "ratio": setting.ratio, "step": ratio, "interval": [low, high],
                     "least": least, "megabytes": megabytes, "collectives_s": waited_s})  # fmt: skip
    if ranks.rank == 0:
        Console(width=120).print(table)
        name = f"migration_e{ranks.num_ranks}_nu{arguments.owners}_h{arguments.hidden}"
        save(name, {"arguments": vars(arguments), "product_share": product_share, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

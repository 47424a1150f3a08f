"""Which calibrations a group makes: of pruning, of migration, or both."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank
from zeroresize.comm.exchange import Meet
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure.calibrate_migration import measure_migration_cost
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.times import MOST_SECONDS

logger = logging.getLogger(__name__)


def calibrate_group(
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    config: BalanceConfig,
    monitor: RankMonitor,
    migration: MigrationCost | None,
    meet: Meet,
) -> MigrationCost | None:
    """Measure the costs that are not known yet, on the shapes of the step that has ended; a resumed run may know them.

    Collective: all ranks measure what one of them does not know.

    Args:
        monitor: measures and keeps the cost of pruning.
        migration: the cost of migration, None if unknown.
        meet: exchanges numbers with all ranks, so a missing rank is found before anything else is sent.

    Returns:
        The cost of migration, None in a mode that does not need it.
    """
    may_migrate = config.mode in ("off", *MIGRATING_MODES)
    unknown = [not monitor.is_calibrated, may_migrate and migration is None]
    measures_pruning, measures_migrating = (any(on_ranks) for on_ranks in zip(*meet(*unknown), strict=True))
    began = time.perf_counter()
    results = []
    if measures_pruning:
        cost = monitor.calibrate()
        results.append(
            f"without {100.0 * cost.max_ratio:.0f} % of its columns this rank's products take "
            f"{100.0 * cost.gemm_share[-1]:.0f} % of their time"
        )
    if may_migrate and not all(layer.may_lend for layer in layers.values()):
        migration = MigrationCost(fixed_s=MOST_SECONDS)  # so nobody plans to lend
    elif may_migrate and (measures_pruning or measures_migrating):
        migration = measure_migration_cost(layers, process_group, config.migration_transport)
        results.append(
            f"lending columns to other ranks takes {1e3 * migration.fixed_s:.1f} ms a step, and where all are lent "
            f"{1e3 * migration.per_share_s:.1f} ms more"
        )
    if results and group_rank(process_group) == 0:
        logger.info(
            "measured once, in %.1f s, what it would cost to relieve a slow rank, to be weighed against waiting for "
            "it: %s. Nothing is changed by that",
            time.perf_counter() - began,
            "; ".join(results),
        )
    return migration

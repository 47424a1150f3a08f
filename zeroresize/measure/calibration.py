"""Which calibrations a group makes: of pruning, of migration, or both."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch.distributed import ProcessGroup

from zeroresize.comm.meeting import Meet
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
    if measures_pruning or measures_migrating:
        logger.info("calibration begins, on the shapes of this step; it takes some seconds")
    if measures_pruning:
        monitor.calibrate()
    if may_migrate and not all(layer.may_lend for layer in layers.values()):
        return MigrationCost(fixed_s=MOST_SECONDS)  # so nobody plans to lend
    if may_migrate and (measures_pruning or measures_migrating):
        migration = measure_migration_cost(layers, process_group, config.migration_transport)
        logger.info(
            "calibration of migrating: %.1f ms a loan, and %.1f ms for all of a rank's columns",
            1e3 * migration.fixed_s,
            1e3 * migration.per_share_s,
        )
    return migration

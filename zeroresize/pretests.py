"""Which pre-tests a group makes: of what pruning costs, and of what migrating does."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from zeroresize.collectives import all_reduce
from zeroresize.config import MIGRATING_MODES, BalanceConfig
from zeroresize.decision import GroupDecision
from zeroresize.linear import BalancedLinear
from zeroresize.measurement import Measurement
from zeroresize.pretest_migration import measure_migration_cost

logger = logging.getLogger(__name__)


def pretest(
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    config: BalanceConfig,
    measurement: Measurement,
    decision: GroupDecision,
) -> None:
    """Measure on the shapes of the step that has ended what is not known of such steps; a resumed run may know it.

    Collective: what one rank does not know all measure.
    """
    may_migrate = config.mode in ("off", *MIGRATING_MODES)
    unknown = [not measurement.is_pretested, may_migrate and decision.migration is None]
    device = next(iter(layers.values())).weight.device
    on_ranks = torch.tensor(unknown, dtype=torch.float32, device=device)
    all_reduce(on_ranks, process_group)
    measures_pruning, measures_migrating = (on_ranks > 0).tolist()
    if measures_pruning:
        measurement.pretest()
    if may_migrate and (measures_pruning or measures_migrating):
        migration = decision.migration = measure_migration_cost(layers, process_group, config.migrate)
        logger.info(
            "pre-test of migrating: %.1f ms a loan, and %.1f ms for all of a rank's columns",
            1e3 * migration.fixed_s,
            1e3 * migration.per_share_s,
        )

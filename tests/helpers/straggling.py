"""What steps and switches take, by a formula: for decisions about stragglers without a machine."""

import numpy as np

from zeroresize.plan.layout import unit_bounds


class FormulaCosts:
    """A range's tokens are shared by the replicas and the units by the shards; the slowest rank tells the time."""

    def __init__(self, work, *, num_layers=8, num_units=8, num_microbatches=8, bytes_per_switch=1.0, least_split=1):
        self.work, self.num_layers, self.num_units = work, num_layers, num_units
        self.num_microbatches, self.bytes_per_switch = num_microbatches, bytes_per_switch
        self.least_split = least_split  # tp × pp below which memory does not suffice
        self.home = 0

    def range_s(self, number, strategy, speeds):
        dp, tp, pp = strategy.degrees
        units = np.diff(unit_bounds(self.num_units, strategy.shares or (1.0,) * tp)) / self.num_units
        layers = np.diff(strategy.partition(self.num_layers).boundaries) / self.num_layers
        own = np.array([speeds[rank] for rank in strategy.ranks]).reshape(pp, dp, tp)
        stage_s = self.work[number] / dp * layers * (units / own).max(axis=(1, 2))
        # Waiting for the pipeline to fill and communication make larger degrees a little worse.
        filling = 1.0 + (pp - 1) / self.num_microbatches
        return float(filling * (1.0 + 0.02 * (tp - 1)) * stage_s.max())

    def step_s(self, strategies, speeds):
        return sum(self.range_s(number, one, speeds) for number, one in enumerate(strategies))

    def fits(self, number, strategy, home):
        return strategy.tp * strategy.pp >= self.least_split

    def switches_fit(self, strategies):
        return True

    def switch_bytes(self, before, after):
        """Only home holds weights between steps."""
        return 0.0 if before[self.home] == after[self.home] else self.bytes_per_switch

"""A pipeline that is only numbers: what layers cost, how fast devices are, and the profiles that one would measure."""

from dataclasses import dataclass

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.bubbles import simulated_step
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing
from zeroresize.policy.pipeline.rebalancing_forecast import RebalancingRule

NUM_MICROBATCHES = 8
COST_OF_MOVE = MoveCost(1e-9, 0.05)


@dataclass
class World:
    """Layers have ``work`` [L] and run on devices of ``speeds`` [S]; a third of the seconds is forward."""

    work: list[float]
    speeds: list[float]
    boundaries: tuple[int, ...]
    weight_bytes: int = 1000
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self):
        self._random = np.random.default_rng(self.seed)

    def profile(self):
        seconds = np.array(self.work) / np.array(self.speeds)[Partition(self.boundaries).stages]
        seconds *= self._random.uniform(1.0, 1.0 + self.noise, len(seconds))
        layers = tuple(
            LayerProfile(one / 3, one * 2 / 3, self.weight_bytes, self.weight_bytes, 2 * self.weight_bytes, 100)
            for one in seconds.tolist()
        )
        return PipelineProfile(layers, self.load.stage_times(Partition(self.boundaries)), self.boundaries)

    @property
    def load(self):
        return PipelineLoad.of(self.work, len(self.speeds), speeds=self.speeds)

    @property
    def slowest(self):
        return self.load.slowest(Partition(self.boundaries))

    @property
    def step_s(self):
        """Of a 1F1B step, simulated."""
        times = self.load.stage_times(Partition(self.boundaries)) / NUM_MICROBATCHES
        return simulated_step((times / 3).tolist(), (times * 2 / 3).tolist(), NUM_MICROBATCHES).step_s

    def train(self, rebalancing, num_profiles):
        """The boundaries after each move."""
        moves = []
        for _ in range(num_profiles):
            forecast = rebalancing.update(self.profile())
            if forecast is not None:
                assert forecast.before == self.boundaries
                self.boundaries = forecast.after
                moves.append(self.boundaries)
                rebalancing.learn(forecast.num_bytes, 0.01)
        return moves


def rebalancing_of(cost_of_move=COST_OF_MOVE, **options):
    chosen = {
        "by": "time",
        "method": "partition",
        "schedule": "1f1b",
        "num_microbatches": NUM_MICROBATCHES,
        "num_steps": 100,
    }
    return Rebalancing(RebalancingRule(**(chosen | options)), cost_of_move)

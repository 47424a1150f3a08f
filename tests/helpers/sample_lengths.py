"""Lengths of samples, drawn without torch, as planner processes do."""

import numpy as np


class Lengths:
    """Of an iteration's samples."""

    def __init__(self, kind, number=9, seed=0):
        self.kind, self.number, self.seed = kind, number, seed

    def __call__(self, iteration):
        random = np.random.default_rng([self.seed, iteration])
        return random.integers(2, 24, (self.number, 1 if self.kind == "gpt" else 2))

"""The policy code of training against models of clusters, and how their ranks' times vary.

Pipelines are simulated by :mod:`zeroresize.simulate.pipeline_training`.
"""

from zeroresize.simulate.noise import Noise
from zeroresize.simulate.training import Cluster, Simulation, Speeds, settling, simulate, unbalanced_step_s

__all__ = ["Cluster", "Noise", "Simulation", "Speeds", "settling", "simulate", "unbalanced_step_s"]

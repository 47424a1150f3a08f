"""The policy code of training against a model of a cluster, and how its ranks' times vary."""

from zeroresize.simulate.noise import Noise
from zeroresize.simulate.training import Cluster, Simulation, Speeds, settling, simulate

__all__ = ["Cluster", "Noise", "Simulation", "Speeds", "settling", "simulate"]

"""The policy code of training against models of clusters, and how their ranks' times vary."""

from zeroresize.simulate.noise import Noise
from zeroresize.simulate.pipeline_training import LayerLoads, PipelineCluster, PipelineTrace, simulate_pipeline
from zeroresize.simulate.training import Cluster, Simulation, Speeds, settling, simulate

__all__ = [
    "Cluster",
    "LayerLoads",
    "Noise",
    "PipelineCluster",
    "PipelineTrace",
    "Simulation",
    "Speeds",
    "settling",
    "simulate",
    "simulate_pipeline",
]

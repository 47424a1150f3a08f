"""Tensor-parallel training that keeps its speed when some devices are slow."""

from zeroresize.balancer import Balancer
from zeroresize.config import BalanceConfig
from zeroresize.convert import convert
from zeroresize.injection import StragglerInjector, round_robin, static
from zeroresize.linear import ColumnParallelLinear, RowParallelLinear

__version__ = "0.1.0"

__all__ = [
    "BalanceConfig",
    "Balancer",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "StragglerInjector",
    "convert",
    "round_robin",
    "static",
]

"""Tensor-parallel training that keeps its speed when some devices are slow."""

from zeroresize.balancer import Balancer
from zeroresize.config import BalanceConfig
from zeroresize.convert import convert
from zeroresize.injection import StragglerInjector, round_robin, static
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import Segment
from zeroresize.resharding.sharded_state import sharded_state_dict
from zeroresize.stage_balancer import StageBalancer
from zeroresize.telemetry import JsonLinesTelemetry, TensorBoardTelemetry, UpdateRecord

__version__ = "0.1.0"

__all__ = [
    "BalanceConfig",
    "Balancer",
    "ColumnParallelLinear",
    "JsonLinesTelemetry",
    "RowParallelLinear",
    "Segment",
    "StageBalancer",
    "StragglerInjector",
    "TensorBoardTelemetry",
    "UpdateRecord",
    "convert",
    "round_robin",
    "sharded_state_dict",
    "static",
]

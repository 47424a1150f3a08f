"""Training that keeps its speed when some devices are slow."""

import importlib
from typing import TYPE_CHECKING, Any

from zeroresize.balancer import Balancer
from zeroresize.checkpoints.sharded_state import sharded_state_dict
from zeroresize.checks.check_parallel import check_parallel
from zeroresize.checks.finding import ParallelFinding
from zeroresize.config import BalanceConfig, PaperConfig
from zeroresize.convert import convert
from zeroresize.injection import StragglerInjector, round_robin, static
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import Segment
from zeroresize.optim.grad_scaler import GradScaler
from zeroresize.optim.gradient_clipping import clip_grad_norm_
from zeroresize.optim.independence import mark_by_parameter, mark_elementwise
from zeroresize.resharding.segments.segment_check import SegmentCheck, check_segments
from zeroresize.telemetry import JsonLinesTelemetry, TensorBoardTelemetry, UpdateRecord
from zeroresize.watch import Watch, watch

if TYPE_CHECKING:
    from zeroresize.checkpoints.reader import CheckpointReader
    from zeroresize.layers.styles import ColwiseParallel, RowwiseParallel
    from zeroresize.stage_balancer import StageBalancer

__version__ = "0.1.0"

__all__ = [
    "BalanceConfig",
    "Balancer",
    "CheckpointReader",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "GradScaler",
    "JsonLinesTelemetry",
    "PaperConfig",
    "ParallelFinding",
    "RowParallelLinear",
    "RowwiseParallel",
    "Segment",
    "SegmentCheck",
    "StageBalancer",
    "StragglerInjector",
    "TensorBoardTelemetry",
    "UpdateRecord",
    "Watch",
    "check_parallel",
    "check_segments",
    "clip_grad_norm_",
    "convert",
    "mark_by_parameter",
    "mark_elementwise",
    "round_robin",
    "sharded_state_dict",
    "static",
    "watch",
]


#: What needs pipelines, DTensors or checkpoints of torch is imported where it is asked for.
_LAZY = {
    "CheckpointReader": "zeroresize.checkpoints.reader",
    "ColwiseParallel": "zeroresize.layers.styles",
    "RowwiseParallel": "zeroresize.layers.styles",
    "StageBalancer": "zeroresize.stage_balancer",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

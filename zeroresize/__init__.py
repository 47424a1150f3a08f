"""Training that keeps its speed when some devices are slow."""

from typing import TYPE_CHECKING, Any

from zeroresize.balancer import Balancer
from zeroresize.config import BalanceConfig, PaperConfig
from zeroresize.convert import convert
from zeroresize.injection import StragglerInjector, round_robin, static
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import Segment
from zeroresize.optim.gradient_clipping import clip_grad_norm_
from zeroresize.optim.independence import mark_by_parameter, mark_elementwise
from zeroresize.resharding.segment_check import SegmentCheck, check_segments
from zeroresize.resharding.sharded_state import sharded_state_dict
from zeroresize.telemetry import JsonLinesTelemetry, TensorBoardTelemetry, UpdateRecord

if TYPE_CHECKING:
    from zeroresize.stage_balancer import StageBalancer
    from zeroresize.utils.checkpoint_reader import CheckpointReader

__version__ = "0.1.0"

__all__ = [
    "BalanceConfig",
    "Balancer",
    "CheckpointReader",
    "ColumnParallelLinear",
    "JsonLinesTelemetry",
    "PaperConfig",
    "RowParallelLinear",
    "Segment",
    "SegmentCheck",
    "StageBalancer",
    "StragglerInjector",
    "TensorBoardTelemetry",
    "UpdateRecord",
    "check_segments",
    "clip_grad_norm_",
    "convert",
    "mark_by_parameter",
    "mark_elementwise",
    "round_robin",
    "sharded_state_dict",
    "static",
]


def __getattr__(name: str) -> Any:
    """What needs pipelines or checkpoints of torch is imported where it is asked for: older releases have none."""
    if name == "StageBalancer":
        from zeroresize.stage_balancer import StageBalancer

        return StageBalancer
    if name == "CheckpointReader":
        from zeroresize.utils.checkpoint_reader import CheckpointReader

        return CheckpointReader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Training that keeps its speed when some devices are slow."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroresize.balancer import Balancer
    from zeroresize.checkpoints.reader import CheckpointReader
    from zeroresize.checkpoints.sharded_state import sharded_state_dict
    from zeroresize.checks.check_parallel import check_parallel
    from zeroresize.checks.finding import ParallelFinding
    from zeroresize.config import BalanceConfig, PaperConfig
    from zeroresize.conversion import convert
    from zeroresize.data.data_balancer import DataBalancer
    from zeroresize.exporters import OpenTelemetrySpans, PrometheusTelemetry, WandbTelemetry
    from zeroresize.injection import StragglerInjector, round_robin, static
    from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
    from zeroresize.layers.segment import Segment
    from zeroresize.layers.styles import ColwiseParallel, RowwiseParallel
    from zeroresize.optim.grad_scaler import GradScaler
    from zeroresize.optim.gradient_clipping import clip_grad_norm_
    from zeroresize.optim.independence import mark_by_parameter, mark_elementwise
    from zeroresize.resharding.segments.segment_check import SegmentCheck, check_segments
    from zeroresize.stage_balancer import StageBalancer
    from zeroresize.status import RankStatus, Status
    from zeroresize.telemetry import JsonLinesTelemetry, TensorBoardTelemetry, UpdateRecord
    from zeroresize.watching import Watch, watch

__version__ = "0.1.0"

__all__ = [
    "BalanceConfig",
    "Balancer",
    "ChangeRecord",
    "CheckpointReader",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "DataBalancer",
    "GradScaler",
    "JsonLinesTelemetry",
    "OpenTelemetrySpans",
    "PaperConfig",
    "ParallelFinding",
    "PrometheusTelemetry",
    "RankStatus",
    "RowParallelLinear",
    "RowwiseParallel",
    "Segment",
    "SegmentCheck",
    "StageBalancer",
    "Status",
    "StragglerInjector",
    "TensorBoardTelemetry",
    "UpdateRecord",
    "WandbTelemetry",
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

#: Which file has which of them: it is imported when one is asked for, so that programs pay for what they use.
_FILES = {
    "balancer": ("Balancer",),
    "checkpoints.reader": ("CheckpointReader",),
    "checkpoints.sharded_state": ("sharded_state_dict",),
    "checks.check_parallel": ("check_parallel",),
    "checks.finding": ("ParallelFinding",),
    "config": ("BalanceConfig", "PaperConfig"),
    "conversion": ("convert",),
    "data.data_balancer": ("DataBalancer",),
    "exporters": ("OpenTelemetrySpans", "PrometheusTelemetry", "WandbTelemetry"),
    "injection": ("StragglerInjector", "round_robin", "static"),
    "layers.linear": ("ColumnParallelLinear", "RowParallelLinear"),
    "layers.segment": ("Segment",),
    "layers.styles": ("ColwiseParallel", "RowwiseParallel"),
    "optim.grad_scaler": ("GradScaler",),
    "optim.gradient_clipping": ("clip_grad_norm_",),
    "optim.independence": ("mark_by_parameter", "mark_elementwise"),
    "resharding.segments.segment_check": ("SegmentCheck", "check_segments"),
    "stage_balancer": ("StageBalancer",),
    "status": ("RankStatus", "Status"),
    "telemetry": ("ChangeRecord", "JsonLinesTelemetry", "TensorBoardTelemetry", "UpdateRecord"),
    "watching": ("Watch", "watch"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{file}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

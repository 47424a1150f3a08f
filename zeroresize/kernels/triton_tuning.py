"""Which way is the fastest for a product's shape, measured once and remembered in the user's cache folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from zeroresize.plan.layer import LayerPlan
from zeroresize.utils.files import BestEffort, write_whole
from zeroresize.utils.torch_private import dispatch_modes

#: Rows, columns and inner places of a tile, warps, and stages of its pipeline.
Config = tuple[int, ...]

CONFIGS: tuple[Config, ...] = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 32, 4, 4),
    (64, 128, 32, 4, 4),
    (64, 64, 32, 4, 4),
)
#: Where nothing is measured: on the interpreter.
FIXED: Config = (32, 32, 16, 4, 1)
#: A sample is so many runs in a row; the fastest of so many samples counts.
_RUNS, _SAMPLES = 5, 3

#: Keys of what this process has measured, or found on file and tried.
_run_here = set[str]()
_best_effort = BestEffort("what Triton's products were measured to take")


def fastest(
    product: str,
    operands: tuple[Tensor, Tensor],
    plan: LayerPlan,
    by_reference: Callable[[], Tensor],
    by_triton: Callable[[Config], Tensor],
) -> Config | None:
    """Return the configuration by which ``by_triton`` is fastest for a product of this shape, None for the reference.

    What is not known yet is measured, and what is on file tried, but while a CUDA graph is captured, or a mode sees all
    operators.
    """
    if triton.knobs.runtime.interpret:
        return FIXED
    key, known = _key(product, operands, plan), _known()
    if key not in _run_here and not (torch.cuda.is_current_stream_capturing() or dispatch_modes()):
        if key not in known or not _runs(known[key], by_triton):
            known[key] = _measured(key, by_reference, by_triton)
        _run_here.add(key)
    return known.get(key)


def uses_tf32() -> bool:
    """Return whether products of float32 may round their operands to TF32, however that was asked for."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _key(product: str, operands: tuple[Tensor, Tensor], plan: LayerPlan) -> str:
    """What a measurement holds for: sizes are rounded up to powers of two, the kept share to eighths."""
    first, second = operands
    sizes = [1 << (size - 1).bit_length() for size in (*first.shape, *second.shape)]
    kept = -(-8 * len(plan.keep_P) // plan.num_columns)
    tf32 = first.dtype == torch.float32 and uses_tf32()
    strides = "".join("ct"[matrix.stride(1) != 1] for matrix in operands)
    is_view = plan.kept.neighbours is not None  # which the reference does not gather
    device = torch.cuda.get_device_name(first.device)
    what = (device, product, first.dtype, tf32, *sizes, strides, kept, plan.kept.block, is_view, plan.imputation)
    return " ".join(map(str, what))


def _measured(key: str, by_reference: Callable[[], Tensor], by_triton: Callable[[Config], Tensor]) -> Config | None:
    """The fastest, on file where any could be run at all: another host may have a compiler."""
    runs = [config for config in CONFIGS if _runs(config, by_triton)]  # and is compiled
    ways: dict[Config | None, Callable[[], Tensor]] = {None: by_reference}
    ways |= {config: partial(by_triton, config) for config in runs}
    seconds = {config: _seconds(way) for config, way in ways.items()}
    best = min(seconds, key=seconds.__getitem__)
    if runs:
        _remember(key, best)
    return best


def _runs(config: Config | None, by_triton: Callable[[Config], Tensor]) -> bool:
    """Whether this host can run it: a tile may be too large, or no compiler found."""
    try:
        if config is not None:
            by_triton(config)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (triton.TritonError, RuntimeError):
        return False
    return True


def _seconds(run: Callable[[], Tensor]) -> float:
    samples = []
    for _ in range(_SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / _RUNS)
    return min(samples)


def _path() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "zeroresize")
    return folder / f"triton-{triton.__version__}-torch-{torch.__version__}.json"


@cache
def _known() -> dict[str, Config | None]:
    """By key, what this process and earlier ones have measured."""
    return _read()


def _read() -> dict[str, Config | None]:
    try:
        entries = json.loads(_path().read_text(encoding="utf-8"))
        read = {str(key): tuple(config) if config else None for key, config in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none, or no such file
        return {}
    return {key: config for key, config in read.items() if config is None or config in CONFIGS}


def _remember(key: str, config: Config | None) -> None:
    """Add a measurement to the file, beside those of other ranks."""
    path = _path()
    unshared = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    with _best_effort.writing("this run"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(unshared, json.dumps({**_read(), key: config}, indent=1))
        unshared.replace(path)

"""A statistic of columns that begins anew whenever the layers had other shapes for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from zeroresize.measure.column_statistics import ColumnStatistic, Fresh


class RestartableStatistic(ColumnStatistic):
    """Keeps the statistic that ``build`` makes, while every rank owns what its host gave it; else none.

    Attributes:
        is_paused: whether there is none now.
    """

    def __init__(self, build: Callable[[], ColumnStatistic]) -> None:
        self._build = build
        self._inner: ColumnStatistic | None = build()

    @property
    def is_paused(self) -> bool:
        return self._inner is None

    def pause(self) -> None:
        """Forget what was seen: the layers' shapes change."""
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def resume(self) -> None:
        """Begin anew: the layers have their own shapes again."""
        if self._inner is None:
            self._inner = self._build()

    @property
    def incremental(self) -> bool:  # type: ignore[override]
        return self._inner is not None and self._inner.incremental

    def take(self) -> Fresh:
        return self._inner.take() if self._inner is not None else {}

    def begin_step(self, step: int) -> None:
        if self._inner is not None:
            self._inner.begin_step(step)

    @property
    def bytes_held(self) -> int:
        return self._inner.bytes_held if self._inner is not None else 0

    def state_dict(self) -> dict[str, Tensor]:
        return self._inner.state_dict() if self._inner is not None else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._inner is not None:
            self._inner.load_state_dict(state)

    def close(self) -> None:
        self.pause()

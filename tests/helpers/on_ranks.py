"""Tests that run on ranks as a whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from helpers.processes import for_each


def on_ranks(
    num_ranks: int, cases: Iterable[Sequence[Any]] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Let a test ``(rank, group, *, fixture, ...)`` run in ``num_ranks`` ranks, by the fixture ``run_ranks``.

    With ``cases`` it is called as ``(rank, group, *case)`` for one case after another in the same ranks.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        kept = None if cases is None else list(cases)

        @functools.wraps(fn)
        def test(run_ranks: Callable[..., Any], **fixtures: Any) -> None:
            __tracebackhide__ = True
            of_fixtures = functools.partial(fn, **fixtures) if fixtures else fn
            run_ranks(of_fixtures if kept is None else for_each(kept)(of_fixtures), num_ranks, **options)

        parameters = inspect.signature(fn).parameters.values()
        fixtures = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
        ranks = inspect.Parameter("run_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([ranks, *fixtures])  # type: ignore[attr-defined]
        return test

    return decorate


def gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return what each rank of the group has given, by rank, on all of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

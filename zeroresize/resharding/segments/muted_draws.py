"""MutedDraws: fixed values in place of random numbers that are drawn between segments' layers, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroresize.layers.segment_draws import is_within_segment
from zeroresize.utils.torch_private import (
    DispatchMode,
    Operator,
    arguments_of_operator,
    current_backward,
    name_of_operator,
)

#: Arguments of operators that draw, and what they are when nothing is drawn.
_WITHOUT_DRAWS = {"dropout_p": 0.0, "train": False, "training": False}


class MutedDraws(DispatchMode):
    """Mutes draws while the block lasts; integers, such as numbers of calls, are drawn.

    Attributes:
        draws: the stream, operator and shape of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[int, str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Operator, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or not is_within_segment():
            return func(*args, **kwargs)
        names = arguments_of_operator(func)
        given, switches = dict(zip(names, args, strict=False)) | kwargs, _WITHOUT_DRAWS.keys() & names
        if switches and not any(given.get(one) for one in switches):
            return func(*args, **kwargs)
        stream = torch.default_generator.initial_seed()
        states = [(one, one.get_state()) for one in (torch.default_generator, *torch.cuda.default_generators)]
        result = func(**(given | {one: _WITHOUT_DRAWS[one] for one in switches}))
        drawn = result[0] if switches and isinstance(result, tuple) else result
        if not isinstance(drawn, Tensor) or not (drawn.is_floating_point() or drawn.dtype == torch.bool):
            return result
        for generator, state in states:
            generator.set_state(state)
        if current_backward() == -1:  # else it is drawn again
            self.draws.append((stream, name_of_operator(func), tuple(drawn.shape)))
        return result if switches else drawn.fill_(0.5)


def require_drawn_alike(draws: MutedDraws, at_home: MutedDraws) -> None:
    """Raise ValueError if something is drawn for what all ranks hold behind what is drawn for single units."""
    of_units: dict[int, str] = {}
    for (stream, operator, shape), (_, _, shape_at_home) in zip(draws.draws, at_home.draws, strict=False):
        if shape != shape_at_home:
            of_units.setdefault(stream, operator)
        elif stream in of_units:
            raise ValueError(
                f"dropout: between its layers {operator} of shape {list(shape)} draws for what is not of single units, "
                f"behind {of_units[stream]}, which draws more numbers on ranks with more units, so that ranks would "
                "drop other elements: let it draw before, or behind the segment"
            )

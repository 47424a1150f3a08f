"""No DTensor is gathered, redistributed or saved as if its parts were even while units are away.

Its placements say what each rank holds at home, and torch looks at them alone: some ranks would wait for what others do
not send, or a file would hold what belongs elsewhere. So the methods that do so are errors meanwhile, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from zeroresize.utils.torch_private import is_dtensor

#: Methods of a DTensor, and of what torch.distributed.checkpoint asks before it looks for DTensors.
_METHODS = ("full_tensor", "redistribute", "__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def guard_dtensors(tensors: Iterable[Tensor], *, are_away: bool) -> None:
    """Let DTensors be gathered, redistributed and saved, or not while their units are away.

    Args:
        tensors: parameters and optimizer state; plain ones are left alone.
        are_away: whether some rank of the group holds other units than at home.
    """
    for tensor in tensors:
        if is_dtensor(tensor):
            for name in _METHODS:
                if are_away:
                    vars(tensor)[name] = _Refusal(name)
                else:
                    vars(tensor).pop(name, None)


class _Refusal:
    """In place of a method while units are away."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        what = "a checkpoint" if self._name.startswith("__") else f"{self._name}()"
        raise RuntimeError(
            f"{what} of a DTensor whose units are divided unevenly among the ranks: its placements say what ranks hold "
            "at home. Have all units at home, `with balancer.at_home(): ...` on every rank of the group, or let "
            "torch.distributed.checkpoint save `zeroresize.sharded_state_dict(model, optimizer)`, which holds any "
            "division"
        )

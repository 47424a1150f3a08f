"""No DTensor is gathered, redistributed or saved as if its placements said all while they do not.

Torch looks at them alone. While units are away they say what each rank holds at home: some ranks would wait for what
others do not send, or a file would hold what belongs elsewhere. Of a packed layer they tell no order that checkpoints
know, or, where its parts are of different sizes, none at all. The methods that look at them are errors then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from torch import Tensor

from zeroresize.utils.torch_private import is_dtensor

#: What torch.distributed.checkpoint asks before it looks for DTensors.
OF_CHECKPOINTS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
#: These, and methods of a DTensor.
METHODS = ("full_tensor", "redistribute", *OF_CHECKPOINTS)


def guard_dtensors(tensors: Iterable[Tensor], *, are_away: bool, refused: Collection[str] = ()) -> None:
    """Let DTensors be gathered, redistributed and saved, or not while their units are away.

    Args:
        tensors: parameters and optimizer state; plain ones are left alone.
        are_away: whether some rank of the group holds other units than at home.
        refused: methods that are errors at home, too.
    """
    for tensor in tensors:
        if is_dtensor(tensor):
            for name in METHODS:
                if are_away or name in refused:
                    vars(tensor)[name] = _Refusal(name, are_away)
                else:
                    vars(tensor).pop(name, None)


class _Refusal:
    """In place of a method while units are away, or of a packed layer."""

    def __init__(self, name: str, are_away: bool) -> None:
        self._name, self._are_away = name, are_away

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        what = "a checkpoint" if self._name.startswith("__") else f"{self._name}()"
        if not self._are_away:
            raise RuntimeError(
                f"{what} of a DTensor of a packed layer (parts=): its placements do not say how each part is divided. "
                "Let torch.distributed.checkpoint save `zeroresize.sharded_state_dict(model, optimizer)`, which holds "
                "the layout of the undivided model"
            )
        raise RuntimeError(
            f"{what} of a DTensor whose units are divided unevenly among the ranks: its placements say what ranks hold "
            "at home. Have all units at home, `with balancer.at_home(): ...` on every rank of the group, or let "
            "torch.distributed.checkpoint save `zeroresize.sharded_state_dict(model, optimizer)`, which holds any "
            "division"
        )

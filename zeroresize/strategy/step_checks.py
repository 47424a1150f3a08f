"""What a step checks before anything runs: the sequences it is given, and what the optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroresize.comm.meeting import Meet
from zeroresize.resharding.agreement import meet_prepared
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.optimizer_checks import require_divisible
from zeroresize.utils.fingerprint import digest


def require_sequences(sequences: Sequence[Tensor]) -> None:
    """Check that a mini-batch is a list of rows [length + 1] of int64, of at least two tokens each.

    Raises:
        ValueError: naming what is given instead.
    """
    rows: object = sequences
    if isinstance(rows, Tensor) or not sequences:
        given = "one tensor" if isinstance(rows, Tensor) else "empty"
        raise ValueError(f"sequences are {given}: a list of rows [length + 1] is needed, without padding")
    wrong = [
        index
        for index, row in enumerate(sequences)
        if not isinstance(row, Tensor) or row.dtype != torch.int64 or row.dim() != 1 or len(row) < 2 or row.is_meta
    ]
    if wrong:
        raise ValueError(f"sequences {wrong} are no tensors [length + 1] of int64, of at least two tokens")


def require_ready_to_train(model: SwitchableModel, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer steps the model's parameters and no others, and that no gradients are left.

    Raises:
        ValueError: naming the parameters that are not as they must be.
    """
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    parameters = dict(model.named_parameters())
    missing = [name for name, one in parameters.items() if one.requires_grad and id(one) not in held]
    num_others = len(held - {id(one) for one in parameters.values()})
    if missing or num_others:
        raise ValueError(
            f"the optimizer does not step the parameters of its strategy {model.optimizer_strategy}: it lacks "
            f"{', '.join([f'{len(missing)} of them', *missing[:3]])}, and has {num_others} others; make it of "
            "model.parameters()"
        )
    left = [name for name, one in parameters.items() if one.grad is not None]
    if left:
        raise ValueError(
            f"{left} have gradients, to which the step's would be added: call optimizer.zero_grad() or "
            "model.abandon() before"
        )


def require_fitting_optimizer(model: SwitchableModel, optimizer: torch.optim.Optimizer, meet: Meet) -> None:
    """Check that the optimizer may step what its strategy leaves to the ranks; collective.

    Raises:
        ValueError: as :func:`~zeroresize.strategy.optimizer_checks.require_divisible`; the other ranks may raise a
            RuntimeError, as one that the strategy leaves out has nothing to step.
    """
    prepared: tuple[float, float] | Exception = 0.0, 0.0
    try:
        require_divisible(optimizer, model.optimizer_strategy, dict(model.named_parameters()), model.tensors)
    except ValueError as error:  # the others must hear of it
        prepared = error
    meet_prepared(meet, prepared)


def digest_of(sequences: Sequence[Tensor]) -> str:
    """Return a hash of the sequences' lengths and tokens, the same on ranks that were given the same."""
    lengths = json.dumps([len(sequence) for sequence in sequences])
    return digest(lengths, torch.cat([sequence.cpu() for sequence in sequences]).numpy().tobytes()).hex()

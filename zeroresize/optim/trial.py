"""Trials of an optimizer whose class is not known: one like it steps small tensors, whole and in parts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroresize.optim.likeness import Case, Like, NoTrialError, made_like, mark_alike, require_state_only


@dataclass(frozen=True)
class _Trial:
    rows: int
    columns: int
    num_steps: int
    gradients: float = 1.0  # how much larger
    limit: int | None = None  # sizes are those of the parameters themselves, up to this one
    fifths: tuple[int, ...] = (2, 0)  # of each dimension, of the first part; a rank may have no units
    is_in_own_dtype: bool = False

    def shape(self, like: Like) -> tuple[int, ...]:
        if self.limit is not None:
            # Units that come to a rank make it larger, and the limit keeps trials short.
            return tuple(min(_GROWTH * max(size, 1), self.limit) for size in like.sizes)
        return (self.rows, self.columns) if len(like.sizes) > 1 else (self.rows * self.columns,)


_SEED = 7
#: Small for many steps, since some optimizers begin to look at matrices after some; large for some, since others treat
#: small tensors, or sizes that are no multiples of their blocks, element by element; and with large gradients, since
#: others clip only those.
_TRIALS = (_Trial(10, 6, 24), _Trial(10, 6, 3, 1e5), _Trial(256, 384, 2))
#: In bfloat16 and such, which some optimizers treat in a way of their own, and whose rounding hides what others do. All
#: parts fill vector registers, since torch rounds what is left over in another way there, and one thread's share.
_IN_OWN_DTYPE = _Trial(160, 160, 3, fifths=(2,), is_in_own_dtype=True)
#: As large as the parameters, since others begin to look at matrices of some size.
_LARGE = _Trial(0, 0, 1, fifths=(2,))
_LIMIT, _GROWTH = 1024, 4
_LIMIT_OF_MANY = 544  # at once, or multiplied by each other
_OTHER_SHAPE = (4, 6)  # of a parameter beside the trial's


def why_halves_differ(optimizer: Optimizer, case: Case, *, by_default: bool = False) -> str | None:
    """Tell how steps on a tensor differ, in any bit, from those on its parts; None where none does.

    Args:
        by_default: whether settings that the optimizer does not tell are taken to be the defaults.

    Raises:
        NoTrialError: where there can be no such steps.
        KeepsTensorsError: where moves would leave tensors of the optimizer behind.
    """
    for likes, trial in _trials_of(case, _LIMIT):
        whole = [_drawn(trial.shape(like), trial, like) for like in likes]
        other = _drawn(_OTHER_SHAPE, trial, likes[0])
        steps = _Steps(optimizer, case, [*likes, _beside(likes[0])], by_default)
        after = steps.on([*whole, other])
        for dim in range(whole[0][0].dim()):
            for fifths in trial.fifths:
                sizes = [(first := fifths * one[0].shape[dim] // 5, one[0].shape[dim] - first) for one in whole]
                halves = [
                    [
                        [value.split(size, dim)[half].clone() for value in values]
                        for values, size in zip(whole, sizes, strict=True)
                    ]
                    for half in (0, 1)
                ]
                parts = [steps.on([*half, other]) for half in halves]
                joined = [torch.cat(both, dim) for both in zip(*(part[:-1] for part in parts), strict=True)]
                for values_joined, expected, size in zip(joined, after, sizes, strict=False):
                    if not _same(values_joined, expected) or not all(_same(part[-1], after[-1]) for part in parts):
                        dtype = values_joined.dtype
                        kind = "" if dtype in (torch.float32, torch.float64) else f" of {dtype}"
                        return (
                            f"in a trial its steps on a tensor {tuple(values_joined.shape)}{kind} were others than "
                            f"those on its parts {size}"
                        )
    return None


def why_parameters_differ(optimizer: Optimizer, case: Case, *, by_default: bool = False) -> str | None:
    """Tell, as :func:`why_halves_differ`, how steps on several parameters differ from those on each by itself."""
    for some, trial in _trials_of(case, _LIMIT_OF_MANY):
        # Of each kind two, since some of a kind may be seen together.
        likes = [*some, *map(_beside, some)]
        parameters = [_drawn(trial.shape(like), trial, like) for like in some]
        parameters += [_drawn(_OTHER_SHAPE if trial.limit is None else trial.shape(like), trial, like) for like in some]
        together = _Steps(optimizer, case, likes, by_default).on(parameters)
        for like, parameter, expected in zip(likes, parameters, together, strict=True):
            (alone,) = _Steps(optimizer, case, [like], by_default).on([parameter])
            if not _same(alone, expected):
                return "in a trial its steps on two parameters were others than those on each by itself"
    return None


def _trials_of(case: Case, limit: int) -> Iterator[tuple[Sequence[Like], _Trial]]:
    """Yield trials of one parameter, then of all that the optimizer can tell from each other at once."""
    likes = case.likes
    for trial in _TRIALS:
        yield likes[:1], trial
    if len(likes) > 1:
        for trial in _TRIALS:
            yield likes, replace(trial, fifths=(2,))
    if likes[0].tensor.dtype not in (torch.float32, torch.float64):
        yield likes, _IN_OWN_DTYPE
    yield likes[:1], replace(_LARGE, limit=limit)
    if len(likes) > 1:
        yield likes, replace(_LARGE, limit=min(limit, _LIMIT_OF_MANY))


def _beside(like: Like) -> Like:
    return replace(like, name=None if like.name is None else f"beside.{like.name}")


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Bit for bit; half precision may overflow."""
    return torch.equal(tensor, other) or bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def _drawn(shape: Sequence[int], trial: _Trial, like: Like) -> list[Tensor]:
    """A parameter's values, and its gradient in each step: of different sizes, so that no norm is like another."""
    generator = torch.Generator().manual_seed(_SEED + len(shape) + shape[0])
    wanted = like.tensor.dtype
    dtype = wanted if wanted is torch.float64 else torch.float32  # rounding would hide what differs
    scales = torch.logspace(-2, 1, shape[0], dtype=dtype).view(-1, *[1] * (len(shape) - 1))
    drawn = torch.randn(trial.num_steps + 1, *shape, generator=generator, dtype=dtype) * scales
    drawn[1:] *= trial.gradients
    return list(drawn.to(like.tensor.device, wanted if trial.is_in_own_dtype else dtype).unbind())


@contextmanager
def undisturbed(parameter: Tensor) -> Iterator[None]:
    """Let an optimizer of trial parameters, of which this is the first, step without leaving a trace.

    Random numbers begin alike in every trial, and those of the program go on as if there had been none.
    """
    devices = [parameter.device] if parameter.is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.enable_grad(), _on(parameter):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(_SEED)  # torch.manual_seed would seed devices that are not put back
        if devices:
            torch.cuda.manual_seed(_SEED)
        yield


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class _StepFailedError(NoTrialError):
    """An optimizer could be made, and its step raised an error."""


@dataclass(frozen=True)
class _Steps:
    """Steps of an optimizer like another one, with parameters that stand for those of ``likes``."""

    optimizer: Optimizer
    case: Case
    likes: Sequence[Like]
    by_default: bool

    def on(self, drawn: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The parameters after all steps of one that is made anew.

        Raises:
            NoTrialError: if there is none.
        """
        if any(like.state for like in self.likes):
            try:
                return self._on(drawn, has_state=True)
            except _StepFailedError:  # not only flags of before the first step, it seems
                pass
        return self._on(drawn, has_state=False)

    def _on(self, drawn: Sequence[Sequence[Tensor]], *, has_state: bool) -> list[Tensor]:
        parameters = [nn.Parameter(values.clone()) for values, *_ in drawn]
        with undisturbed(parameters[0]):
            trial = self._made(parameters)
            if has_state:
                for parameter, like in zip(parameters, self.likes, strict=True):
                    if like.state:
                        trial.state[parameter].update(copy.deepcopy(dict(like.state)))
            try:
                for gradients in zip(*(gradients for _, *gradients in drawn), strict=True):
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient.clone()
                    trial.step()
            except Exception as error:
                shapes = " and ".join(str(tuple(one.shape)) for one in parameters)
                reason = f"a trial step on tensors {shapes} failed ({type(error).__name__}: {error})"
                raise _StepFailedError(reason) from error
            require_state_only(trial)
        if any(one.numel() and torch.equal(one, values) for one, (values, *_) in zip(parameters, drawn, strict=True)):
            raise NoTrialError("in a trial it did not step")
        return [one.detach() for one in parameters]

    def _made(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        try:
            mark_alike(parameters, self.likes)
            return made_like(self.optimizer, self.case.settings, parameters, self.likes, by_default=self.by_default)
        except Exception as error:
            reason = str(error) if isinstance(error, NoTrialError) else f"{type(error).__name__}: {error}"
            has_defaults = isinstance(error, NoTrialError) and error.has_defaults
            raise NoTrialError(f"none could be made for a trial ({reason})", has_defaults=has_defaults) from error

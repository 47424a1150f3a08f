"""What this rank holds in training, and what that leaves for units on every rank of the group."""

from __future__ import annotations

import math

from torch import Tensor

from zeroresize.comm.exchange import Meet
from zeroresize.control.setup import Setup
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segments import owned_segments, segment_works
from zeroresize.measure.memory_meter import ActivationBytes
from zeroresize.optim.optimizers import SteppedTensors, torch_optimizer, why_sharded
from zeroresize.optim.trial import StateBytes
from zeroresize.policy.tensor.memory import GroupMemory, HeldBytes


class MemoryWatch:
    """Counts what this rank holds: weights, gradients, optimizer state and activations.

    Gradients count whether they are there or not, and optimizer state counts before the first step as what one like it
    keeps. Activations are those of a training forward, so there are none before the first, nor of a compiled model.
    What else a device holds, such as buffers of kernels, and what a move holds for as long as it lasts, does not count.

    ``at_rest`` is what the ranks' memory leaves between two steps, without activations; None before :meth:`gather`.

    Raises:
        ValueError: for an optimizer of which nothing tells what a unit takes.
    """

    def __init__(self, setup: Setup) -> None:
        limits = setup.config.memory_limits
        assert limits is not None
        self._setup, self._limits = setup, limits
        self._segments = owned_segments(setup.layers)
        self._activations, self._of_element = ActivationBytes(setup.model, self._segments), _BytesOfElement(setup)
        self.at_rest: GroupMemory | None = None
        self.count_next()

    def held(self) -> HeldBytes:
        """Return what this rank holds in training, whatever units it owns now."""
        of_element = self._of_element
        of_units_here = of_even_share = 0.0
        for segment in self._segments:
            owned = segment.owned
            for tensor in {id(tensor.parameter): tensor for tensor in segment.tensors}.values():
                of_unit = tensor.elements_of_unit * of_element(tensor.parameter)
                of_units_here += of_unit * len(tensor.held(owned, self._setup.rank))
                of_even_share += of_unit * len(owned.owners) / tensor.block / owned.num_ranks
        model = self._setup.model
        everything = math.fsum(local_of(tensor).numel() * of_element(tensor) for tensor in model.parameters())
        everything += sum(local_of(tensor).nbytes for tensor in model.buffers())
        return HeldBytes(everything - of_units_here + self._activations.besides, of_even_share + self._of_activations())

    def gather(self, meet: Meet) -> GroupMemory:
        """Return what the ranks' memory leaves for units before training, whoever owns them; collective."""
        held = self.held()
        rows = meet(held.fixed, held.of_even_share)
        held_by_rank = [HeldBytes(fixed, of_share) for fixed, of_share, *_ in rows]
        self.at_rest = GroupMemory(self._limits, held_by_rank, segment_works(self._setup.layers))
        return self.at_rest

    def moved(self) -> None:
        """Begin anew with activations, as units have moved."""
        self._activations.forget()
        self.count_next()

    def count_next(self) -> None:
        """Count the activations of the next training forward, too."""
        if not any(layer.is_compiled for layer in self._setup.layers.values()):
            self._activations.count_next()

    def close(self) -> None:
        """Count no more."""
        self._activations.close()

    def _of_activations(self) -> float:
        """Bytes of activations of an even share; 0 where this rank has none that would tell."""
        maps = [segment.owned for segment in self._segments]
        held = [len(owned.blocks_of(self._setup.rank, owned.slices)) * owned.slices for owned in maps]
        here = math.fsum(units * owned.num_ranks / len(owned.owners) for units, owned in zip(held, maps, strict=True))
        return self._activations.within * len(maps) / here if here else 0.0


class _BytesOfElement:
    """Tells the bytes of an element of a parameter with all that belongs to it."""

    def __init__(self, setup: Setup) -> None:
        self._names = {id(parameter): name for name, parameter in setup.model.named_parameters()}
        self._stepped: SteppedTensors | None = None
        if setup.optimizer is None:
            return
        try:
            if (why := why_sharded(setup.optimizer)) is not None:
                raise ValueError(why)
            self._state = StateBytes(torch_optimizer(setup.optimizer))
            self._stepped = SteppedTensors(setup.optimizer, dict(setup.model.named_parameters()))
        except ValueError as error:
            raise ValueError(f"memory_limits cannot be kept with this optimizer: {error}") from error

    def __call__(self, parameter: Tensor) -> float:
        name = self._names.get(id(parameter), "")
        stepped = self._stepped.now().get(name) if self._stepped is not None else None
        if stepped is None:
            return parameter.element_size() * (2.0 if parameter.requires_grad else 1.0)
        # Where a master copy is stepped, its gradient takes the place of the parameter's.
        gradient = max(parameter.element_size(), stepped.element_size())
        master = stepped.element_size() if stepped is not parameter else 0
        return parameter.element_size() + master + gradient + self._state.of_element(stepped)

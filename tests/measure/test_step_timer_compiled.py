"""What a timer sees of layers in a compiled graph: all that it sees of them as they are."""

import torch
from helpers.compiled import batch, compiled, feed_forwards

from zeroresize.kernels.probe import ProductProbe
from zeroresize.measure import waits
from zeroresize.measure.clocks import CpuClock
from zeroresize.measure.step_timer import LayerTimer, StepTimer


class Sleeps(ProductProbe):
    """A multiplication takes longer by so many seconds."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def gemm_ends(self, operands):
        self._clock.now += self._seconds


class SetClock(CpuClock):
    """Shows what it is set to."""

    now = 0.0

    def mark(self):
        return self.now


class Waits:
    """Counts waits, and backwards that end."""

    def __init__(self):
        self.num_begun = self.num_ended = self.num_backwards = 0

    def wait_begins(self, where=None):
        self.num_begun += 1

    def wait_ends(self):
        self.num_ended += 1

    def backward_ends(self):
        self.num_backwards += 1


def test_products_waits_and_what_lies_outside_are_seen(run_ranks):
    def check(rank, group):
        torch._dynamo.reset()
        outcomes = []
        for compiles in (False, True):
            model, clock = feed_forwards(group), SetClock()
            timer = StepTimer(clock)
            layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "probes")}
            for name, layer in layers.items():
                layer.probes.add_outermost(LayerTimer(timer, name))
                layer.probes.add_innermost(Sleeps(clock, 1.0))
            call = compiled(model)[0] if compiles else model
            seen = Waits()
            waits.listen(seen)
            timer.begin_step()
            call(batch()).sum().backward()
            clock.now += 7.0
            (times,) = timer.end_step()
            timer.close()
            waits.stop_listening(seen)
            counts = seen.num_begun, seen.num_ended, seen.num_backwards
            outcomes.append((times.gemm_s, times.busy_s, times.outside_s, times.layers, counts))
        return outcomes

    for expected, seen in run_ranks(check, 2, timeout_s=110):
        assert seen == expected
        assert seen[0] == 16.0  # of x no gradient is asked for, so the first two layers multiply twice
        assert seen[1] == 23.0
        assert seen[-1][0] == seen[-1][1] > 4 and seen[-1][2] == 1

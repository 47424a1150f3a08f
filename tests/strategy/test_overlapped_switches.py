"""Weights travel while the strategy before trains, gradients while the next one does; results are the same bits."""

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.strategies import FOUR, assert_holds, give_ones, switchable
from test_mixed_precision import trainer_of
from test_strategy_training import FIVE, batch, ranges_of

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches import switch_order
from zeroresize.resharding import agreement
from zeroresize.resharding.transport import Transport
from zeroresize.strategy.switching.switch import Switch

CASES = [(torch.float64, None, False), (torch.float32, torch.bfloat16, False), (torch.float64, None, True)]


@pytest.mark.parametrize(("dtype", "compute_dtype", "is_tight"), CASES, ids=["plain", "mixed", "tight memory"])
def test_training_is_the_same_to_the_last_bit(run_ranks, monkeypatch, dtype, compute_dtype, is_tight):
    started = []
    # Visits may come in another order where switches are hidden, and sums of floats are other ones then.
    monkeypatch.setattr(switch_order, "hide_first_switch", lambda seconds: seconds)

    def train(rank, group):
        start = Switch.start
        monkeypatch.setattr(Switch, "start", lambda self, *earlier: (started.append(1), start(self, *earlier)))
        if is_tight and rank == 1:  # for what happens beside training
            needed = Switch.needed_bytes
            monkeypatch.setattr(
                Switch, "needed_bytes", property(lambda self: needed.fget(self) + (2**60 if self._is_beside else 0))
            )
        results = []
        for overlap in (False, True):
            trainer = trainer_of(group, ranges_of(FIVE), FIVE[1], dtype, compute_dtype, overlap=overlap)
            reports = [trainer.step(batch(step)) for step in range(2)]
            evaluated = trainer.evaluate(batch(0))
            weights = [one.detach().tolist() for one in trainer.model.parameters()]
            sent = sum(switch.sent_bytes for report in reports for switch in report.switches)
            results.append(([(one.loss, one.grad_norm) for one in reports], evaluated, weights, sent))
        return results, len(started)

    for (at_once, overlapped), num_started in run_ranks(train, 4):
        assert at_once == overlapped
        # Of five strategies, of two, and of five without gradients; home is trained first, the last gradients wait.
        ways = 1 if compute_dtype is None else 0
        assert num_started == (0 if is_tight else (4 + 3 + ways) + (1 + 0 + ways) + (4 + ways))


@on_ranks(4)
def test_a_rank_that_fails_while_it_sends_beside_training_leaves_all_with_what_they_had(rank, group, *, monkeypatch):
    pack = Transport._pack

    def fail(*arguments):
        if rank == 1:
            raise ValueError("cannot be packed")
        return pack(*arguments)

    model, wholes = switchable(group, FOUR)
    model.switch_to(FOUR[1], gradients=False)
    texts = []
    monkeypatch.setattr(Transport, "_pack", fail)
    model.prefetch(FOUR[0])
    with pytest.raises(RuntimeError) as caught:
        model.switch_to(FOUR[0], gradients=False)
    texts.append(str(caught.value))
    assert model.current == FOUR[1]
    assert_holds(model, wholes)
    monkeypatch.setattr(Transport, "_pack", pack)
    model.switch_to(FOUR[2], gradients=False)
    assert_holds(model, wholes)

    give_ones(model)
    model.prefetch(FOUR[1])
    model._switcher._coming[2].wait()
    monkeypatch.setattr(Transport, "_pack", fail)
    model.switch_to(FOUR[1], in_background=True)
    assert model.current == FOUR[1]
    with pytest.raises(RuntimeError) as caught:
        model.collect()
    texts.append(str(caught.value))
    monkeypatch.setattr(Transport, "_pack", pack)
    assert_holds(model, wholes)
    model.abandon()
    assert model.current == model.optimizer_strategy
    assert_holds(model, wholes)
    assert all(one.grad is None for one in model.parameters())
    for rank, seen in enumerate(gathered(group, texts)):
        for text in seen:
            assert ("cannot be packed" if rank == 1 else "ranks [1] of the group have not received") in text


@on_ranks(3)
def test_memory_that_does_not_suffice_for_two_sets_of_weights_is_no_error(rank, group, *, monkeypatch):
    model, wholes = switchable(group, [Strategy(3), Strategy(1, 3)])
    if rank == 2:
        monkeypatch.setattr(agreement, "free_bytes", lambda device: 10)
        monkeypatch.setattr(agreement, "_place_of", lambda device: "a small device")
    assert not model.prefetch(Strategy(1, 3))
    monkeypatch.undo()
    model.switch_to(Strategy(1, 3), gradients=False)
    assert_holds(model, wholes)


@on_ranks(4)
def test_ranks_that_differ_in_where_a_prefetched_switch_leads_are_told_so(rank, group):
    model, wholes = switchable(group, FOUR)
    with pytest.raises(RuntimeError, match=r"differ in where the switch leads, .*: \[\[0, 2, 3\], \[1\]\]"):
        model.prefetch(FOUR[1 if rank == 1 else 2])
    model.prefetch(FOUR[1])
    with pytest.raises(RuntimeError, match=r"differ in where the switch leads: \[\[0, 2, 3\], \[1\]\]"):
        model.switch_to(FOUR[1 if rank == 1 else 2])
    with pytest.raises((ValueError, RuntimeError), match=r"none of the model's|ranks \[3\] of the group failed"):
        model.switch_to(FOUR[1] if rank != 3 else Strategy(ranks=(3,)))
    assert_holds(model, wholes)
    model.switch_to(FOUR[1])
    assert_holds(model, wholes)

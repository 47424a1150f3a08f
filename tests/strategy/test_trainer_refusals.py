"""What a step cannot do is told on every rank before anything runs; a rank that dies is named."""

import os

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.processes import told_by_survivors

from lm_examples.llama import LlamaConfig, llama_layers, token_loss
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StrategyTrainer

CONFIG = LlamaConfig(num_blocks=1, hidden_size=8, num_heads=2, mlp_size=4, vocabulary=16)
RANGES = [LengthRange(4, Strategy(2)), LengthRange(8, Strategy(1, 2))]


def model_of(group):
    torch.manual_seed(0)
    return SwitchableModel(
        llama_layers(CONFIG), strategies=[one.strategy for one in RANGES], process_group=group, nodes=[0] * group.size()
    )


def trainer_of(model, optimizer=None, ranges=RANGES, max_tokens=8, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return StrategyTrainer(model, optimizer, ranges, loss=token_loss, max_tokens=max_tokens, **options)


def rows(*lengths):
    return [torch.arange(one + 1) % CONFIG.vocabulary for one in lengths]


def refuses(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


@on_ranks(2)
def test_what_cannot_be_trained_is_refused_on_every_rank_and_the_next_step_works(rank, group):
    model = model_of(group)
    for options, message in (
        ({"max_tokens": 7}, r"max_tokens of the length range up to 8=7.*at least 8"),
        ({"ranges": RANGES[::-1]}, "needs a larger up_to"),
        ({"ranges": [LengthRange(8, Strategy(1, 1, 2))]}, r"up to 8: \(1, 1, 2\): the model's strategies are"),
        ({"grad_clip": -1.0}, "grad_clip=-1"),
    ):
        refuses(lambda options=options: trainer_of(model, **options), ValueError, message)
    hook = model.whole_layers[0].register_forward_hook(lambda *_: "a text" if rank else None)
    kind = ValueError if rank else RuntimeError
    refuses(lambda: trainer_of(model), kind, r"^layer 0" if rank else r"ranks \[1\] .* failed .* a trainer: layer 0")
    hook.remove()
    trainer = trainer_of(model, max_tokens=None)
    weights = [one.detach().clone() for one in model.parameters()]
    for sequences, message in (
        ([], "empty: a list of rows"),
        (torch.zeros(2, 3, dtype=torch.int64), "a Tensor: a list of rows"),
        ((row for row in rows(3)), "a generator: a list of rows"),
        ([[1, 2, 3]], r"sequences \[0\] are no tensors"),
        (rows(3, 9), r"sequence 1: a sequence of 9 tokens is longer than the last length range: up to 8"),
        ([*rows(3), torch.zeros(1, dtype=torch.int64)], r"sequences \[1\] are no tensors"),
        ([torch.zeros(3)], r"sequences \[0\] are no tensors .* of int64"),
    ):
        for call in (trainer.step, trainer.evaluate):
            refuses(lambda call=call, sequences=sequences: call(sequences), ValueError, message)
    # One rank only has it wrong: the other one hears of it.
    kind, message = (ValueError, "longer than") if rank else (RuntimeError, r"ranks \[1\] .* failed")
    refuses(lambda: trainer.step(rows(9 if rank else 8)), kind, message)
    other = rows(3)
    other[0][1] += rank
    for sequences in (rows(3 + rank), other):
        message = r"differ in the sequences: every rank .*\[\[0\], \[1\]\]"
        refuses(lambda sequences=sequences: trainer.step(sequences), RuntimeError, message)
    trainer.num_steps += rank
    message = r"differ in step\(\) or evaluate\(\), .* num_steps, .*\[\[0\], \[1\]\]"
    refuses(lambda: trainer.step(rows(3)), RuntimeError, message)
    trainer.num_steps = 0
    stranger = torch.optim.SGD([*list(model.parameters())[1:], torch.nn.Parameter(torch.zeros(1))])
    message = r"does not step 1 of the model\'s parameters .*layers\.0\.tokens\.weight"
    refuses(lambda: trainer_of(model, stranger).step(rows(3)), ValueError, message)
    model.switch_to(RANGES[1].strategy)
    refuses(lambda: trainer.step(rows(3)), ValueError, r"under \(1, 2, 1\), not the optimizer's strategy")
    model.abandon()
    for parameter, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, before)
    report = trainer.step(rows(3, 8))
    assert trainer.evaluate(rows(3, 8)) < report.loss and report.grad_norm > 0.0 and not report.is_skipped
    trainer.use(RANGES[rank:])
    refuses(lambda: trainer.step(rows(3, 4, 4)), RuntimeError, r"differ in the ranges, .*\[\[0\], \[1\]\]")
    refuses(lambda: trainer.use([LengthRange(8, Strategy(1, 1, 2))]), ValueError, "the model's strategies are")
    trainer.use(RANGES[1:])
    assert trainer.ranges == (LengthRange(8, Strategy(1, 2), 8),)


@on_ranks(2)
def test_a_step_that_fails_or_is_not_finite_leaves_nothing_to_the_next_one(rank, group):
    """In the second micro-batch of the first visit, in the visit after it, and by a loss or a gradient not a number."""

    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return dx * float("nan")

    kind, seen = None, []

    def loss(output, packed):
        seen.append(packed.lengths)
        if (kind == "first visit" and len(seen) == 2) or (kind == "visit" and max(packed.lengths) > 4):
            raise FloatingPointError("bad")
        output = Spoils.apply(output) if kind == "gradient" else output
        return token_loss(output, packed) * (float("nan") if kind == "loss" else 1.0)

    model = model_of(group)
    trainer = StrategyTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), RANGES, loss=loss, max_tokens=8)
    weights = [one.detach().clone() for one in model.parameters()]
    for spoiled in ("first visit", "visit"):
        kind = spoiled
        seen.clear()
        refuses(lambda: trainer.step(rows(4, 4, 4, 4, 4, 4, 8)), FloatingPointError, "bad")
        for call in (trainer.step, trainer.evaluate):
            refuses(lambda call=call: call(rows(3)), RuntimeError, "FloatingPointError: bad.*Exit .*abandon")
        model.abandon()
        assert model.current == model.optimizer_strategy and all(one.grad is None for one in model.parameters())
    for spoiled in ("loss", "gradient"):
        kind = spoiled
        report = trainer.step(rows(3, 8))
        assert report.is_skipped and all(one.grad is None for one in model.parameters())
    assert all(map(torch.equal, weights, model.parameters()))
    kind = None
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    refuses(lambda: trainer.step(rows(3)), ValueError, r"zero_grad\(\) or model.abandon\(\) before")
    model.abandon()
    trainer.step(rows(3, 8))
    assert not any(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("length", [3, 8])
def test_a_rank_that_dies_in_a_step_is_named(tmp_path, length):
    def check(rank, group):
        model = model_of(group)
        trainer = trainer_of(model)
        if rank == 1:  # in the midst of a forward, under data or under tensor parallelism
            strategy = RANGES[length == 8].strategy
            model._placements[strategy].stage_layers[1].mlp.register_forward_pre_hook(lambda *_: os._exit(0))
        with pytest.raises(RuntimeError) as caught:
            trainer.step(rows(length, length))
        return str(caught.value)

    messages = told_by_survivors(check, 2, tmp_path)
    assert messages.keys() == {0} and "(ranks [1] of the job)" in messages[0], messages

"""Master weights stay with the optimizer; copies in 16 bits are what is switched; gradients are added up exactly."""

import itertools
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import for_each
from helpers.strategies import FOUR, own_part, switchable
from test_strategy_training import CONFIG, FIVE, MAX_NORM, MAX_TOKENS, batch, optimizer_of, ranges_of, undivided
from test_strategy_training import layers_of as llama_layers_of

import zeroresize as zr
from lm_examples.llama import token_loss
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StrategyTrainer

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16


def trainer_of(group, ranges, optimizer_strategy, dtype, compute_dtype, gradient_dtype=None, **options):
    model = SwitchableModel(
        list(llama_layers_of(dtype)),
        strategies=[one.strategy for one in ranges],
        process_group=group,
        optimizer_strategy=optimizer_strategy,
        compute_dtype=compute_dtype,
        gradient_dtype=gradient_dtype,
        max_bytes=5000,
        nodes=(0, 0, 1, 1),  # so that partial gradients are summed inside nodes first
    )
    return StrategyTrainer(
        model,
        optimizer_of(model.parameters()),
        ranges,
        loss=token_loss,
        max_tokens=MAX_TOKENS,
        grad_clip=MAX_NORM,
        **options,
    )


@on_ranks(4)
def test_switches_send_half_the_bytes_and_no_weights_back_to_the_optimizer(rank, group):
    sent = []
    for types in ({}, {"compute_dtype": BF16}, {"compute_dtype": BF16, "gradient_dtype": BF16}):
        model, _ = switchable(group, FOUR, torch.float32, optimizer_strategy=FOUR[1], **types)
        weights, with_gradients = [], []
        for before, after in itertools.permutations(FOUR, 2):
            model.switch_to(before, gradients=False)
            weights.append(model.switch_to(after, gradients=False).sent_bytes)
            model.switch_to(before, gradients=False)
            backward_of_sums(model)
            with_gradients.append(model.switch_to(after).sent_bytes)
            model.abandon()
        sent.append((weights, with_gradients))
    by_rank = gathered(group, sent)
    assert sum(sum(plain[1]) - sum(plain[0]) for plain, _, _ in by_rank) > 0, "gradients travel"
    for plain, mixed, all_mixed in by_rank:
        home = [after == FOUR[1] for _, after in itertools.permutations(FOUR, 2)]
        from_home = [before == FOUR[1] for before, _ in itertools.permutations(FOUR, 2)]
        expected = [0 if is_home else sent // 2 for sent, is_home in zip(plain[0], home, strict=True)]
        assert mixed[0] == all_mixed[0] == expected and sum(expected) > 0
        for number, is_from_home in enumerate(from_home):
            gradients = plain[1][number] - plain[0][number]
            assert gradients == 0 or not is_from_home
            assert mixed[1][number] - mixed[0][number] == gradients
            assert all_mixed[1][number] - all_mixed[0][number] == gradients // 2


def backward_of_sums(model):
    for layer in model.stage_layers.values():
        for parameter in layer.parameters():
            parameter.float().sum().backward()


@on_ranks(4)
def test_gradients_of_many_micro_batches_are_added_up_in_the_masters_type(rank, group):
    """In bfloat16 a sum of ones stays at 256."""

    model, _ = switchable(group, FOUR, torch.float32, compute_dtype=BF16)
    for strategy in (FOUR[0], FOUR[1]):
        model.switch_to(strategy)
        for _ in range(300):
            backward_of_sums(model)
    model.collect()
    for parameter in model.parameters():  # of four replicas, then of two
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, torch.full_like(parameter, 300.0 * (4 + 2)))


def test_gradients_in_16_bits_are_as_exact_as_rounding_each_sum_once_and_the_same_on_ranks_that_hold_the_same(
    run_ranks,
):
    @for_each([((0, 0, 0, 0),), ((0, 0, 1, 1),)])
    def check(rank, group, nodes):
        optimizer_strategy = Strategy(1, 3, shares=(1, 2, 3))
        options = {"compute_dtype": BF16, "gradient_dtype": BF16, "max_bytes": 2000, "nodes": nodes}
        model, tensors = switchable(group, [optimizer_strategy, FOUR[0]], torch.float32, **options)
        model.switch_to(FOUR[0])
        sums, bounds = {}, {}
        for number, (name, whole) in enumerate(tensors.items()):
            generator = torch.Generator().manual_seed(number)
            partials = torch.randn(4, *whole.shape, generator=generator)
            master = model._placements[FOUR[0]].masters[number]
            master.grad = partials[rank].clone()
            sums[name], bounds[name] = partials.double().sum(0), partials.abs().double().sum(0) * 2**-8
        model.collect()
        undivided_gradients, largest = {}, 0.0
        for name, parameter in model.named_parameters():
            exact, bound = (own_part(model, optimizer_strategy, name, one[name]) for one in (sums, bounds))
            error = (parameter.grad.double() - exact).abs()
            assert (error <= bound + 1e-6).all(), name
            largest = max(largest, float((error / bound).max()) if error.numel() else 0.0)
            if next(one for one in model.tensors if one.name == name).division is None:
                undivided_gradients[name] = parameter.grad.tolist()
        assert rank == 3 or largest > 0.1, "rounded at all"
        return undivided_gradients

    first, second, third, _ = run_ranks(check, 4)
    assert len(first[0]) > 5 and first == second == third


def test_training_under_five_strategies_is_that_of_the_undivided_model_to_the_copies_precision(run_ranks):
    """Masters in double precision, copies in single: the masters are finer than the copies."""
    steps, _, wholes = undivided(torch.float64, 3)

    def train(rank, group):
        trainer = trainer_of(group, ranges_of(FIVE), FIVE[1], torch.float64, torch.float32)
        losses = [(one.loss, one.grad_norm) for one in (trainer.step(batch(step)) for step in range(3))]
        is_finer = False
        for name, parameter in trainer.model.named_parameters():
            expected = own_part(trainer.model, FIVE[1], name, wholes[name])
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)
            is_finer |= not torch.equal(parameter.detach(), parameter.detach().float().double())
        assert is_finer
        return losses

    for losses in run_ranks(train, 4):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(steps), rtol=1e-4, atol=1e-5)


SHORT = [torch.ones(3, dtype=torch.int64)] * 4  # of the first range alone


@on_ranks(4, [(False,), (True,)])
def test_steps_and_evaluations_are_of_the_masters_then_whatever_was_computed_or_sent_before(rank, group, overlap):
    """Masters change in place: those of layers that somebody has looked at, and of weights that were sent ahead."""

    trainer = trainer_of(group, ranges_of(FIVE), FIVE[1], torch.float32, BF16, overlap=overlap)
    model, loss = trainer.model, math.log(CONFIG.vocabulary)

    def change(fill):
        with torch.no_grad():
            for parameter in model.parameters():
                fill(parameter.data)  # as no version counter tells

    middle = [torch.ones(6, dtype=torch.int64)] * 4
    for run in (trainer.evaluate, lambda sequences: trainer.step(sequences).loss):
        for sequences, strategy in ((SHORT, FIVE[0]), (middle, FIVE[1]), (batch(0), FIVE[1])):
            change(torch.Tensor.normal_)
            assert abs(trainer.evaluate(sequences) - loss) > 0.01
            assert model.stage_layers and (strategy == FIVE[1] or model.prefetch(strategy))
            change(torch.Tensor.zero_)
            assert run(sequences) == pytest.approx(loss), (run, strategy)


@on_ranks(4)
def test_no_copies_are_left_between_steps(rank, group):
    trainer = trainer_of(group, ranges_of(FIVE), FIVE[0], torch.float32, BF16)
    model = trainer.model

    def assert_none(what):
        assert model.held_bytes == held, what

    held = model.held_bytes
    trainer.evaluate(SHORT)
    assert_none("evaluate")
    for what, end in (
        ("abandon", model.abandon),
        ("move_optimizer", lambda: model.move_optimizer(FIVE[0], trainer.optimizer)),
        ("an evaluation by hand", lambda: model.switch_to(FIVE[0], gradients=False)),
        ("drop_copies", model.drop_copies),
        ("collect", lambda: (model.collect(), model.drop_gradients())),
    ):
        assert model.stage_layers and model.held_bytes > held
        end()
        assert_none(what)


@on_ranks(4)
def test_checkpoints_hold_the_masters_and_a_plain_model_reads_them(rank, group, *, tmp_path):
    trainer = trainer_of(group, ranges_of(FIVE), FIVE[3], torch.float32, BF16)
    trainer.step(batch(0))
    trainer.model.move_optimizer(FIVE[1], trainer.optimizer)
    trainer.step(batch(1))
    saved = zr.sharded_state_dict(trainer.model, trainer.optimizer)
    dcp.save(saved, checkpoint_id=tmp_path, process_group=group)
    plain = trainer_of(group, ranges_of(FIVE), FIVE[1], torch.float32, None)
    dcp.load(zr.sharded_state_dict(plain.model, plain.optimizer), checkpoint_id=tmp_path, process_group=group)
    for (name, master), (_, parameter) in zip(
        trainer.model.named_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert torch.equal(master, parameter), name
    again = trainer_of(group, ranges_of(FIVE), FIVE[0], torch.float32, BF16)
    dcp.load(zr.sharded_state_dict(again.model, again.optimizer), checkpoint_id=tmp_path, process_group=group)
    again.num_steps = 2
    for loss, resumed in gathered(group, (trainer.step(batch(2)).loss, again.step(batch(2)).loss)):
        assert loss == pytest.approx(resumed, rel=5e-3)

"""Planned micro-batches, on replicas of pipelines of divided layers, train as the undivided model does."""

import os

import pytest
import torch
from helpers.micro_batches import (
    MAKE,
    SIZES,
    Lengths,
    LocalPlans,
    Undivided,
    layers_of,
    planner_of,
    samples_of,
)
from helpers.processes import told_by_survivors

from lm_examples.microbatches.blocks import summed_loss
from zeroresize.microbatch.planners import RunPlanners
from zeroresize.microbatch.store import share_store
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel


def trainer_of(kind, strategy, group, plans, dtype=torch.float64, compute_dtype=None, **options):
    model = SwitchableModel(
        layers_of(kind, dtype), strategies=[strategy], process_group=group, compute_dtype=compute_dtype
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    return MicroBatchTrainer(
        model,
        optimizer,
        plans,
        batch_from=MAKE[kind][1].of,
        hollow=MAKE[kind][1].hollow,
        sizes=SIZES[kind],
        loss=summed_loss,
        grad_clip=0.5,
        **options,
    )


def losses_of(kind, strategy, group, planner, num_steps=3, dtype=torch.float64):
    """Of training and of the undivided model's, and the norms of their gradients."""
    trainer, whole = trainer_of(kind, strategy, group, LocalPlans(planner), dtype), Undivided(kind, dtype)
    pairs = []
    for iteration in range(num_steps):
        lengths = planner.lengths_of(iteration)
        samples = samples_of(kind, lengths, iteration)
        report = trainer.step(samples, lengths)
        pairs += zip((report.loss, report.grad_norm), whole.step(samples, lengths), strict=True)
    return pairs


@pytest.mark.parametrize("kind", ["gpt", "t5"])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)])
def test_losses_and_norms_are_the_undivided_models(run_ranks, kind, degrees):
    strategy = Strategy(*degrees)

    def check(rank, group):
        return losses_of(kind, strategy, group, planner_of(kind, strategy))

    for pairs in run_ranks(check, strategy.num_ranks):
        for value, expected in pairs:
            assert value == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("options", [{"method": "tokens", "size": 40}, {"memory_limit": 300.0}, {"schedule": "1f1b"}])
def test_however_it_is_planned_results_are_the_same(run_ranks, options):
    strategy = Strategy(pp=2)

    def check(rank, group):
        planner = planner_of("gpt", strategy, **options)
        return losses_of("gpt", strategy, group, planner, dtype=torch.float32), LocalPlans(planner).planner(0)

    for pairs, plan in run_ranks(check, 2):
        assert ('"layers"' in plan) == ("memory_limit" in options)
        for value, expected in pairs:
            assert value == pytest.approx(expected, rel=1e-5)


def test_replicas_without_samples_take_part(run_ranks):
    strategy = Strategy(dp=2, pp=2)

    def check(rank, group):
        return losses_of("gpt", strategy, group, planner_of("gpt", strategy, number=1))

    for pairs in run_ranks(check, 4):
        for value, expected in pairs:
            assert value == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_plans_of_planner_processes_train_alike(run_ranks, forked):
    strategy = Strategy(pp=2)

    def check(rank, group):
        planner = planner_of("gpt", strategy)
        shared = share_store(group)
        planners = RunPlanners(planner, shared, group, torch.device("cpu"), last=3, ahead=2)
        trainer, whole = trainer_of("gpt", strategy, group, planners), Undivided("gpt")
        for iteration in range(4):
            lengths = planner.lengths_of(iteration)
            samples = samples_of("gpt", lengths, iteration)
            assert trainer.step(samples, lengths).loss == pytest.approx(whole.step(samples, lengths)[0], rel=1e-10)
        planners.close()
        shared.close()

    run_ranks(check, 2)


def test_a_plan_of_other_replicas_or_stages_is_refused_before_anything_runs(run_ranks):
    def check(rank, group):
        trainer = trainer_of("gpt", Strategy(pp=2), group, LocalPlans(planner_of("gpt", Strategy(dp=2))))
        lengths = Lengths("gpt")(0)
        with pytest.raises(ValueError, match=r"iteration 0 was planned for 2 replicas of 1 stages: .* \(1, 1, 2\)"):
            trainer.step(samples_of("gpt", lengths), lengths)
        trainer.plans = LocalPlans(planner_of("gpt", Strategy(pp=2)))
        assert trainer.step(samples_of("gpt", lengths), lengths).num_tokens == lengths.sum()
        parameter = next(iter(trainer.model.parameters()))
        parameter.grad, lengths = torch.zeros_like(parameter) if rank else None, Lengths("gpt")(1)
        with pytest.raises(ValueError if rank else RuntimeError, match="have gradients" if rank else r"ranks \[1\]"):
            trainer.step(samples_of("gpt", lengths), lengths)

    run_ranks(check, 2)


def test_what_is_evaluated_is_the_mean_over_tokens(run_ranks):
    strategy = Strategy(dp=2, pp=2)

    def check(rank, group):
        trainer = trainer_of("t5", strategy, group, LocalPlans(planner_of("t5", strategy)))
        lengths = Lengths("t5")(5)
        samples = samples_of("t5", lengths)
        return trainer.evaluate(samples, lengths, 60), Undivided("t5").step(samples, lengths)[0]

    for value, expected in run_ranks(check, 4):
        assert value == pytest.approx(expected, rel=1e-10)


def test_in_mixed_precision_evaluations_and_steps_follow_parameters_that_were_changed_in_place(run_ranks):
    strategy = Strategy(pp=2)

    def check(rank, group):
        planner = planner_of("gpt", strategy)
        trainer = trainer_of("gpt", strategy, group, LocalPlans(planner), compute_dtype=torch.float32)
        lengths = planner.lengths_of(0)
        samples = samples_of("gpt", lengths, 0)
        first = [one.detach().clone() for one in trainer.model.parameters()]
        others = [torch.randn_like(one) for one in first]

        def change(values):
            for parameter, value in zip(trainer.model.parameters(), values, strict=True):
                parameter.data.copy_(value)  # as no version counter tells

        held = trainer.model.held_bytes
        loss = trainer.evaluate(samples, lengths, 60)
        assert trainer.model.held_bytes == held
        change(others)
        other_loss = trainer.evaluate(samples, lengths, 60)
        assert abs(other_loss - loss) > 0.1
        change(first)
        assert trainer.model.stage_layers  # casts them
        change(others)
        assert trainer.evaluate(samples, lengths, 60) == pytest.approx(other_loss, rel=1e-6)
        assert trainer.model.stage_layers
        change(first)
        assert trainer.step(samples, lengths).loss == pytest.approx(loss, rel=1e-5)

    run_ranks(check, 2)


def test_a_rank_that_dies_in_a_step_is_named(tmp_path):
    strategy = Strategy(pp=3)

    def check(rank, group):
        planner = planner_of("gpt", strategy)
        trainer = trainer_of("gpt", strategy, group, LocalPlans(planner))
        lengths = planner.lengths_of(0)
        if rank == 1:
            layer = next(iter(trainer.model.stage_layers.values()))
            layer.register_forward_hook(lambda *_: os._exit(0))
        with pytest.raises(RuntimeError) as caught:
            trainer.step(samples_of("gpt", lengths), lengths)
        with pytest.raises(RuntimeError, match="a step failed here"):
            trainer.step(samples_of("gpt", lengths), lengths)
        return str(caught.value)

    texts = told_by_survivors(check, 3, tmp_path)
    assert texts.keys() == {0, 2} and all("ranks [1] of the group" in text for text in texts.values())

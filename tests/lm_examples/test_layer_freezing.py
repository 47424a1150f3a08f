"""Layers in front that have stopped changing skip backward, and thaw."""

import math

import pytest
import torch
from helpers import language_models
from helpers.language_models import BATCH, MICRO, Run, batch, layers_of, model_of

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.cases.freezing import Freezing, FreezingConfig, FreezingRule
from zeroresize.pipeline import LayerProfiler


def rule_of(num_layers=3, **options):
    return FreezingRule(num_layers, FreezingConfig(**({"window": 1, "patience": 1, "tolerance": 0.5} | options)))


def frozen_after(rule, *checks, loss=1.0):
    return [rule.check(plasticity, loss) for plasticity in checks]


def test_layers_freeze_from_the_front_only():
    rule = rule_of(4)
    num_frozen = frozen_after(rule, [8, 8, 8, 8], [8, 1, 8, 1], [8, 1, 8, 1], [1, 1, 8, 1], [math.nan, math.nan, 1, 1])
    assert num_frozen == [0, 0, 0, 2, 3]  # of four, the last one never


def test_a_layer_must_be_calm_several_times_in_a_row_on_average():
    assert frozen_after(rule_of(patience=2), *[[one] * 3 for one in (8, 1, 8, 1, 1)]) == [0, 0, 0, 0, 2]
    assert frozen_after(rule_of(window=2), *[[one] * 3 for one in (8, 8, 1, 8, 1, 1)]) == [0, 0, 0, 0, 0, 2]


def test_layers_thaw_when_the_loss_has_risen():
    rule, never = rule_of(), rule_of(thaw_at_loss=None)
    assert frozen_after(rule, [8] * 3, [1] * 3) == [0, 2] == frozen_after(never, [8] * 3, [1] * 3)
    assert rule.check([math.nan, math.nan, 1], 1.19) == 2
    assert (rule.check([math.nan, math.nan, 1], 1.2), never.check([math.nan, math.nan, 1], 1e9)) == (0, 2)
    assert frozen_after(rule, [8] * 3, [1] * 3, loss=1.2) == [0, 2]


class Forced(Freezing):
    """Freezes so many layers behind each step, whatever their plasticity."""

    def __init__(self, model, plan):
        super().__init__(model, FreezingConfig(every=1))
        self.plan = plan

    def after_step(self, pipeline, optimizer, step, loss):
        self._rule.check = lambda *_: setattr(self._rule, "num_frozen", self.plan[step - 1]) or self.plan[step - 1]
        return super().after_step(pipeline, optimizer, step, loss)


PLAN = [0, 2, 4, 5, 5, 0, 3]


def reference(model, plan):
    """Losses of plain training that skips the frozen layers' parameters."""
    layers = layers_of(DynamicCase(model))
    optimizer = torch.optim.AdamW([one for layer in layers for one in layer.parameters()], lr=0.02)
    losses, frozen = [], 0
    for step, after in enumerate(plan):
        tokens, following = batch(model, step)
        x = tokens
        for layer in layers:
            x = layer(x)
        loss = DynamicCase(model).loss(x, following)
        optimizer.zero_grad()
        loss.backward()
        for layer in layers[:frozen]:
            for parameter in layer.parameters():
                parameter.grad = None
        optimizer.step()
        losses.append(loss.item())
        frozen = after
        for layer in layers[:frozen]:
            for parameter in layer.parameters():
                optimizer.state.pop(parameter, None)
    return losses


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_frozen_stages_train_as_a_model_whose_first_parameters_are_not_stepped(run_ranks, num_ranks, schedule):
    """Whole stages freeze and thaw, and layers move between."""

    def check(rank, group):
        run = Run(group, Forced(model_of(), PLAN), schedule=schedule).train(len(PLAN), moves=True)
        return run.losses, run.has_changed

    by_rank = run_ranks(check, num_ranks)
    assert [changed for _, changed in by_rank] == [[False, True, True, True, False, True, True]] * num_ranks
    losses, _ = by_rank[-1]
    torch.testing.assert_close(losses, reference(model_of(), PLAN), rtol=1e-10, atol=1e-10)


def test_frozen_layers_have_no_backward_and_less_memory(run_ranks):
    def check(rank, group):
        run = Run(group, Forced(model_of(), [0, 3, 3, 3]))
        profiles = []
        for _ in range(4):
            run.train(1)
            tokens, following = batch(run.case.model, 0)
            with LayerProfiler(run.pipeline, run.optimizer) as profiler:
                run.pipeline.step(tokens, target=following)
            profiles.append(profiler.gather())
        return profiles, run.case.figures(run.pipeline)

    (first, *_, last), figures = run_ranks(check, 2)[0]
    assert all(layer.backward_s > 0 and layer.activation_bytes > 0 for layer in first.layers)
    for layer in last.layers[:3]:
        assert (layer.backward_s, layer.gradient_bytes, layer.optimizer_bytes, layer.activation_bytes) == (0, 0, 0, 0)
        assert layer.forward_s > 0
    assert all(layer.backward_s > 0 and layer.optimizer_bytes > 0 for layer in last.layers[3:])
    assert figures == {"frozen_layers": 3.0}


SOON = {"every": 2, "window": 1, "patience": 1, "tolerance": 0.9}


def case():
    return Freezing(model_of(), FreezingConfig(**SOON))


@pytest.mark.slow
def test_layers_freeze_by_what_they_do_wherever_they_are(run_ranks):
    language_models.check_that_moves_change_nothing(run_ranks, case, 14)

    def check(rank, group):
        run, frozen = Run(group, case()), []
        for _ in range(14):
            run.train(1, moves=True)
            frozen.append(run.case.figures(run.pipeline)["frozen_layers"])
        return frozen, run.has_changed

    by_rank = run_ranks(check, 2)
    assert by_rank[0] == by_rank[1]
    frozen, changed = by_rank[0]
    assert max(frozen) > 0 and frozen[:3] == [0.0] * 3
    assert [bool(one) for one in changed] == [
        now != before for now, before in zip(frozen, [0.0, *frozen], strict=False)
    ]


def test_a_layers_plasticity_is_how_much_its_outputs_have_changed(run_ranks):
    """It is of one sequence of the last micro-batch behind the check before, whatever changed in front of the layer."""

    def check(rank, group):
        model = model_of()
        run = Run(group, Freezing(model, FreezingConfig(every=3)))
        run.train(3)
        layers = run.pipeline.layers
        assert layers[2].watch.is_due and layers[2].watch.probe is None
        x, _ = batch(model, 3)
        with torch.no_grad():
            for layer in layers[:2]:
                x = layer(x)
            sequence = x[BATCH - BATCH // MICRO][None]
            before = layers[2](sequence)[0]
        run.train(2)
        assert not layers[2].watch.is_due
        with torch.no_grad():
            change = similarity(layers[2](sequence)[0]) - similarity(before)
        return layers[2].watch.plasticity(layers[2]), change.square().mean().item()

    def similarity(outputs):
        products = outputs @ outputs.T
        return products / products.norm(dim=1, keepdim=True)

    ((plasticity, expected),) = run_ranks(check, 1)
    assert plasticity == pytest.approx(expected, rel=1e-12) and plasticity > 0

"""Dropout and ``torch.autocast`` under strategies: copies stay alike, and a step can be repeated."""

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import for_each
from helpers.strategies import layers_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StrategyTrainer

DP, TP, PP = Strategy(2), Strategy(1, 2), Strategy(1, 1, 2)


class Dropped(nn.Module):
    """Not divided; its copies must drop the same elements."""

    def __init__(self, recomputes):
        super().__init__()
        self.norm, self.recomputes = nn.LayerNorm(6, dtype=torch.float64), recomputes

    def forward(self, x, packed):
        def branch(x):
            return nn.functional.dropout(self.norm(x), 0.3, self.training)

        return x + (checkpoint(branch, x, use_reentrant=False) if self.recomputes else branch(x))


def loss(output, packed):
    return nn.functional.cross_entropy(output, packed.targets, reduction="sum")


def rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(11, (length + 1,), generator=generator) for length in (4, 2, 3, 4, 9, 9, 12)]


def trainer_of(group, layers, strategies, *, optimizer_strategy=None, **options):
    model = SwitchableModel(layers, strategies=strategies, optimizer_strategy=optimizer_strategy, process_group=group)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=0.05)
    ranges = [LengthRange(*one) for one in zip((4, 16)[-len(strategies) :], strategies, strict=True)]
    return StrategyTrainer(model, optimizer, ranges, loss=loss, max_tokens=16, **options)


def with_dropout(recomputes=False):
    layers = layers_of()
    layers.insert(2, Dropped(recomputes))
    return layers


def losses(trainer, steps=range(3)):
    return [trainer.step(rows(step)).loss for step in steps]


@on_ranks(2)
def test_copies_drop_the_same_elements_in_every_run_and_generators_stay(rank, group):
    trainers = [
        trainer_of(group, with_dropout(recomputes), [DP, TP], optimizer_strategy=TP) for recomputes in (False, True)
    ]
    torch.manual_seed(rank)  # what ranks drew before is of no matter
    before = torch.get_rng_state()
    same_seed = [losses(one) for one in trainers]
    assert torch.equal(before, torch.get_rng_state())
    other_seed, resumed = (
        trainer_of(group, with_dropout(), [DP, TP], optimizer_strategy=TP, seed=seed) for seed in (1, 0)
    )
    resumed.num_steps = trainers[0].num_steps
    assert resumed.num_steps == 3
    copies = [
        {name: one.detach() for name, one in trainer.model.named_parameters() if "norm" in name or "table" in name}
        for trainer in trainers
    ]
    (same_seed, other, resumed, copies), (_, _, _, others) = gathered(
        group, (same_seed, losses(other_seed, [0]), losses(resumed, [0]), copies)
    )
    assert same_seed[0] == same_seed[1], "recomputed forwards drop other elements"
    assert len({same_seed[0][0], other[0], resumed[0]}) == 3
    for copy_, peer in zip(copies, others, strict=True):
        assert copy_ and all(torch.equal(copy_[name], peer[name]) for name in copy_)


class Wide(nn.Module):
    """Under autocast a linear layer hands on bfloat16."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, packed):
        return self.linear(x)


def test_autocast_around_a_step_is_near_single_precision(run_ranks):
    @for_each([([DP, TP],), ([PP],)])
    def train(rank, group, strategies):
        def layers():
            torch.manual_seed(0)
            first, *blocks, last = layers_of(dtype=torch.float32)
            return [first, blocks[0], Wide(), Wide(), blocks[1], last]

        plain, cast = (trainer_of(group, layers(), strategies) for _ in range(2))
        backwards = []
        for layer in cast.model.stage_layers.values():
            layer.register_full_backward_pre_hook(lambda *_: backwards.append(torch.is_autocast_enabled("cpu")))
        exact = losses(plain)
        with torch.autocast("cpu", torch.bfloat16):  # around all steps: weights that were cast once are not in force
            cast_losses = losses(cast)
            last = cast.evaluate(rows(0))
        assert not any(backwards)
        assert cast_losses != exact and cast_losses == pytest.approx(exact, rel=0.02)
        assert last == pytest.approx(plain.evaluate(rows(0)), rel=0.02)
        assert all(one.dtype == torch.float32 for one in cast.model.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0), pytest.raises(RuntimeError, match="autocast"):
            plain.step(rows(0))
        assert plain.num_steps == 3
        return cast_losses

    first, second = run_ranks(train, 2)
    assert first == second

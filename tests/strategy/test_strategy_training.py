"""Training under several strategies in every step is training of the undivided model."""

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.strategies import mean_loss, own_part
from torch import nn

from lm_examples.llama import LlamaConfig, llama_layers, token_loss
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StrategyTrainer

CONFIG = LlamaConfig(num_blocks=4, hidden_size=16, num_heads=8, num_kv_heads=4, mlp_size=12, vocabulary=32)
MAX_NORM, MAX_TOKENS = 0.5, 24
FIVE = [Strategy(4), Strategy(2, 2), Strategy(1, 4), Strategy(1, 2, 2), Strategy(2, 1, 2)]
TWO = [Strategy(2), Strategy(1, 2), Strategy(1, 1, 2), Strategy(1, 2, shares=(3, 1)), Strategy(1, 2, shares=(0, 1))]
#: Ranks 1 and 2 are left out of some; rank 2 has no part of the first.
SOME = [Strategy(1, 2), Strategy(2, ranks=(2, 0)), Strategy(3), Strategy(1, 1, 3, ranks=(1, 2, 0)), Strategy(1)]
#: Of the longest sequences of five ranges.
UP_TO = (3, 6, 10, 15, 20)


def ranges_of(strategies):
    return [LengthRange(*one) for one in zip(UP_TO, strategies, strict=True)]


def layers_of(dtype, ties=False):
    torch.manual_seed(0)
    layers = nn.ModuleList(llama_layers(CONFIG)).to(dtype)
    if ties:  # embedding and head, and three norms
        layers[-1].logits.weight = layers[0].tokens.weight
        layers[1].mlp_norm.weight = layers[2].attention_norm.weight = layers[-1].norm.weight
    for parameter in layers.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.3)
    return layers


def batch(step):
    """Several sequences of each range; in step 1 of two ranges only."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, UP_TO[-1] + 1, (12,), generator=generator).tolist()
    lengths = [one for one in lengths if step != 1] + [*(UP_TO if step != 1 else (5, 6, 5, 12, 14, 15))]
    return [torch.randint(CONFIG.vocabulary, (one + 1,), generator=generator) for one in lengths]


def optimizer_of(parameters):
    return torch.optim.AdamW([{"params": list(parameters)}], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-4)


def undivided(dtype, num_steps, ties=False):
    """Losses and norms of each step, the loss after the last one, and the weights."""
    layers = layers_of(dtype, ties)
    optimizer, undivided_steps = optimizer_of(layers.parameters()), []
    for step in range(num_steps):
        loss = mean_loss(layers, batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(layers.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        undivided_steps.append((float(loss.detach()), float(norm)))
    return (
        undivided_steps,
        float(mean_loss(layers, batch(0)).detach()),
        {f"layers.{name}": one.detach() for name, one in layers.named_parameters(remove_duplicate=False)},
    )


def trainer_of(group, strategies, optimizer_strategy, ties=False):
    model = SwitchableModel(
        list(layers_of(torch.float64, ties)),
        strategies=strategies,
        process_group=group,
        optimizer_strategy=optimizer_strategy,
        max_bytes=5000,
    )
    options = {"loss": token_loss, "max_tokens": MAX_TOKENS, "grad_clip": MAX_NORM}
    return StrategyTrainer(model, optimizer_of(model.parameters()), ranges_of(strategies), **options)


def require_alike(model, tie, by_rank):
    """Of these numbers' tensors, given by name as each rank has them."""
    names = {model.tensors[number].name for number in tie}
    first, *others = (tensors[name] for tensors in by_rank for name in tensors if name in names)
    assert others and all(torch.equal(first, other) for other in others)
    return first


def check_against_undivided(run_ranks, num_ranks, strategies, optimizer_strategies, tolerance=1e-10, ties=False):
    """One step for each strategy of the optimizer, which changes by ``move_optimizer`` in between."""
    undivided_steps, last_loss, wholes = undivided(torch.float64, len(optimizer_strategies), ties)
    assert all(norm > MAX_NORM for _, norm in undivided_steps)

    def train(rank, group):
        trainer = trainer_of(group, strategies, optimizer_strategies[0], ties)
        model = trainer.model
        assert [len(tie) for tie in model.ties] == ([2, 3] if ties else [])
        reports = []
        for step, optimizer_strategy in enumerate(optimizer_strategies):
            if model.optimizer_strategy != optimizer_strategy:
                model.move_optimizer(optimizer_strategy, trainer.optimizer)
            reports.append(trainer.step(batch(step)))
            assert model.current == model.optimizer_strategy == optimizer_strategy
            copies = gathered(group, {name: one.detach() for name, one in model.named_parameters()})
            for tie in model.ties:
                require_alike(model, tie, copies)
        last = trainer.evaluate(batch(0))
        assert all(one.grad is None for one in model.parameters())
        expected = {name: own_part(model, model.optimizer_strategy, name, one) for name, one in wholes.items()}
        parameters = dict(model.named_parameters())
        assert parameters.keys() == {name for name, one in expected.items() if one is not None}
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=tolerance, atol=tolerance, msg=name)
        return reports, last

    by_rank = run_ranks(train, num_ranks)
    for reports, last in by_rank:
        steps = [(one.loss, one.grad_norm) for one in reports]
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(undivided_steps), rtol=tolerance, atol=tolerance)
        assert last == pytest.approx(last_loss, rel=tolerance)
        assert last == by_rank[0][1] and steps == [(one.loss, one.grad_norm) for one in by_rank[0][0]]
    return [reports for reports, _ in by_rank]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer_strategy", [FIVE[1], FIVE[3]])
def test_four_ranks_train_five_strategies_in_every_step(run_ranks, optimizer_strategy):
    reports = check_against_undivided(run_ranks, 4, FIVE, [optimizer_strategy] * 3)[0]
    for step, report in enumerate(reports):
        visited = [one.strategy for one in report.by_range]
        assert set(visited) == (set(FIVE) if step != 1 else {FIVE[1], FIVE[3]})
        assert visited[0] == optimizer_strategy and len(report.switches) == len(visited)
        assert report.num_tokens == sum(len(one) - 1 for one in batch(step))
        assert sum(one.num_tokens for one in report.by_range) == report.num_tokens
        assert [one.num_sequences for one in report.by_range] == [
            sum(low < len(row) - 1 <= visited_range.up_to[0] for row in batch(step))
            for visited_range in report.by_range
            for low in [max([0, *(up_to for up_to in UP_TO if up_to < visited_range.up_to[0])])]
        ]
        assert step == 1 or all(max(one.num_micro_batches) > 1 for one in report.by_range[1:3])


@pytest.mark.slow
def test_two_ranks_with_uneven_shares_and_an_optimizer_that_moves(run_ranks):
    check_against_undivided(run_ranks, 2, TWO, [TWO[1], TWO[2], TWO[3]])


def test_tied_weights_are_one_parameter(run_ranks):
    check_against_undivided(run_ranks, 2, TWO, [TWO[2], TWO[0], TWO[1], TWO[2], TWO[4], TWO[2]], ties=True)


@on_ranks(2)
def test_copies_of_a_tied_weight_are_as_the_first_layer_is_filled(rank, group):
    def fill(number, layer):
        torch.manual_seed(number)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)

    with torch.device("meta"):
        layers = list(layers_of(torch.float64, ties=True))
    model = SwitchableModel(layers, strategies=[TWO[2]], process_group=group, initialize=fill, device="cpu")
    copies = gathered(group, {name: each.detach() for name, each in model.named_parameters()})
    first = require_alike(model, model.ties[0], copies)
    torch.manual_seed(0)
    assert torch.equal(first, nn.init.normal_(torch.empty_like(first)))
    require_alike(model, model.ties[1], copies)


@on_ranks(2)
def test_copies_need_equal_settings_of_the_optimizer(rank, group):
    """Where embeddings do not decay and linear layers do, as minGPT has it."""
    for optimizer_strategy in TWO[1:3]:  # both on a rank, and on two
        trainer = trainer_of(group, TWO, optimizer_strategy, ties=True)
        model, names = trainer.model, r"layers\.0\.tokens\.weight, layers\.\d\.logits\.weight"
        parameters, settings = dict(model.named_parameters()), [{"weight_decay": 0.0}, {"weight_decay": 0.1}]
        for each in settings:
            each["params"] = []
        for name, parameter in parameters.items():
            settings["logits" in name]["params"].append(parameter)
        trainer.optimizer = torch.optim.AdamW(settings, lr=1e-2)
        before = {name: one.detach().clone() for name, one in parameters.items()}
        with pytest.raises(ValueError, match=names):
            trainer.step(batch(0))
        with pytest.raises(ValueError, match=names):
            model.move_optimizer(TWO[0], trainer.optimizer)
        assert all(torch.equal(before[name], one) for name, one in parameters.items())
        trainer.evaluate(batch(0))
        trainer.optimizer.param_groups[1]["weight_decay"] = 0.0
        trainer.step(batch(0))
        model.move_optimizer(TWO[0], trainer.optimizer)
        trainer.step(batch(1))


@pytest.mark.slow
def test_tied_weights_are_one_parameter_where_ranks_are_left_out(run_ranks):
    check_against_undivided(run_ranks, 3, SOME, [SOME[3], SOME[1], SOME[3], SOME[4], SOME[2], SOME[3]], ties=True)
    check_against_undivided(run_ranks, 4, FIVE, [FIVE[3], FIVE[4], FIVE[3]], ties=True)


@pytest.mark.slow
def test_ranks_that_strategies_leave_out(run_ranks):
    check_against_undivided(run_ranks, 3, SOME, [SOME[0], SOME[0], SOME[1]])

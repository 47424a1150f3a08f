"""A loss that averages is warned of once; one that sums is not, however well the model is trained."""

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import caught_log_lines

from lm_examples.llama import LlamaConfig, llama_layers, token_loss
from zeroresize.plan.length_range import LengthRange
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.loss_check import averages
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed
from zeroresize.strategy.packed_halves import halves_of_packed
from zeroresize.strategy.trainer import StrategyTrainer

SUM, MEAN = "sum", "mean"
CONFIG = LlamaConfig(num_blocks=2, hidden_size=16, num_heads=2, num_kv_heads=2, mlp_size=12, vocabulary=32)


def loss_of(reduction):
    return lambda output, packed: F.cross_entropy(output, packed.targets, reduction=reduction)


def mean_of_sequences(output, packed):
    """As with padding, sequence by sequence."""
    losses = F.cross_entropy(output, packed.targets, reduction="none").split(packed.lengths)
    return torch.stack([one.mean() for one in losses]).sum()


def is_told_to_average(loss, lengths, gain, vocabulary=50):
    """``averages`` of outputs that know the target: ``gain`` 0 is an untrained model, 10 one without errors."""
    torch.manual_seed(0)
    packed = Packed.of([torch.randint(vocabulary, (length + 1,)) for length in lengths])
    output = torch.randn(packed.num_tokens, vocabulary) * 0.1
    output[torch.arange(packed.num_tokens), packed.targets] += gain
    return averages_over(loss, output, packed, loss(output, packed))


def averages_over(loss, output, packed, value):
    return averages(loss, value, packed.num_tokens, lambda: halves_of_packed(output, packed))


@pytest.mark.parametrize("lengths", [(4,), (7, 1, 30), (300, 200)])
@pytest.mark.parametrize("gain", [0.0, 3.0, 10.0])
def test_an_average_is_known_by_its_halves(lengths, gain):
    assert is_told_to_average(loss_of(MEAN), lengths, gain)
    assert not is_told_to_average(loss_of(SUM), lengths, gain)


def test_an_average_of_a_sequence_is_known_too():
    assert is_told_to_average(mean_of_sequences, (64,), 0.0)


def test_what_cannot_be_told_is_no_average():
    packed = Packed.of([torch.randint(5, (9,))])
    tiny = torch.tensor(1e-3)

    def of_whole_only(output, packed):
        raise IndexError("wants 8 tokens")

    assert averages_over(of_whole_only, torch.zeros(8, 5), packed, tiny) is None
    assert averages_over(loss_of(MEAN), torch.zeros(2, 8, 5), packed, tiny) is None
    assert averages_over(loss_of(MEAN), torch.zeros(8, 5), packed, torch.tensor(float("nan"))) is False
    assert averages_over(loss_of(MEAN), torch.zeros(8, 5), packed, torch.tensor(-1.0)) is False


def test_random_numbers_stay_as_they_are():
    def with_noise(output, packed):
        return loss_of(MEAN)(output + 1e-3 * torch.rand_like(output), packed)

    packed = Packed.of([torch.randint(5, (9,))])
    torch.manual_seed(3)
    assert averages_over(with_noise, torch.zeros(8, 5), packed, torch.tensor(0.1))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_rank_0_warns_once_of_a_loss_that_averages(run_ranks, reduction):
    def train(rank, group):
        torch.manual_seed(0)
        strategies = [Strategy(2), Strategy(1, 2), Strategy(1, 1, 2)]
        ranges = [LengthRange(*one) for one in zip((8, 16, 32), strategies, strict=True)]
        model = SwitchableModel(llama_layers(CONFIG), strategies=strategies, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loss = loss_of(MEAN) if reduction == MEAN else token_loss
        trainer = StrategyTrainer(model, optimizer, ranges, loss=loss, max_tokens=32)
        with caught_log_lines() as lines:
            for _ in range(2):
                trainer.step([torch.randint(CONFIG.vocabulary, (length + 1,)) for length in (1, 8, 3, 16, 30)])
        return [line for line in lines if "averages" in line]

    by_rank = run_ranks(train, 2)
    assert by_rank[1] == [] and len(by_rank[0]) == (reduction == MEAN)
    assert all("reduction='sum'" in line for line in by_rank[0])

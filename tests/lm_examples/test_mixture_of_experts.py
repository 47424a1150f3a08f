"""Tokens go to the experts that a router chooses; the busiest expert is what a layer waits for."""

import pytest
import torch
from helpers.language_models import model_of
from torch.nn import functional as F

from lm_examples.cases.mixture_of_experts import (
    Experts,
    ExpertsBlock,
    MixtureOfExpertsConfig,
)
from lm_examples.gpt import Block


def experts_of(**options):
    torch.manual_seed(0)
    options = MixtureOfExpertsConfig(**({"num_experts": 5} | options))
    experts = Experts(model_of(), options).double()
    experts.router.weight.data.mul_(8)  # uneven
    return options, experts, torch.randn(24, 8, dtype=torch.float64, requires_grad=True)


def token_by_token(experts, x_ND, top_k, capacity):
    """Outputs, the auxiliary loss, tokens that each expert was given and dropped choices, one token after another."""
    num_experts, num_tokens = experts.router.out_features, len(x_ND)
    taken, chosen, outputs, dropped = [0] * num_experts, [0] * num_experts, [], 0
    probabilities = F.softmax(x_ND @ experts.router.weight.T, dim=-1)
    for x, probability in zip(x_ND, probabilities, strict=True):
        best = probability.argsort(descending=True)[:top_k].tolist()
        output = torch.zeros_like(x)
        for expert in best:
            chosen[expert] += 1
            if taken[expert] == capacity:
                dropped += 1
                continue
            taken[expert] += 1
            inner = F.gelu(x @ experts.up_EDM[expert] + experts.up_bias_EM[expert])
            output = output + probability[expert] / probability[best].sum() * (
                inner @ experts.down_EMD[expert] + experts.down_bias_ED[expert]
            )
        outputs.append(output)
    loss = sum(
        num_experts * count / num_tokens * mean for count, mean in zip(chosen, probabilities.mean(dim=0), strict=True)
    )
    return torch.stack(outputs), loss, chosen, dropped


@pytest.mark.parametrize(("top_k", "capacity_factor"), [(1, None), (2, None), (2, 1.0), (1, 0.5), (5, None)])
def test_outputs_and_gradients_are_those_of_each_tokens_experts(top_k, capacity_factor):
    _, experts, x = experts_of(top_k=top_k, capacity_factor=capacity_factor)
    capacity = {None: 24, 1.0: -(-24 * top_k // 5), 0.5: -(-12 * top_k // 5)}[capacity_factor]
    y, loss = experts(x)
    expected, expected_loss, chosen, dropped = token_by_token(experts, x, top_k, capacity)
    torch.testing.assert_close((y, loss), (expected, expected_loss), rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad((y * dy).sum() + loss, [x, *experts.parameters()])
    wanted = torch.autograd.grad((expected * dy).sum() + expected_loss, [x, *experts.parameters()])
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)
    assert experts.num_rows == min(max(chosen), capacity)
    assert experts.imbalance == pytest.approx(max(chosen) / (sum(chosen) / 5))
    assert experts.share_dropped == pytest.approx(dropped / sum(chosen))
    assert (dropped > 0) == (capacity_factor is not None)


def test_one_expert_is_a_dense_block():
    torch.manual_seed(0)
    model = model_of()
    dense = Block(model).double()
    block = ExpertsBlock(model, MixtureOfExpertsConfig(num_experts=1, top_k=1)).double()
    block.load_state_dict({name: one for name, one in dense.state_dict().items() if "mlp." not in name}, strict=False)
    block.mlp.up_EDM.data[0], block.mlp.down_EMD.data[0] = dense.mlp.up.weight.data.T, dense.mlp.down.weight.data.T
    block.mlp.up_bias_EM.data[0], block.mlp.down_bias_ED.data[0] = dense.mlp.up.bias.data, dense.mlp.down.bias.data
    x = torch.randn(3, 8, 8, dtype=torch.float64)
    y, auxiliary = block(x, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(y, dense(x), rtol=1e-12, atol=1e-12)
    assert auxiliary.tolist() == pytest.approx([1 + 0.01 / 4] * 3)


def test_work_follows_the_busiest_expert_and_a_capacity_bounds_it(monkeypatch):
    torch.manual_seed(0)
    sizes, plain = [], torch.baddbmm

    def counted(bias, x, weight):
        sizes.append(x.shape.numel() * weight.shape[2])
        return plain(bias, x, weight)

    monkeypatch.setattr(torch, "baddbmm", counted)
    x, auxiliary = torch.randn(4, 8, 8), torch.zeros(4)
    work = {}
    for factor in (None, 1.0, 0.5):
        block = ExpertsBlock(model_of(), MixtureOfExpertsConfig(num_experts=4, top_k=1, capacity_factor=factor))
        with torch.no_grad():
            block.mlp.router.weight.zero_()  # all tokens to the first expert
        block(x, auxiliary)
        work[factor] = block.work
        assert block.mlp.imbalance == 4.0 and block.mlp.num_rows == {None: 32, 1.0: 8, 0.5: 4}[factor]
        assert sum(sizes) == 2 * 4 * block.mlp.num_rows * 8 * 32
        dense = 4 * (8 * (4 * 64 + 2 * 8 * 32) + 2 * 8 * 36)
        expected = dense + sum(sizes) - 32 * 2 * 8 * 32 + 32 * 8 * 4
        assert block.work == pytest.approx(expected / dense)
        sizes.clear()
    assert work[None] > 2 * work[1.0] > 2 * work[0.5]

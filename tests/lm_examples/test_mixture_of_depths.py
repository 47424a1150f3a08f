"""A router takes some tokens through a block; the others pass by and are not computed."""

import pytest
import torch
from helpers.language_models import Run, model_of
from torch import nn

from lm_examples.cases.mixture_of_depths import MixtureOfDepths, MixtureOfDepthsConfig, RoutedBlock
from lm_examples.gpt import Block


def case(**options):
    return MixtureOfDepths(model_of(), MixtureOfDepthsConfig(**({"capacity": 0.25, "predictor_loss": 0.5} | options)))


def blocks_of(**options):
    torch.manual_seed(0)
    model = model_of(hidden_size=16)
    dense = Block(model).double()
    routed = RoutedBlock(model, MixtureOfDepthsConfig(**options)).double()
    routed.load_state_dict(dense.state_dict(), strict=False)
    x = torch.randn(3, model.context, model.hidden_size, dtype=torch.float64, requires_grad=True)
    return dense, routed, x, torch.zeros(3, dtype=torch.float64)


def test_with_all_tokens_and_an_untrained_router_a_block_is_dense():
    dense, routed, x, auxiliary = blocks_of(capacity=1)
    routed.router.weight.data.zero_()
    y, _ = routed(x, auxiliary)
    torch.testing.assert_close(y, dense(x), rtol=1e-12, atol=1e-12)
    assert routed.work == 1.0


def test_the_chosen_tokens_are_a_shorter_sequence_and_the_others_pass_by():
    dense, routed, x, auxiliary = blocks_of(capacity=0.4)
    y, _ = routed(x, auxiliary)
    expected = []
    for x_TD in x:
        weights = x_TD @ routed.router.weight[0]
        chosen = weights.argsort(descending=True)[:3].sort().values
        new = x_TD.clone()
        new[chosen] += 2 * weights[chosen].sigmoid()[:, None] * (dense(x_TD[chosen][None])[0] - x_TD[chosen])
        expected.append(new)
    expected = torch.stack(expected)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, routed.router.weight, routed.mlp.up.weight], dy)
    wanted = torch.autograd.grad(expected, [x, routed.router.weight, dense.mlp.up.weight], dy)
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)


def test_only_chosen_tokens_are_computed():
    _, routed, x, auxiliary = blocks_of(capacity=0.25)
    rows = []
    for part in (routed.attention, routed.mlp):
        for child in part.children():
            child.register_forward_hook(lambda module, x, y: rows.append(y.shape[:-1].numel()))
    routed(x, auxiliary)
    assert rows == [3 * 2] * 4
    assert routed.work == pytest.approx((2 * 12 * 16**2 + 2 * 16 * 3) / (8 * 12 * 16**2 + 2 * 16 * 36))
    assert routed.share_chosen == 0.25


def test_the_predictor_learns_what_the_router_chooses_and_trains_nothing_else():
    _, routed, x, auxiliary = blocks_of(capacity=0.5, predictor_loss=0.3)
    routed.router.weight.data.normal_()
    _, loss = routed(x, auxiliary)
    top = (x @ routed.router.weight[0]).topk(4).indices
    target = torch.zeros(3, 8, dtype=torch.float64).scatter(1, top, 1.0)
    expected = nn.functional.binary_cross_entropy_with_logits(
        routed.predictor(x)[..., 0], target, reduction="none"
    ).mean(1)
    torch.testing.assert_close(loss, 0.3 * expected, rtol=1e-12, atol=1e-12)
    trained = torch.autograd.grad(loss.sum(), [x, *routed.parameters()], allow_unused=True, retain_graph=True)
    is_predictors = ["predictor" in name for name, _ in routed.named_parameters()]
    assert [one is not None for one in trained] == [False, *is_predictors]
    optimizer = torch.optim.Adam(routed.predictor.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        routed(x, auxiliary)[1].sum().backward()
        optimizer.step()
    assert routed.share_predicted == 1.0
    by_router, _ = routed(x, auxiliary)
    routed.eval()
    torch.testing.assert_close(routed(x, auxiliary)[0], by_router, rtol=1e-12, atol=1e-12)
    routed.predictor[2].bias.data.fill_(-100.0)
    assert torch.equal(routed(x, auxiliary)[0], x)


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_the_predictor_may_choose_none_or_all(bias):
    dense, routed, x, auxiliary = blocks_of(routing="predictor")
    routed.predictor[2].bias.data.fill_(bias)
    routed.router.weight.data.zero_()
    y, loss = routed(x, auxiliary)
    torch.testing.assert_close(y, x if bias < 0 else dense(x), rtol=1e-12, atol=1e-12)
    assert (routed.work, routed.share_chosen) == ((0.0, 0.0) if bias < 0 else (1.0, 1.0))
    (y.sum() + loss.sum()).backward()
    assert x.grad is not None


def test_every_other_block_does_less_work_and_predictors_learn_on_every_stage(run_ranks):
    def check(rank, group):
        run = Run(group, case()).train(1)
        before = [layer.predictor[0].weight.detach().clone() for layer in run.present if isinstance(layer, RoutedBlock)]
        run.train(2)
        after = [layer.predictor[0].weight for layer in run.present if isinstance(layer, RoutedBlock)]
        assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        work = [layer.work for layer in run.present if hasattr(layer, "work")]
        return work, run.case.figures(run.pipeline)

    for work, figures in run_ranks(check, 2):
        assert work[0] == 1.0 and work[1] < 0.3
        assert figures["routed_tokens"] == 0.25 and 0.0 < figures["predicted_rightly"] <= 1.0

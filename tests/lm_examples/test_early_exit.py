"""Tokens that hardly change any more exit: later blocks do not compute them."""

import pytest
import torch
from helpers.language_models import Run, model_of
from torch import nn

from lm_examples.cases.early_exit import EarlyExit, EarlyExitConfig, ExitBlock, Threshold
from lm_examples.gpt import Block


def case(threshold=0.9, **options):
    return EarlyExit(model_of(), EarlyExitConfig(**({"threshold": threshold, "end": 0, "first_exit": 0} | options)))


def test_the_threshold_follows_its_schedule():
    options = EarlyExitConfig(threshold=0.5, initial_threshold=0.9, start=10, end=30, every=5)
    thresholds = [options.threshold_at(step) for step in (0, 10, 14, 15, 20, 29, 30, 1000)]
    assert thresholds == pytest.approx([0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.5, 0.5])


def blocks_of(threshold, **shape):
    torch.manual_seed(0)
    model = model_of(**shape)
    dense = Block(model).double()
    block = ExitBlock(model, Threshold(threshold)).double()
    block.load_state_dict(dense.state_dict())
    return model, dense, block


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_the_others_are_computed_as_if_nobody_had_exited(share):
    """Gradients, too; a token that has exited only gets what its keys and values are worth to the others."""
    model, dense, block = blocks_of(2.0)
    x = torch.randn(3, model.context, model.hidden_size, dtype=torch.float64, requires_grad=True)
    exited = torch.rand(3, model.context) < share
    exited[0] = True  # a whole sequence
    dy = torch.randn(3, model.context, model.hidden_size, dtype=torch.float64)
    y, still = block(x, exited)
    expected = torch.where(exited[..., None], x, dense(x))
    assert torch.equal(still, exited)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(y, [x, *block.parameters()], dy, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(expected, [x, *dense.parameters()], dy)
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)


def test_only_tokens_that_have_not_exited_are_computed():
    _, _, block = blocks_of(2.0, hidden_size=16)
    rows = []
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda module, x, y, name=name: rows.append((name, y.shape[:-1].numel())))
    x, exited = torch.randn(4, 8, 16, dtype=torch.float64), torch.ones(4, 8, dtype=torch.bool)
    exited[1, :3] = exited[2, 5:] = False
    block(x, exited)
    assert rows == [("attention.out", 6), ("mlp.up", 6), ("mlp.down", 6)]
    products = 6 * (2 * 16**2 + 2 * 16 * 64) + 16 * 2 * 16**2 + 2 * 16 * 6 * 8
    assert block.work == pytest.approx(products / (4 * (8 * (4 * 16**2 + 2 * 16 * 64) + 2 * 16 * 36)))
    assert block.share_exited == 1 - 6 / 32
    rows.clear()
    y, _ = block(x, torch.ones_like(exited))
    assert rows == [] and block.work == 0.0 and torch.equal(x, y)


def test_tokens_whose_state_hardly_turns_exit_and_do_not_come_back():
    _, dense, block = blocks_of(0.9)
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    exited = torch.zeros(2, 8, dtype=torch.bool)
    exited[0, 3] = True
    y, now_exited = block(x, exited)
    cosine = nn.functional.cosine_similarity(dense(x), x, dim=-1)
    expected = (cosine > 0.9) | exited
    assert torch.equal(now_exited, expected) and exited.sum() < now_exited.sum() < now_exited.numel()
    assert torch.equal(y[0, 3], x[0, 3])


def test_work_falls_from_block_to_block_and_with_the_threshold(run_ranks):
    def check(rank, group):
        run = Run(group, case(0.6, start=2, end=3, every=1, first_exit=1)).train(2)
        blocks = [layer for layer in run.present if isinstance(layer, ExitBlock)]
        dense = [block.work for block in blocks], run.case.figures(run.pipeline)
        run.train(3)
        return dense, [block.work for block in blocks], run.has_changed, run.case.figures(run.pipeline)

    by_rank = run_ranks(check, 2)
    for (dense, figures), _, changed, _ in by_rank:
        assert dense == [1.0, 1.0] and figures == {"exited_tokens": 0.0, "exit_threshold": 1.0}
        assert changed == [False, False, True, False, False]
    work = [*by_rank[0][1], *by_rank[1][1]]
    assert work[:2] == [1.0, 1.0] and 0.9 > work[2] >= work[3]
    assert by_rank[0][-1]["exited_tokens"] == 0.0 and by_rank[1][-1]["exited_tokens"] > 0.3

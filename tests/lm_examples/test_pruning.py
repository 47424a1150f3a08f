"""The smallest weights of all stages are pruned: they are computed no more and leave with their optimizer state."""

import math

import numpy as np
import pytest
import torch
from helpers import language_models, pipelines
from helpers.language_models import BOUNDARIES, Run, batch, layers_of, model_of
from torch import nn

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.cases.pruning import Pruning, PruningConfig, global_top_k
from lm_examples.cases.sparse_linear import SparseLinear
from zeroresize.pipeline import LayerProfiler, move_layers

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")

SOON = {"start": 2, "end": 6, "every": 1}
#: Behind steps 1 to 6.
SPARSITIES = [0.0, 0.0, 0.5203125, 0.7875, 0.8859375, 0.9]


def case(**options):
    return Pruning(model_of(), PruningConfig(**(SOON | options)))


def test_the_schedule_is_that_of_eq_3_with_the_papers_figures():
    options = PruningConfig()
    sparsities = {step: options.sparsity_at(step) for step in range(0, 10000, 500)}
    sparsities = {step: round(one, 4) for step, one in sparsities.items() if one is not None}
    assert sparsities == {3000: 0.0, 4000: 0.5203, 5000: 0.7875, 6000: 0.8859, 7000: 0.9}
    other = PruningConfig(initial_sparsity=0.2, final_sparsity=0.5, start=0, end=4, every=2)
    assert [other.sparsity_at(step) for step in range(6)] == [pytest.approx(0.2), None, 0.4625, None, 0.5, None]


@pytest.mark.parametrize(("num_kept", "sparse_below"), [(60, 0.0), (60, 1.0), (20, 0.5), (1, 1.0), (0, 1.0)])
def test_products_and_gradients_are_those_of_a_masked_matrix(num_kept, sparse_below):
    torch.manual_seed(0)
    linear = SparseLinear(7, 13).double()
    weight = linear.weight.detach().clone()
    keep = torch.zeros(91, dtype=torch.bool)
    keep[torch.randperm(91)[:num_kept]] = True
    masked = (weight * keep.view(13, 7)).requires_grad_()
    linear.prune(keep, torch.optim.SGD(linear.parameters()), sparse_below)
    assert linear.is_sparse == (num_kept < sparse_below * 91) and linear.num_kept == num_kept
    assert linear.num_products == (num_kept if linear.is_sparse else 91)
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 5, 13, dtype=torch.float64)
    y = linear(x)
    dx, dw, db = torch.autograd.grad(y, (x, linear.weight, linear.bias), dy, materialize_grads=True)
    expected = nn.functional.linear(x, masked, linear.bias)
    expected_dx, expected_dw, expected_db = torch.autograd.grad(expected, (x, masked, linear.bias), dy)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(db, expected_db, rtol=1e-12, atol=1e-12)
    kept = expected_dw.flatten()[keep] if linear.is_sparse else expected_dw * keep.view(13, 7)
    torch.testing.assert_close(dw, kept, rtol=1e-12, atol=1e-12)


def test_pruning_by_and_by_keeps_the_right_weights_with_their_state():
    torch.manual_seed(0)
    linear = SparseLinear(9, 6)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.randn(4, 9)).square().sum().backward()
    optimizer.step()
    linear.bias.data.zero_()
    weight, state = linear.weight.detach().clone(), optimizer.state[linear.weight]["exp_avg"].clone()
    left = torch.ones(54, dtype=torch.bool)
    for num_kept in (40, 26, 12, 5):
        keep = torch.zeros(int(left.sum()), dtype=torch.bool)
        keep[torch.randperm(len(keep))[:num_kept]] = True
        left[left.clone()] = keep
        linear.prune(keep, optimizer, 0.5)
        assert linear.is_sparse == (num_kept < 27) and linear.weight.grad is None
        assert torch.equal(linear.candidates(), weight.flatten()[left])
        state_left = optimizer.state[linear.weight]["exp_avg"].flatten()
        assert torch.equal(state_left[state_left != 0], state.flatten()[left])
        assert torch.equal(linear(torch.eye(9)), (weight * left.view(6, 9)).T)
    assert {key: tuple(one.shape) for key, one in optimizer.state[linear.weight].items()} == {
        "step": (),
        "exp_avg": (5,),
        "exp_avg_sq": (5,),
    }


def masked_reference(model, num_steps):
    """Losses of plain dense training whose weights and their moments are masked, by one sort of all weights."""
    layers = layers_of(DynamicCase(model))
    optimizer = torch.optim.AdamW([one for layer in layers for one in layer.parameters()], lr=0.02)
    linears = [one for block in layers[1:-1] for one in block.modules() if isinstance(one, nn.Linear)]
    masks = [torch.ones_like(one.weight) for one in linears]
    losses = []
    for step in range(num_steps):
        tokens, following = batch(model, step)
        x = tokens
        for layer in layers:
            x = layer(x)
        loss = DynamicCase(model).loss(x, following)
        optimizer.zero_grad()
        loss.backward()
        for linear, mask in zip(linears, masks, strict=True):
            linear.weight.grad *= mask
        optimizer.step()
        losses.append(loss.item())
        whole = torch.cat([one.weight.detach().flatten() for one in linears])
        keep = torch.zeros_like(whole)
        kept = round((1.0 - SPARSITIES[min(step, 5)]) * len(whole))
        keep[whole.abs().sort(descending=True, stable=True).indices[:kept]] = 1.0
        parts = keep.split([one.weight.numel() for one in linears])
        masks = [part.view(one.weight.shape) for one, part in zip(linears, parts, strict=True)]
        for linear, mask in zip(linears, masks, strict=True):
            state = optimizer.state[linear.weight]
            for tensor in (linear.weight.data, state["exp_avg"], state["exp_avg_sq"]):
                tensor *= mask
    return losses


@pytest.mark.few(2)
@pytest.mark.parametrize("sparse_below", [0.0, 0.6])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_stages_train_as_a_dense_masked_model_wherever_layers_are(run_ranks, num_ranks, sparse_below):
    losses = language_models.check_that_moves_change_nothing(
        run_ranks, lambda: case(sparse_below=sparse_below), 9, num_ranks
    )
    torch.testing.assert_close(losses, masked_reference(model_of(), 9), rtol=1e-10, atol=1e-10)


def test_work_and_memory_fall_and_layers_lose_unequally(run_ranks):
    def profile_of(run):
        tokens, following = batch(run.case.model, 0)
        with LayerProfiler(run.pipeline, run.optimizer) as profiler:
            run.pipeline.step(tokens, target=following)
        return profiler.gather()

    def check(rank, group):
        run = Run(group, case(sparse_below=0.6)).train(1)
        dense = profile_of(run)
        assert {layer.work for layer in run.present if hasattr(layer, "work")} == {1.0}
        run.train(5)
        sparse = profile_of(run)
        kept = [sum(one.num_kept for one in layer.linears) for layer in run.present if hasattr(layer, "work")]
        work = [layer.work for layer in run.present if hasattr(layer, "work")]
        return dense, sparse, run.has_changed, run.case.figures(run.pipeline)["sparsity"], kept, work

    by_rank = run_ranks(check, 2)
    dense, sparse, changed, *_ = by_rank[0]
    assert changed == [False, True, True, True, True, True]
    of_block = 4 * 8 * 8 + 2 * 8 * 32
    kept = [one for *_, own, _ in by_rank for one in own]
    assert sum(kept) == round(0.1 * 4 * of_block) and len(set(kept)) > 1
    assert [figure for *_, figure, _, _ in by_rank] == [
        pytest.approx(1 - sum(kept_here) / (2 * of_block)) for *_, kept_here, _ in by_rank
    ]
    attention = 2 * 8 * 36 / 8  # multiplications for a token, of 4.5 pairs on average
    work = [one for *_, own in by_rank for one in own]
    assert work == pytest.approx([(one + attention) / (of_block + attention) for one in kept])
    for before, after in zip(dense.layers[1:5], sparse.layers[1:5], strict=True):
        assert after.weight_bytes < 0.6 * before.weight_bytes
        assert after.optimizer_bytes < 0.4 * before.optimizer_bytes
        assert after.gradient_bytes < 0.4 * before.gradient_bytes
    assert dense.layers[0].weight_bytes == sparse.layers[0].weight_bytes


def test_pruned_layers_move_there_and_back_bit_for_bit(run_ranks):
    """A receiver built the layer dense, or knows it with more weights than it has now."""

    def check(rank, group):
        run = Run(group, case(sparse_below=0.6)).train(4)
        linears = [one for layer in run.present if hasattr(layer, "linears") for one in layer.linears]
        assert any(one.is_sparse for one in linears)
        home, *others = BOUNDARIES[2]
        everything = []
        for _ in range(2):
            before = pipelines.held(run.pipeline, run.optimizer)
            sizes = 0
            for boundaries in (*others, home):
                report = move_layers(run.pipeline, boundaries, optimizer=run.optimizer)
                sizes += report.sent_bytes
            pipelines.assert_same(pipelines.held(run.pipeline, run.optimizer), before)
            everything.append(sizes)
            run.train(2)  # pruned further at home
        return everything

    for first, second in run_ranks(check, 2):
        assert second < first


#: Few different ones, so that many are equal, and such whose bit patterns differ in a digit only.
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1.0000001, 1.0 + 1e-12, 3.5, -3.5, 1e-45, 1e30, -math.inf, 2.0**-126]


def test_the_largest_numbers_of_several_ranks_are_those_that_one_with_all_would_choose(run_ranks):
    """With many ties; some ranks have no tensors, some empty ones."""

    def check(rank, group):
        random = np.random.default_rng(0)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for _ in range(20):
                sizes = [random.integers(0, 8, random.integers(0, 4)).tolist() for _ in range(3)]
                numbers = random.choice(random.choice(NUMBERS, random.integers(1, 5)), sum(map(sum, sizes)))
                numbers, k = torch.tensor(numbers, dtype=dtype), int(random.integers(0, len(numbers) + 1))
                keep = torch.zeros(len(numbers), dtype=torch.bool)
                keep[numbers.abs().sort(descending=True, stable=True).indices[:k]] = True
                flat = [size for of_rank in sizes for size in of_rank]
                begin = len([size for of_rank in sizes[:rank] for size in of_rank])
                here = slice(begin, begin + len(sizes[rank]))
                masks = global_top_k(list(numbers.split(flat))[here], k, group)
                assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in list(keep.split(flat))[here]]

    run_ranks(check, 3)

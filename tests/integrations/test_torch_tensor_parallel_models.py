"""The cases of torch's own examples of tensor parallelism, for converted models whose units have moved."""

import pytest
import torch
import torch.distributed as dist
from helpers.dtensor_comparisons import WIDTH, assert_same_with_moves, feed_forward, input_of, results, whole_of
from helpers.dtensor_models import ATTENTION, adamw, batch, mesh_of, split, train, whole_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.convert import balanced_layers
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segments import owned_segments

pytestmark = pytest.mark.slow

EXACT = zr.BalanceConfig(mode="exact")


class Scaled(nn.Module):
    """y = mlp(norm(x) · scale): x [B, S, WIDTH] → y [B, S, WIDTH]."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.mlp = norm(WIDTH), feed_forward()

    def forward(self, x, *, scale):
        return self.mlp(self.norm(x) * scale)


def styles_around(kind):
    """For a whole and a part of a Scaled module: what prepares inputs and outputs."""
    gathers = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    divides = {"output_layouts": (Replicate(),), "desired_output_layouts": (Shard(1),)}
    if kind == "keywords":  # the norm hands on a DTensor, as scale is one
        keywords = {
            "input_kwarg_layouts": {"scale": Replicate()},
            "desired_input_kwarg_layouts": {"scale": Replicate()},
        }
        return PrepareModuleInput(**keywords), {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(**gathers),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    around = {"norm": SequenceParallel(use_local_output=True), "mlp.down": RowwiseParallel()}
    if kind == "both":
        return None, {**around, "mlp": PrepareModuleInputOutput(**gathers, **divides)}
    return PrepareModuleOutput(**divides), {**around, "mlp": PrepareModuleInput(**gathers)}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["keywords", "both", "output"])
def test_modules_around_may_prepare_inputs_and_outputs(run_ranks, kind):
    def check(rank, group):
        mesh = mesh_of()
        whole_style, plan = styles_around(kind)
        host, model = (Scaled(nn.RMSNorm if kind == "both" else nn.LayerNorm).double() for _ in range(2))
        for module in (host, model):
            parallelize_module(module, mesh, {"mlp.up": ColwiseParallel(), **plan})
            if whole_style is not None:
                parallelize_module(module, mesh, whole_style)
        zr.convert(model)
        scale = torch.tensor(2.0, dtype=torch.float64)
        assert_same_with_moves(model, host, input_of("plain", mesh, Shard(1)), kind, scale=scale)

    run_ranks(check, 2)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_forwards_that_are_computed_again_are_the_hosts(run_ranks, sequence):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = feed_forward()

        def forward(self, x):
            return checkpoint(self.mlp, x, use_reentrant=False)

    def check(rank, group):
        mesh = mesh_of()
        layout = Shard(1) if sequence else Replicate()
        host, model = Recomputed(), Recomputed()
        for module in (host, model):
            plan = {"mlp.up": ColwiseParallel(input_layouts=layout), "mlp.down": RowwiseParallel(output_layouts=layout)}
            parallelize_module(module, mesh, plan)
        zr.convert(model)
        x = input_of("plain", mesh, layout)
        assert_same_with_moves(model, host, x)
        results(model, x)
        assert model.mlp.up.num_recomputations > 0

    run_ranks(check, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_a_loss_of_divided_logits_is_the_hosts(run_ranks, sequence):
    def losses(model, after=lambda step: None):
        values, optimizer = [], adamw(model)
        balancer = zr.Balancer(model, optimizer, EXACT) if balanced_layers(model) else None
        for step in range(3):
            with loss_parallel():
                logits, target = model(batch(step)), batch(step + 100)
                assert logits.placements == (Shard(2),)
                loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(whole_of(loss).item())
            if balancer is not None:
                balancer.step()
                after(balancer, step)
        return values

    def check(rank, group):
        mesh = mesh_of()
        models = []
        for _ in range(3):
            models.append(split(whole_model(), mesh, sequence=sequence, head={"use_local_output": False}))
        host, even, moved = models
        expected = losses(host)
        for module in (even, moved):
            zr.convert(module, segments=ATTENTION)
            assert module.head.stays_even == "it returns a DTensor (use_local_output=False)"
        assert losses(even, lambda balancer, step: None) == expected
        shares = {0: (3, 1)}
        values = losses(moved, lambda balancer, step: step in shares and balancer.move(shares[step]))
        assert values == pytest.approx(expected, abs=1e-9)

    run_ranks(check, 2)


def test_a_head_tied_to_the_embedding_is_left_alone_and_the_rest_moves(run_ranks):
    def tied():
        model = whole_model()
        model.head.weight = model.embed.weight
        return model

    whole = tied()
    expected = train(whole, adamw(whole), 4)

    def check(rank, group):
        model = split(tied(), mesh_of())
        model.head.weight = model.embed.weight  # parallelize_module has made two of it
        zr.convert(model, segments=ATTENTION)
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, EXACT)
        assert "head" not in balanced_layers(model) and model.head.weight is model.embed.weight
        values = train(model, optimizer, 4, lambda step: balancer.move((3, 1) if step < 2 else (1, 1)))
        assert values == pytest.approx(expected, abs=1e-9)

    run_ranks(check, 2)


def test_a_layer_that_shares_its_weight_stays_even(run_ranks):
    def check(rank, group):
        mesh = mesh_of()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        first, second = (parallelize_module(feed_forward(), mesh, plan) for _ in range(2))
        second.up.weight = first.up.weight
        model = nn.Sequential(first, second)
        zr.convert(model)
        assert owned_segments(balanced_layers(model)) == []
        for layer in (first.up, second.up):
            assert "shares its weight with another module" in layer.stays_even
        with pytest.raises(ValueError, match="shares its weight with another module"):
            other = nn.Sequential(*(parallelize_module(feed_forward(), mesh, plan) for _ in range(2)))
            other[1].up.weight = other[0].up.weight
            zr.convert(other, segments=[zr.Segment(["0.up"], "0.down")])

    run_ranks(check, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp"), ("replica", "model")], ids="-".join)
def test_the_tensor_parallel_dimension_of_a_mesh_is_balanced_alike_on_all_replicas(run_ranks, names):
    tensor = "model" if "model" in names else "tp"
    other = next(name for name in names if name != tensor)
    whole = whole_model()
    expected = train(whole, adamw(whole), 4)

    def check(rank, group):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = split(whole_model(), grid[tensor])
        zr.convert(model, segments=ATTENTION)
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, EXACT, data_parallel_group=grid[other])

        def average(*_):
            """What data parallelism does."""
            for parameter in model.parameters():
                dist.all_reduce(local_of(parameter.grad).div_(2), group=grid[other].get_group())

        def after(step):
            balancer.step()
            balancer.move((3, 1) if step < 2 else (1, 1))

        optimizer.register_step_pre_hook(average)
        assert train(model, optimizer, 4, after) == pytest.approx(expected, abs=1e-9)
        balancer.close()

    run_ranks(check, 4)


def test_inference_is_the_hosts_also_while_units_are_away(run_ranks):
    def check(rank, group):
        mesh = mesh_of()
        host, model = (split(whole_model(), mesh, sequence=True).eval() for _ in range(2))
        zr.convert(model, segments=ATTENTION)
        balancer = zr.Balancer(model, adamw(model), EXACT)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                expected = host(batch(0))
                assert torch.equal(model(batch(0)), expected)
            balancer.move((3, 1))
            with context():
                torch.testing.assert_close(model(batch(0)), expected, atol=1e-9, rtol=0)
            balancer.move((1, 1))
            with context():
                assert torch.equal(model(batch(0)), expected)

    run_ranks(check, 2)

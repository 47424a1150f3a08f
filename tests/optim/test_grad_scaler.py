"""A loss scaler for any mixture of plain tensors and DTensors: where gradients overflow on one rank, none steps."""

import pytest
import torch
import torch.distributed as dist
from helpers import pipelines
from helpers.dtensor_models import WIDTH, FeedForward, mesh_of
from helpers.pipelines import loss_of, pipeline_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr
from zeroresize.layers.local_parts import local_of
from zeroresize.pipeline import clip_grad_norm_

pytestmark = pytest.mark.same_ranks

SCALE = {"init_scale": 4.0, "growth_interval": 2}
#: Of each step: which gradient overflows, on one rank only.
SPOILED = [None, "up.weight", None, "first.weight", None, None, None]


class Mixed(nn.Module):
    """A plain layer before those that tensor parallelism divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), FeedForward(bias=True)
        self.double()

    def forward(self, x):
        return self.rest(self.first(x))


def trained(model, scaler, optimizer, spoils, clip):
    """(scale, whether a step was made) of each step, and the weights after all."""
    x, steps = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64), []
    for spoiled in SPOILED:
        scaler.scale(model(x).square().mean()).backward()
        if spoils and spoiled is not None:
            parameter = next(one for name, one in model.named_parameters() if name.endswith(spoiled))
            local_of(parameter.grad).view(-1)[0] = float("inf")
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model.parameters(), 0.01)
        before = model.first.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append((scaler.get_scale(), not torch.equal(before, model.first.weight)))
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    return steps, [one.detach() for one in whole]


CASES = [(torch.optim.SGD, False), (torch.optim.AdamW, True)]


def test_plain_tensors_and_dtensors_train_as_the_undivided_model(run_ranks):
    def check(rank, group):
        for kind, clips in CASES:
            options = {"lr": 0.1, "foreach": False}  # torch's own steps take no mixture at once
            model, whole = Mixed(), Mixed()
            styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model.rest, mesh_of(), styles)
            zr.convert(model)
            expected = trained(
                whole,
                torch.amp.GradScaler("cpu", **SCALE),
                kind(whole.parameters(), **options),
                True,
                nn.utils.clip_grad_norm_ if clips else None,
            )
            steps, weights = trained(
                model,
                zr.GradScaler("cpu", process_group=group, **SCALE),
                kind(model.parameters(), **options),
                rank == 1,
                zr.clip_grad_norm_ if clips else None,
            )
            assert steps == expected[0] and [is_made for _, is_made in steps] == [one is None for one in SPOILED]
            for weight, other in zip(weights, expected[1], strict=True):
                assert torch.allclose(weight, other, rtol=0.0, atol=1e-12)

    run_ranks(check, 2, timeout_s=60)


def test_all_stages_of_a_pipeline_skip_together_though_only_the_last_one_scales(run_ranks):
    def check(rank, group):
        scaler = zr.GradScaler("cpu", **SCALE)  # of all ranks of the job
        pipeline = pipeline_of(group, loss=lambda outputs, target: scaler.scale(loss_of(outputs, target)))
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        plain = pipeline_of(group)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        made = []
        for step in range(5):
            pipelines.accumulate(pipeline, step)
            if step == 1 and rank == 0:
                next(one for one in pipeline.parameters() if one.grad is not None).grad.view(-1)[0] = float("nan")
            scaler.unscale_(optimizer)
            clip_grad_norm_(pipeline, 0.05)
            before = [one.detach().clone() for one in pipeline.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            now = list(pipeline.parameters())
            made.append(any(not torch.equal(one, other) for one, other in zip(before, now, strict=True)))
            if step != 1:
                pipelines.train_step(plain, plain_optimizer, step, max_norm=0.05)
                plain_optimizer.zero_grad()
        for weight, other in zip(pipeline.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(weight, other, rtol=0.0, atol=1e-12)
        return made, scaler.get_scale()

    for made, scale in run_ranks(check, 2, timeout_s=60):
        assert made == [True, False, True, True, True] and scale == 4.0


def test_ranks_without_gradients_and_fused_optimizers_take_part(run_ranks):
    def check(rank, group):
        scaler = zr.GradScaler("cpu", **SCALE)
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        for is_spoiled in (True, False):
            weight.grad = None if rank == 0 else torch.full((3,), float("inf") if is_spoiled else 4.0)
            before = weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, weight) == (is_spoiled or rank == 0)
        half = nn.Parameter(torch.ones(3, dtype=torch.float16))
        half.grad = torch.ones_like(half) if rank else None
        with pytest.raises(ValueError, match="gradients are in float16 on some rank"):
            scaler.unscale_(torch.optim.SGD([half], lr=1.0))
        saved = scaler.state_dict()
        other = zr.GradScaler("cpu", init_scale=1.0)
        other.load_state_dict(saved)
        assert other.get_scale() == scaler.get_scale() == 2.0
        alone = zr.GradScaler("cpu", enabled=False)
        assert alone.scale(weight) is weight
        others = dist.new_group([1 - rank])
        pair = [dist.new_group([0]), dist.new_group([1])]
        with pytest.raises(ValueError, match="process_group does not hold this rank"):
            zr.GradScaler("cpu", process_group=pair[1 - rank])
        del others

    run_ranks(check, 2, timeout_s=60)

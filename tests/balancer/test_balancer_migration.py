"""Mode "mig" on real ranks: nothing changes but who computes what."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.processes import for_each
from helpers.virtual_training import FEATURES, Run
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow


def trained(group, steps=5, **config):
    run = Run(group, **config)
    return run, run.steps(steps)


@pytest.mark.parametrize("settings", [{"mode": "mig"}, {"mode": "semi", "budget": 0.0}], ids=["mig", "semi"])
def test_beside_data_parallelism_training_is_exact(run_ranks, settings):
    """Two replicas of two tensor-parallel ranks; each group balances for itself, gradients are averaged when whole."""

    def train(rank, group):
        tensor_parallel = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        data_parallel = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        trained = []
        for config in ({"mode": "off"}, settings):
            run = Run(tensor_parallel, update_every=5, **config)
            run.model = DistributedDataParallel(run.model, process_group=data_parallel)
            run.x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(rank // 2))
            run.time.chi = 4.0 if rank == 1 else 1.0
            trained.append((run.steps(30), [weight.detach().clone() for weight in run.model.parameters()]))
        return *trained, bool(run.balancer.plan.loans)

    for rank, ((expected, whole), (losses, weights), lends) in enumerate(run_ranks(train, 4)):
        assert lends == (rank < 2)
        assert losses == pytest.approx(expected, rel=1e-4)
        for weight, other in zip(whole, weights, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-4)


def forward_without_gradients(run):
    with torch.no_grad():
        run.model(run.x)


def recompute(run):
    checkpoint(run.model, run.x.clone().requires_grad_(), use_reentrant=True).square().mean().backward()
    run.optimizer.zero_grad()


def test_a_model_may_be_loaded_when_its_balancer_has_been_made(run_ranks):
    """With a forced ratio loans are in force at once, and whoever loads pretrained weights has no balancer's state."""

    @for_each([(use,) for use in (lambda _: None, forward_without_gradients, recompute)])
    def train(rank, group, use_first):
        pretrained, _ = trained(group, mode="off")
        weights = copy.deepcopy(pretrained.model.state_dict())
        lends = {"mode": "mig", "ratio": 0.5, "ranks": [0]}
        outcomes = []
        for config in ({"mode": "off"}, lends):
            run = Run(group, **config)
            run.model.load_state_dict(weights)
            use_first(run)
            outcomes.append(run.steps(3))
        assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-5)

    run_ranks(train, 2)

"""Migration beside what else uses autograd: hooks that meet other ranks, frozen weights, compiled models, replicas."""

import pytest
import torch
import torch.distributed as dist
from helpers.virtual_training import Run
from torch._dynamo import compiled_autograd

pytestmark = pytest.mark.slow

LENDING = {"mode": "mig", "ratio": 0.5, "ranks": [0]}


def test_replicas_accumulate_gradients_in_the_same_order_whatever_they_lend(run_ranks):
    """Data parallelism that fills its buckets in the order of arrival would mix them up otherwise."""

    def train(rank, group):
        replica = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        run, order = Run(replica, mode="mig", update_every=5), []
        for name, parameter in run.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        run.time.chi = 4.0 if rank == 1 else 1.0
        run.steps(30)
        return bool(run.balancer.plan.loans), order[-4:]

    results = run_ranks(train, 4)
    assert [lends for lends, _ in results] == [True, True, False, False]
    assert all(order == results[0][1] for _, order in results)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{"mode": "semi"}, *(pytest.param(config, marks=pytest.mark.slow) for config in ({"mode": "mig"}, LENDING))],
    ids=str,
)
def test_compiled_autograd_is_refused_in_the_first_backward_where_columns_may_migrate(run_ranks, config):
    def train(rank, group):
        run = Run(group, **config)
        refused = compiled_autograd._enable(torch.compile(backend="eager"))
        with refused, pytest.raises(RuntimeError, match=r"'mig', 'semi'.*compiled autograd.*only prunes"):
            run.steps(1)
        run.optimizer.zero_grad()
        run.steps(2)
        run.balancer.close()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            run.model(run.x).sum().backward()

    run_ranks(train, 2, timeout_s=90)

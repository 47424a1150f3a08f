"""Migration beside what else uses autograd: hooks that meet other ranks, frozen weights, compiled models, replicas."""

import pytest
import torch
import torch.distributed as dist
from helpers.virtual_training import Run
from torch._dynamo import compiled_autograd

pytestmark = pytest.mark.slow

LENDING = {"mode": "mig", "ratio": 0.5, "ranks": [0]}


@pytest.mark.few(2)
@pytest.mark.parametrize("migration_transport", ["broadcast-reduce", "scatter-gather"])
@pytest.mark.parametrize("layer", ["up", "down"])
def test_weights_may_be_frozen_and_unfrozen_while_they_are_lent(run_ranks, migration_transport, layer):
    def train(rank, group):
        outcomes = []
        for config in ({"mode": "off"}, {**LENDING, "migration_transport": migration_transport}):
            run = Run(group, **config)
            losses = []
            for is_trained in (True, False, True):
                getattr(run.model, layer).weight.requires_grad_(is_trained)
                losses += run.steps(2)
            outcomes.append(losses)
        return outcomes

    for expected, losses in run_ranks(train, 2, timeout_s=30):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_hooks_of_gradients_may_meet_the_other_ranks(run_ranks, num_ranks):
    """A norm of every whole parameter, summed over the group when its gradient is there."""

    def train(rank, group):
        outcomes = []
        for config in ({"mode": "off"}, LENDING):
            run, norms = Run(group, **config), []

            def hook(parameter, norms=norms):
                square = parameter.grad.square().sum()
                dist.all_reduce(square, group=group)
                norms.append((tuple(parameter.shape), square.item()))

            for parameter in run.model.parameters():
                parameter.register_post_accumulate_grad_hook(hook)
            run.steps(2)
            outcomes.append(sorted(norms))
        return outcomes

    for expected, norms in run_ranks(train, num_ranks, timeout_s=30):
        assert [shape for shape, _ in norms] == [shape for shape, _ in expected]
        assert [norm for _, norm in norms] == pytest.approx([norm for _, norm in expected], rel=1e-3)


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


def test_beside_replicas_a_layer_without_loans_computes_with_the_weight_that_it_has(run_ranks):
    """Also where that was put there through ``.data``, as loading and moving do."""

    def train(rank, group):
        replica = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        run, values = Run(replica, mode="mig"), []
        for value in (0.5, 1.5):
            run.model.up.weight.data = torch.full_like(run.model.up.weight, value)
            training, evaluated = run.model.up(run.x), run.model.eval().up(run.x)
            run.model.train()
            values.append(torch.equal(training, evaluated))
            training.sum().backward()
            values.append(bool(run.model.up.weight.grad.ne(0).any()))
        return values

    assert run_ranks(train, 4) == [[True] * 4] * 4


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

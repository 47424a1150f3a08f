"""Split layers in compiled graphs: one graph, the results of the layers as they are, and few compilations."""

import pytest
import torch
from helpers.compiled import HIDDEN, assert_same_training, batch, compiled, feed_forwards, train, weights_of
from helpers.on_ranks import gathered, on_ranks
from helpers.parallel_layers import equal_loans, lend
from helpers.virtual_training import Run
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zeroresize as zr
from zeroresize.kernels.probe import ProductProbe
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.plan.layer import LayerPlan

pytestmark = pytest.mark.same_ranks


def prune(model, num_pruned, imputation="zero"):
    """Another plan in every layer."""
    for block in model:
        for layer in (block.gate, block.up, block.down):
            layer.plan = LayerPlan.from_pruned(torch.arange(0, 2 * num_pruned, 2), layer.num_columns, "cpu", imputation)
            layer.plan = layer.plan if num_pruned else None


class Counts(ProductProbe):
    sees_evaluation = False

    def __init__(self):
        self.begun = self.ended = self.gemms = 0

    def product_begins(self):
        self.begun += 1

    def product_ends(self):
        self.ended += 1

    def gemm_begins(self, operands):
        self.gemms += 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2, timeout_s=110)
def test_changed_plans_compile_nothing_and_results_are_those_of_the_layers(rank, group, *, backend):
    torch._dynamo.reset()
    x, outcomes = batch(), []
    for compiles in (False, True):
        model = feed_forwards(group)
        call, counter = compiled(model, backend) if compiles else (model, None)
        probe, seen = Counts(), []
        layer = model[1].down
        layer.probes.add_outermost(probe)
        layer.watch_input = lambda x, seen=seen: seen.append(x.sum().item())
        layer.watch_forward = lambda *what, seen=seen: seen.append(what)
        layer.watch_start = lambda _, seen=seen: seen.append("start")
        plans = [(1, "zero"), (2, "average"), (0, "zero"), (3, "zero")]
        losses = train(call, model, 5, x, lambda step, model=model, plans=plans: prune(model, *plans[step % 4]))
        counts = probe.begun, probe.ended, probe.gemms, layer.num_tokens, layer.num_forwards
        outcomes.append(((losses, weights_of(model)), seen, counts))
    assert counter.frame_count == 1
    assert counts == (15, 15, 15, 50, 5)
    (expected, watched, expected_counts), (computed, seen, counts) = outcomes
    assert counts == expected_counts
    assert seen == watched or backend != "aot_eager"
    assert_same_training(computed, expected, backend)
    first, second = gathered(group, computed[0])
    assert first == second and len(set(first)) == 5


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2, timeout_s=110)
def test_moves_compile_twice_at_most_and_leave_the_losses(rank, group, *, backend):
    shares = [(3, 1), (1, 3), (1, 1), (2, 1), (1, 2), (1, 1)]

    torch._dynamo.reset()
    outcomes = []
    for compiles in (False, True):
        model = feed_forwards(group)
        call, counter = compiled(model, backend) if compiles else (model, None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
        sizes = []

        def after(step, model=model, balancer=balancer, sizes=sizes):
            balancer.step()
            balancer.move(shares[step])
            sizes.append(model[0].up.weight.shape[0])

        outcomes.append(train(call, model, 6, batch(), after, optimizer))
        balancer.close()
    results = gathered(group, (outcomes, sizes, counter.frame_count))
    for (expected, losses), _, num_compilations in results:
        assert num_compilations <= 3
        assert losses == (expected if backend == "aot_eager" else pytest.approx(expected, rel=1e-12))
    assert [sum(sizes) for sizes in zip(*(sizes for _, sizes, *_ in results), strict=True)] == [HIDDEN] * 6
    assert len(set(results[0][1])) == 5


@on_ranks(2, timeout_s=110)
def test_graphs_keep_the_order_of_products(rank, group):
    """Also of those that do not need each other, as ranks with other shapes might order them otherwise."""

    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) + str(node.args) for node in graph.graph.nodes])
        return graph.forward

    model = feed_forwards(group)[:1]
    torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(batch()).sum().backward()
    assert [sum("with_effects" in node and "zeroresize" in node for node in graph) for graph in graphs] == [3, 3]


@pytest.mark.slow
@on_ranks(2, timeout_s=110)
def test_a_backward_follows_the_plan_of_its_forward(rank, group):
    torch._dynamo.reset()
    gradients = []
    for num_changes in (0, 7, 9):
        model = feed_forwards(group)
        prune(model, 2)
        call, _ = compiled(model)
        y = call(batch())
        for number in range(num_changes):
            prune(model, 1 + number % 2)
            call(batch())
        if num_changes == 9:
            with pytest.raises(RuntimeError, match=r"more than 8 changes of plan.*before balancer.step"):
                y.sum().backward()
        else:
            y.sum().backward()
            gradients.append(model[0].gate.weight.grad)
    assert torch.equal(*gradients)


def layers_of(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BalancedLinear)}


def train_with_loans(model, group, call, transport="broadcast-reduce"):
    """Losses and weights of steps in which rank 0 lends, nobody, rank 1, and nobody; plans come and go, too."""
    lender, held = None, []

    def after(step):
        nonlocal lender
        if step in (0, 3):
            lender = lend(layers_of(model), group, equal_loans({step // 3: 0.5}, 2), transport, step, lender)
        elif step in (2, 5):
            lender.take_back()
            prune(model, step // 5)
        elif lender is not None:
            lender.send_weights()
        held.append(lender.bytes_held)

    losses = train(call, model, 7, batch().to(model[0].up.weight.dtype), after)
    assert not any(layer.forwards._lent for layer in layers_of(model).values())
    return (losses, weights_of(model)), held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "transport", "is_cast"),
    [
        ("aot_eager", "broadcast-reduce", False),
        ("aot_eager", "scatter-gather", True),
        pytest.param("inductor", "broadcast-reduce", False, marks=pytest.mark.slow),
    ],
)
@on_ranks(2, timeout_s=110)
def test_loans_that_begin_and_end_compile_nothing_and_results_are_those_of_the_layers(
    rank, group, *, backend, transport, is_cast
):
    torch._dynamo.reset()
    outcomes = []
    for compiles in (False, True):
        model = feed_forwards(group)
        model = model.float() if is_cast else model
        call, counter = compiled(model, backend) if compiles else (model, None)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            outcomes.append(train_with_loans(model, group, call, transport))
    assert counter.frame_count == 1
    (expected, held), (computed, our_held) = outcomes
    assert any(our_held) and all(ours <= most for ours, most in zip(our_held, held, strict=True))
    assert_same_training(computed, expected, backend)
    first, second = gathered(group, computed[0])
    assert first == second and len(set(first)) == 7


@pytest.mark.slow
@on_ranks(2, timeout_s=110)
def test_a_graph_tells_weights_that_changed_while_they_were_lent_and_forwards_that_were_copied(rank, group):
    torch._dynamo.reset()
    model = feed_forwards(group)
    config = zr.BalanceConfig(mode="mig", ratio=0.5, ranks=[0])
    balancer = zr.Balancer(model, torch.optim.AdamW(model.parameters()), config)
    call, _ = compiled(model)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        y = call(batch())
    with pytest.raises(RuntimeError, match=r"layer 1\.down: hooks of saved tensors have copied"):
        y.sum().backward()
    changed, lent = r"weight of layer 0\.gate changed after its columns were lent", model[0].gate.weight
    model[0].gate.weight = nn.Parameter(lent.detach().clone())
    with pytest.raises(RuntimeError, match=changed):
        call(batch())
    model[0].gate.weight = lent
    with torch.no_grad():
        lent.mul_(2.0)
    with pytest.raises(RuntimeError, match=changed):
        call(batch())
    balancer.close()


@pytest.mark.parametrize("mode", ["semi", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("mig", "exact"))])
@on_ranks(2, timeout_s=110)
def test_what_a_balancer_decides_compiles_nothing(rank, group, *, mode):
    """In training and in evaluation; ``chi`` of the second rank rises, falls, and rises again."""
    torch._dynamo.reset()
    outcomes = []
    for compiles in (False, True):
        run = Run(group, mode=mode)
        model, counter, values, plans = run.model, None, [], set()
        if compiles:
            run.model, counter = compiled(run.model)
        for number, chi in enumerate((1.0, 4.0, 1.0, 2.0, 8.0, 1.0)):
            run.time.chi = chi if rank == 1 else 1.0
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                values += run.steps(6)
                model.eval()
                with torch.no_grad():
                    values.append(run.model(run.x).sum().item())
                model.train()
            plan = run.balancer.plan
            plans.add((tuple((loan.owner, loan.share) for loan in plan.loans), *(each.pruned for each in plan.ranks)))
        run.balancer.close()
        outcomes.append(((values, weights_of(model)), plans))
    (expected, expected_plans), (computed, plans) = outcomes
    assert plans == expected_plans and len(plans) > 3
    assert_same_training(computed, expected)
    assert counter.frame_count == 2  # one of training and one of evaluation


def counted(function):
    """FLOPs by operator."""
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(operator): number for operator, number in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2, timeout_s=110)
def test_flops_are_of_the_columns_that_a_rank_multiplies(rank, group, *, backend):
    """Of 10 tokens, 6 columns, 12 rows: 2 · 10 · 6 · 12 = 1440 a product."""
    torch._dynamo.reset()
    model = feed_forwards(group)[:1]
    gate, x = model[0].gate, batch().requires_grad_()
    call, _ = compiled(model, backend)
    call(x)  # a graph has the formulas registered

    def products(x=x, weight=gate.weight, bias=gate.bias, number=gate.forwards.number):
        y, _ = torch.ops.zeroresize.column_products(x, weight, bias, number, gate.training, True)
        y.sum().backward()

    def of_gate(forward, backward):
        names = "zeroresize.column_products", "zeroresize.column_products_backward"
        return dict(zip(names, (forward, backward), strict=True))

    assert counted(products) == of_gate(1440, 2 * 1440)
    prune(model, 2)
    assert counted(products) == of_gate(960, 2 * 960)
    model.eval()
    assert counted(products) == of_gate(1440, 2 * 1440)
    model.train()
    lend(layers_of(model), group, equal_loans({0: 0.5}, 2), "broadcast-reduce")
    computed = 720 if rank == 0 else 2160
    assert counted(products) == of_gate(computed, 2 * computed)
    assert sum(counted(lambda: model(x).sum().backward()).values()) == 9 * computed
    if backend == "inductor":
        loss = call(x).sum()
        of_graph = counted(loss.backward)
        assert of_graph == {
            "zeroresize.column_products_backward": 4 * computed,
            "zeroresize.row_products_backward": 2 * computed,
        }
    of_shapes = FakeTensorMode()
    fake = [of_shapes.from_tensor(each) for each in (x, gate.weight, gate.bias, gate.forwards.number)]
    with of_shapes:
        assert counted(lambda: products(*fake)) == of_gate(1440, 2 * 1440)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.slow
@on_ranks(2, timeout_s=110)
def test_a_checkpointed_part_is_left_out_of_graphs_by_name_and_may_be_one(rank, group):
    torch._dynamo.reset()
    outcomes = []
    for compiles in ("nothing", "all", "parts"):
        model = call = Checkpointed(*feed_forwards(group))
        if compiles == "all":
            with pytest.raises(RuntimeError, match="layers in a checkpointed part of a graph: compile what"):
                compiled(model)[0](batch())
            call, _ = compiled(model, fullgraph=False)
        elif compiles == "parts":
            parts, counters = zip(*map(compiled, model), strict=True)
            call = Checkpointed(*parts)
        outcomes.append(train_with_loans(model, group, call)[0])
    assert [counter.frame_count for counter in counters] == [1, 1]
    for outcome in outcomes[1:]:
        assert_same_training(outcome, outcomes[0])

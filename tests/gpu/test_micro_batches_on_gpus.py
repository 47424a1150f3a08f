"""Planned micro-batches on GPUs by NCCL: costs measured there, a slow rank balanced, beside the undivided model."""

import pytest
import torch
from helpers.devices import device_here
from helpers.micro_batches import MAKE, SIZES, Undivided, layers_of, samples_of
from helpers.sample_lengths import Lengths

from lm_examples.layers import summed_loss
from zeroresize.microbatch.balancer import MicroBatchBalancer
from zeroresize.microbatch.measuring import ProfiledShapes, measure_model
from zeroresize.microbatch.planners import RunPlanners
from zeroresize.microbatch.planning_process import IterationPlanner
from zeroresize.microbatch.store import share_store
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.plan import PlanningOptions
from zeroresize.strategy.model import SwitchableModel

pytestmark = pytest.mark.gpu
NUM_STEPS = 30


def train(rank, group, kind, degrees, chi):
    """Losses, those of the undivided model, and what was changed; from the sixth step on rank 0 is χ times as slow."""
    device, strategy, records = device_here(), Strategy(*degrees), []
    layers, slow = layers_of(kind).to(device), {"chi": 1.0}

    def hold_up(layer, arguments, output):
        if not (output[0] if isinstance(output, tuple) else output).is_meta:
            torch.cuda._sleep(int(2e6 * (slow["chi"] - 1.0)))  # cycles, of a kernel that waits

    for layer in layers:
        layer.register_forward_hook(hold_up)
    model = SwitchableModel(layers, strategies=[strategy], process_group=group, device=device)
    shapes = ProfiledShapes(SIZES[kind], 16, (32,) * (len(SIZES[kind]) - 1), shortest=8, most_tokens=512)
    table = measure_model(model, MAKE[kind][1].hollow, shapes, loss=summed_loss)
    assert table.device == torch.cuda.get_device_name(device)
    boundaries = strategy.partition(len(table.kinds)).boundaries
    planner = IterationPlanner(Lengths(kind, 24), table, boundaries, PlanningOptions(strategy.dp))
    store = share_store(group)
    planners = RunPlanners(planner, store, group, device, last=NUM_STEPS - 1)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=1e-2, eps=1e-4)
    trainer = MicroBatchTrainer(
        model,
        optimizer,
        planners,
        batch_from=MAKE[kind][1].of,
        hollow=MAKE[kind][1].hollow,
        sizes=SIZES[kind],
        loss=summed_loss,
        grad_clip=0.5,
    )
    balancer = MicroBatchBalancer(trainer, planners, on_change=records.append)
    whole, losses, expected = Undivided(kind), [], []
    for step in range(NUM_STEPS):
        slow["chi"] = chi if rank == 0 and step >= 5 else 1.0
        lengths = planner.lengths_of(step)
        samples = samples_of(kind, lengths, step)
        losses.append(balancer.step(samples, lengths).loss)
        expected.append(whole.step(samples, lengths)[0])
    balancer.close()
    planners.close()
    store.close()
    return losses, expected, [record.what for record in records]


@pytest.mark.parametrize(("kind", "degrees"), [("gpt", (1, 1, 2)), ("t5", (2, 1, 1))])
def test_losses_are_those_of_the_undivided_model_while_a_slow_rank_gets_less(run_on_gpus, kind, degrees):
    for losses, expected, changes in run_on_gpus(train, 2, kind, degrees, 3.0):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert changes

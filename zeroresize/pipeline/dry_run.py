"""A dry run: which layers the stages of a pipeline would have, and how long and how full they would be; without a job.

``L`` layers, ``S`` stages, ``M`` micro-batches. What layers cost is known from a profile, such as ``layers`` of a
:class:`~zeroresize.pipeline.ProfileRecord` that a run has written, or counted on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zeroresize.measure.memory_meter import SavedBytes
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.division import PipelineLoad
from zeroresize.policy.pipeline.profiles import LayerCosts, LayerProfile, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import By, RebalancingRule
from zeroresize.runtime.schedules import Schedule
from zeroresize.utils.checked import checked, integer, real


@dataclass(frozen=True)
class PipelinePlan:
    """Tells what to expect of a pipeline.

    Attributes:
        boundaries: [S + 1]; stage ``s`` has the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``.
        stage_s: [S] seconds that each stage computes in a step.
        stage_bytes: [S] of weights, gradients, optimizer state, and the activations that the schedule keeps at once.
        step_s, bubble_ratio: of a step, simulated without messages.
    """

    boundaries: tuple[int, ...]
    stage_s: tuple[float, ...]
    stage_bytes: tuple[int, ...]
    step_s: float
    bubble_ratio: float


@checked(
    num_stages=integer(1),
    num_microbatches=integer(1),
    speeds=real(above=0.0),
    memory_limits=real(above=0.0, or_infinite=True),
)
def plan_pipeline(
    layers: Sequence[LayerProfile],
    num_stages: int,
    *,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    by: By = "time",
    speeds: Sequence[float] | None = None,
    memory_limits: Sequence[float] | None = None,
    boundaries: Sequence[int] | None = None,
) -> PipelinePlan:
    """Return the boundaries that a :class:`~zeroresize.pipeline.PipelineBalancer` would choose, and what to
    expect of them; pure.

    Args:
        layers: [L] seconds of all micro-batches on a device of speed 1, and bytes.
        by: what is divided evenly.
        speeds: [S] of the stages' devices; None for devices of speed 1.
        memory_limits: [S] bytes; None for none.
        boundaries: [S + 1] to be told of instead of the best ones; they need not fit into the limits.

    Raises:
        ValueError: for fewer layers than stages, or no micro-batch; for speeds, limits or boundaries that do not fit;
            if no boundaries fit into the limits.
    """
    uniform = Partition.uniform(len(layers), num_stages)
    of_time = PipelineLoad.of([one.forward_s + one.backward_s for one in layers], num_stages, speeds=speeds)
    limits = None if memory_limits is None else tuple(map(float, memory_limits))
    rule = RebalancingRule(by, schedule, num_microbatches, 1, 0.0, limits)
    costs = LayerCosts(
        tuple(one.forward_s for one in layers),
        tuple(one.backward_s for one in layers),
        tuple(of_time.speeds.tolist()),
        uniform.boundaries,
    )
    profile = PipelineProfile(tuple(layers), (0.0,) * num_stages, uniform.boundaries)
    if boundaries is None:
        partition = rule.wanted(costs, profile)
    else:
        partition = Partition.of(boundaries, len(layers), num_stages)
    step = rule.simulated(costs, partition)
    stage_bytes = []
    for stage in range(num_stages):
        kept = num_microbatches if schedule == "gpipe" else min(num_stages - stage, num_microbatches)
        stage_layers = [layers[number] for number in partition.layers_of(stage)]
        stage_bytes.append(sum(one.bytes_at_rest + kept * one.activation_bytes for one in stage_layers))
    return PipelinePlan(
        partition.boundaries,
        tuple(of_time.stage_times(partition).tolist()),
        tuple(stage_bytes),
        step.step_s,
        step.bubble_ratio,
    )


@checked(num_microbatches=integer(1), flops_per_s=real(above=0.0), states_per_parameter=integer(0))
def profiles_on_meta(
    layers: Sequence[nn.Module],
    *inputs: Tensor,
    num_microbatches: int,
    flops_per_s: float,
    states_per_parameter: int = 2,
) -> list[LayerProfile]:
    """Count what layers would cost by running them once on tensors without memory.

    Seconds are floating-point operations of matrix products and convolutions over ``flops_per_s``; what else layers do
    takes no time here.

    Args:
        layers: [L] on the meta device, called one after another.
        inputs: of one micro-batch, on the meta device.
        flops_per_s: of one device.
        states_per_parameter: how many tensors like it an optimizer keeps; 2 for Adam.

    Raises:
        ValueError: for layers or inputs that are not on the meta device, and a speed that is not above 0.
    """
    for number, layer in enumerate(layers):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if not tensor.is_meta:
                raise ValueError(
                    f"layers.{number}.{name} is on {tensor.device}: build the layers under torch.device('meta')"
                )
    if not all(one.is_meta for one in inputs):
        raise ValueError('inputs are not on the meta device: give torch.empty(shape, device="meta")')
    profiles, tensors = [], inputs
    for layer in layers:
        tensors = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in tensors)
        saved = SavedBytes(layer, tensors)
        with FlopCounterMode(display=False) as forward:
            outputs = layer(*tensors)
        saved.end()
        outputs = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        parameters = [one for one in layer.parameters() if one.requires_grad]
        wanted = [*parameters, *(one for one in tensors if one.requires_grad)]
        learning = [one for one in outputs if one.requires_grad]
        with FlopCounterMode(display=False) as backward:
            if wanted and learning:
                torch.autograd.grad(learning, wanted, [torch.empty_like(one) for one in learning], allow_unused=True)
        gradient_bytes = sum(one.nbytes for one in parameters)
        profiles.append(
            LayerProfile(
                num_microbatches * forward.get_total_flops() / flops_per_s,
                num_microbatches * backward.get_total_flops() / flops_per_s,
                sum(one.nbytes for one in (*layer.parameters(), *layer.buffers())),
                gradient_bytes,
                states_per_parameter * gradient_bytes,
                saved.total,
            )
        )
        tensors = outputs
    return profiles

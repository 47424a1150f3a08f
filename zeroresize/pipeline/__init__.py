"""Pipelines whose layers move between stages: train, measure each layer, move, train on.

- :class:`Pipeline` is one rank's stage: ``step`` and ``evaluate`` run batches of any shape, by 1F1B or GPipe.
- :class:`LayerProfiler` measures seconds and bytes of every layer in one iteration, for all ranks.
- :func:`move_layers` gives the stages other layers, between two steps, all or nothing.
- :func:`moving_during_backward` does it while the stages compute.
- :class:`PipelineBalancer` measures and moves while training goes on, where it pays.
- :func:`repack` leaves the pipeline fewer stages and releases the other ranks.
- ``zr.sharded_state_dict(pipeline, optimizer)`` is a checkpoint, for any number of stages.
- :func:`clip_grad_norm_` clips by the norm of all stages' gradients.
- :func:`plan_pipeline` tells without a job what to expect, of layers that were profiled or are on the meta device.

Stage ``s`` has the layers from ``boundaries[s]`` up to ``boundaries[s + 1]``. A program, by
``torchrun --nproc-per-node 2 program.py``::

    import logging

    import torch
    import torch.distributed as dist
    from torch import nn

    from zeroresize.pipeline import Pipeline, PipelineBalancer

    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    heavy = [nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256)) for _ in range(4)]
    pipeline = Pipeline(
        [*blocks, *heavy], nn.functional.mse_loss, num_microbatches=4, process_group=dist.group.WORLD
    )
    optimizer = torch.optim.AdamW(pipeline.parameters())
    balancer = PipelineBalancer(pipeline, optimizer, profile_every=20)
    for step in range(100):
        x = torch.randn(64, 256)
        optimizer.zero_grad()
        with balancer.step():
            loss = pipeline.step(x, target=x)  # on the last stage; None on the others
        optimizer.step()
    print(f"stage {pipeline.stage} has layers {list(pipeline.present)}")
    dist.destroy_process_group()
"""

from zeroresize.pipeline.dry_run import PipelinePlan, plan_pipeline, profiles_on_meta
from zeroresize.pipeline.measuring import LayerProfiler
from zeroresize.pipeline.moving_layers import LayerMoveReport, MoveDuringBackward, move_layers, moving_during_backward
from zeroresize.pipeline.pipeline import Pipeline, clip_grad_norm_
from zeroresize.pipeline.pipeline_balancer import PipelineBalancer
from zeroresize.pipeline.records import ProfileRecord
from zeroresize.pipeline.repacking import Release, Repack, RepackingReport, repack
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import RebalancingProposal
from zeroresize.telemetry import ChangeRecord

__all__ = [
    "ChangeRecord",
    "LayerMoveReport",
    "LayerProfile",
    "LayerProfiler",
    "MoveDuringBackward",
    "Pipeline",
    "PipelineBalancer",
    "PipelinePlan",
    "PipelineProfile",
    "ProfileRecord",
    "RebalancingProposal",
    "Release",
    "Repack",
    "RepackingReport",
    "clip_grad_norm_",
    "move_layers",
    "moving_during_backward",
    "plan_pipeline",
    "profiles_on_meta",
    "repack",
]

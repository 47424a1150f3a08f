"""A LLaMA-like model on the ranks that torchrun started, as torch's styles or transformers' plan split it."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr
from scripts.bench.common import TimedSteps, pin_to_core
from scripts.bench.devices import join_ranks

HOSTS = ("dtensor", "transformers")
_WORDS = 512


@dataclass
class HostTrainer(TimedSteps):
    """A model with its optimizer and one fixed batch.

    Attributes:
        after_step: called after every optimizer step, such as ``balancer.step``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    words: Tensor
    after_step: Callable[[], None] = lambda: None

    def step(self) -> float:
        """Make a training step and return the loss."""
        loss = self.model(input_ids=self.words, labels=self.words).loss
        loss.backward()
        zr.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()
        return loss.item()


class HostRanks:
    """The ranks that torchrun started, as one tensor-parallel group.

    Args:
        host: what splits models: ``"dtensor"`` for torch's ``parallelize_module``, ``"transformers"`` for
            ``from_pretrained(tp_plan="auto")``.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        limit = datetime.timedelta(minutes=30)
        self.device = join_ranks(rank=self.rank, world_size=self.num_ranks, timeout=limit)
        torch.set_num_threads(1)
        if self.device.type == "cpu":
            pin_to_core()
        transformers.logging.set_verbosity_error()
        self.mesh = init_device_mesh(self.device.type, (self.num_ranks,), mesh_dim_names=("tp",))["tp"]

    def trainer(self, *, hidden: int, depth: int, heads: int, batch: int, length: int, seed: int = 0) -> HostTrainer:
        """Make a model with its optimizer; equal arguments give equal weights and batches."""
        config = transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=4 * hidden * 2 // 3 // 64 * 64,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=_WORDS,
            max_position_embeddings=length,
            tie_word_embeddings=False,
        )
        torch.manual_seed(seed)
        whole = transformers.LlamaForCausalLM(config).to(self.device)
        model: Any = self._split_by_styles(whole) if self.host == "dtensor" else self._split_by_plan(whole)
        words = torch.randint(_WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))
        # On a GPU torch would step all at once, which it refuses for DTensors beside plain tensors.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        return HostTrainer(model, optimizer, words.to(self.device))

    def balance(self, trainer: HostTrainer, config: zr.BalanceConfig) -> zr.Balancer:
        """Balance a trainer's model from now on."""
        balancer = zr.Balancer(trainer.model, trainer.optimizer, config)
        trainer.after_step = balancer.step
        return balancer

    def _split_by_styles(self, model: nn.Module) -> nn.Module:
        columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        rows = ["self_attn.o_proj", "mlp.down_proj"]
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        for layer in model.model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, self.mesh, plan)
        return model

    def _split_by_plan(self, whole: Any) -> nn.Module:
        folder = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        if self.rank == 0:
            whole.save_pretrained(folder[0])
        dist.barrier()
        if self.device.type == "cpu":
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        options: dict[str, Any] = {"tp_plan": "auto"}
        if int(transformers.__version__.split(".")[0]) >= 5:
            from transformers.distributed import DistributedConfig

            options = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=self.num_ranks)}
        model: nn.Module = type(whole).from_pretrained(folder[0], **options)
        dist.barrier()
        return model.train()

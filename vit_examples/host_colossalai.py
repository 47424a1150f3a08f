"""Colossal-AI as the host: its Booster shards Hugging Face's ViT by ``HybridParallelPlugin``."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from vit_examples.config import RunConfig
from vit_examples.host import Host
from vit_examples.model import build_vit

# Colossal-AI imports bitsandbytes, which warns on every rank that a 4-bit CPU kernel cannot be downloaded; unused here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from colossalai.accelerator import get_accelerator
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin
    from colossalai.utils import set_seed

    from zeroresize.integrations.colossalai import prepare_accelerator


class ColossalAIHost(Host):
    """1D tensor parallelism by ShardFormer; clipping, mixed precision and loss scaling by the plugin.

    Checkpoints are not the Booster's: it writes pickles of the optimizer, and drops the fp32 master weights. Ours keep
    them, so that a resumed run follows the uninterrupted one also in bf16. In fp16 it seeks its loss scale anew.
    """

    @staticmethod
    def join(config: RunConfig) -> None:
        """Do what ``colossalai.launch_from_torch`` does, with a timeout, for which it has no argument."""
        prepare_accelerator()
        accelerator = get_accelerator()
        dist.init_process_group(backend=accelerator.communication_backend, timeout=timedelta(seconds=config.timeout_s))
        if accelerator.support_set_device:
            accelerator.set_device(int(os.environ["LOCAL_RANK"]))
        set_seed(config.training.seed)

    def __init__(self, config: RunConfig) -> None:
        training = config.training
        self._plugin = HybridParallelPlugin(
            tp_size=dist.get_world_size(),
            pp_size=1,
            precision=training.precision,
            max_norm=training.grad_clip,
        )
        self.tp_group = self._plugin.tp_group
        # The plugin makes groups without a timeout, which a rank that hangs needs; there is no public name for this.
        set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
        if set_timeout is not None:
            set_timeout(timedelta(seconds=config.timeout_s), self.tp_group)
        self.device = get_accelerator().get_current_device()
        model = build_vit(config.model, num_ranks=dist.get_world_size(), seed=training.seed)
        if training.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        self._booster = Booster(plugin=self._plugin)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer, *_ = self._booster.boost(model, optimizer)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits

    def backward(self, loss: Tensor) -> None:
        self._booster.backward(loss, self.optimizer)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

"""Plain torch as the host: the same ViT, its linear layers replaced by this package's parallel ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zeroresize as zr
from vit_examples.config import RunConfig
from vit_examples.host import Host
from vit_examples.model import build_vit, parallel_style
from zeroresize.comm.collectives import require_group


class TorchHost(Host):
    """1D tensor parallelism without a framework; mixed precision by autocast. The classifier stays replicated."""

    @staticmethod
    def join(config: RunConfig) -> None:
        if _on_gpu():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if _on_gpu() else "gloo", timeout=timedelta(seconds=config.timeout_s))

    def __init__(self, config: RunConfig) -> None:
        training = config.training
        self.device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
        self.tp_group = require_group(dist.group.WORLD)
        model = build_vit(config.model, num_ranks=self.num_ranks, seed=training.seed)
        if training.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = shard_vit(model, self.tp_group).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        self._dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[training.precision]
        # A rank whose gradients overflow makes all ranks skip the step.
        self._scaler = zr.GradScaler(process_group=self.tp_group) if self._dtype is torch.float16 else None
        self._grad_clip = training.grad_clip

    def forward(self, images: Tensor) -> Tensor:
        autocast: AbstractContextManager[Any] = nullcontext()
        if self._dtype is not None:
            autocast = torch.autocast(self.device.type, dtype=self._dtype)
        with autocast:
            return self.model(images).logits

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def step(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self._grad_clip > 0:
            zr.clip_grad_norm_(self.model.parameters(), self._grad_clip)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def loss_scale(self) -> dict[str, float]:
        return self._scaler.state_dict() if self._scaler is not None else {}

    def set_loss_scale(self, scale: Mapping[str, float]) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict({**scale, "_growth_tracker": int(scale["_growth_tracker"])})


def shard_vit(model: Any, process_group: ProcessGroup) -> Any:
    """Split the attention and feed-forward layers of Hugging Face's ViT over the group, in place."""
    num_ranks = dist.get_world_size(process_group)
    if model.config.num_attention_heads % num_ranks:
        raise ValueError(f"{model.config.num_attention_heads} attention heads do not divide by {num_ranks} ranks")
    for name, module in list(model.named_modules()):
        style = parallel_style(name)
        if isinstance(module, nn.Linear) and style is not None:
            parent, _, leaf = name.rpartition(".")
            made_by = zr.ColumnParallelLinear if style == "column" else zr.RowParallelLinear
            setattr(model.get_submodule(parent), leaf, made_by.from_linear(module, process_group=process_group))
    for layer in model.vit.encoder.layer:
        attention = layer.attention.attention
        attention.num_attention_heads //= num_ranks
        attention.all_head_size = attention.num_attention_heads * attention.attention_head_size
    return model


def _on_gpu() -> bool:
    return torch.cuda.is_available()

"""The vision transformer of the runs: Hugging Face's ``ViTForImageClassification``, alike on every rank.

``B`` pictures, ``C`` classes, padded to a multiple of the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from vit_examples.config import ModelConfig

#: Linear layers that tensor parallelism splits, by the end of their names.
COLUMN_PARALLEL = ("attention.query", "attention.key", "attention.value", "intermediate.dense")
ROW_PARALLEL = ("attention.output.dense", "output.dense")


def build_vit(model: ModelConfig, *, num_ranks: int, seed: int, device: str = "cpu") -> Any:
    """The whole ``ViTForImageClassification`` in fp32, with the same weights on every rank.

    Args:
        num_ranks: the classifier's outputs are padded to a multiple of it; see :func:`classification_loss`.
        seed: of the weights. The global random state is left as it was.
        device: ``"meta"`` builds shapes only.
    """
    config = ViTConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.depth,
        num_attention_heads=model.num_heads,
        intermediate_size=model.mlp_size,
        image_size=model.image_size,
        patch_size=model.patch_size,
        num_labels=model.padded_labels(num_ranks),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        vit: Any = ViTForImageClassification(config)
        torch.nn.init.normal_(vit.vit.embeddings.position_embeddings, std=model.position_std)
        return vit


def parallel_style(name: str) -> str | None:
    """``"column"`` or ``"row"`` for the name of a linear layer (or its parameter) that is split, None for others."""
    layer = name.removesuffix(".weight").removesuffix(".bias")
    if layer.endswith(COLUMN_PARALLEL):
        return "column"
    return "row" if layer.endswith(ROW_PARALLEL) else None


def classification_loss(logits_BC: Tensor, labels_B: Tensor, num_labels: int) -> Tensor:
    """Mean cross-entropy over the real classes; padded ones take no part and get no gradient."""
    return F.cross_entropy(logits_BC[:, :num_labels].float(), labels_B)


def num_correct(logits_BC: Tensor, labels_B: Tensor, num_labels: int) -> Tensor:
    """How many pictures are classified rightly, among the real classes."""
    return (logits_BC[:, :num_labels].argmax(dim=1) == labels_B).sum()

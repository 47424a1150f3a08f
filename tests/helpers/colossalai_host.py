"""Colossal-AI in a rank: its layers, ShardFormer and Booster, made to run on a CPU."""

import warnings
from types import SimpleNamespace

import torch

from zeroresize import BalanceConfig

OFF = BalanceConfig(mode="off")
HIDDEN, DEPTH, LABELS = 32, 2, 6


class Host:
    """What a rank uses of Colossal-AI; models that are compared live side by side in the same rank."""

    def __init__(self, group):
        from colossalai.shardformer import layer

        from zeroresize.integrations import colossalai as integration

        warnings.simplefilter("ignore")
        integration.prepare_accelerator()
        self.group, self.integration = group, integration
        self.Linear1D_Col, self.Linear1D_Row = layer.Linear1D_Col, layer.Linear1D_Row

    def shard(self, model, balanced_from_the_start=False):
        """By ShardFormer alone."""
        from colossalai.shardformer import ShardConfig, ShardFormer

        config = ShardConfig(tensor_parallel_process_group=self.group)
        policy = self.balanced_vit_policy() if balanced_from_the_start else None
        return ShardFormer(config).optimize(model, policy)[0]

    def boost(self, model, balanced_from_the_start=False, precision="fp32"):
        """By Booster; returns what is needed to train."""
        from colossalai.booster import Booster
        from colossalai.booster.plugin import HybridParallelPlugin

        policy = self.balanced_vit_policy() if balanced_from_the_start else None
        plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision=precision, custom_policy=policy)
        booster = Booster(plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, *_ = booster.boost(model, optimizer)
        return SimpleNamespace(model=model, optimizer=optimizer, booster=booster, group=plugin.tp_group)

    def balanced_vit_policy(self):
        from colossalai.shardformer.policies.vit import ViTForImageClassificationPolicy

        return self.integration.balanced_policy(ViTForImageClassificationPolicy)()


def small_vit(**changes):
    """The same on every rank and at every call."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": LABELS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return ViTForImageClassification(ViTConfig(**{**config, **changes})).train()


def batch(step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(4, 3, 8, 8, generator=generator, dtype=dtype)
    return images, torch.randint(LABELS, (4,), generator=generator)

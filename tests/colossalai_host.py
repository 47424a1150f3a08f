"""Colossal-AI in a rank: its layers, ShardFormer and Booster, made to run on a CPU."""

import warnings
from types import SimpleNamespace

import torch

from zeroresize import BalanceConfig

OFF = BalanceConfig(mode="off")


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

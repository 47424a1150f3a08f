"""Colossal-AI's HybridParallelPlugin: torchrun --nproc-per-node 4 docs/programs/with_colossalai.py folder"""

import logging
import sys
from contextlib import nullcontext

import colossalai
import torch
import torch.distributed as dist
import transformers
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

import zeroresize as zr

WORDS = 128
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


def undivided():
    """The same model on all ranks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, vocab_size=WORDS, use_cache=False)
    return transformers.LlamaForCausalLM(config).train()


def batch(number):
    """With a padded row: without flash attention tokens would else see later ones, a fault of the host."""
    words = torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(number))
    mask = torch.ones_like(words)
    mask[0, -1] = 0
    given = {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}
    return {name: tensor.to(get_accelerator().get_current_device()) for name, tensor in given.items()}


def masters(optimizer):
    """What this rank's optimizer steps, in float32, which no checkpoint of the host holds."""
    return [weight.data for group in optimizer.optim.param_groups for weight in group["params"]]


def main(folder, num_steps=8, goes_on=False):
    """Losses of this replica's batches, two a step; half of the steps are saved, and can be gone on from."""
    plugin = HybridParallelPlugin(
        tp_size=2,
        pp_size=1,
        zero_stage=1,
        precision="bf16",  # with ZeRO the host refuses "fp32"
        max_norm=1.0,  # clips: call no other clipping
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="split_gather",
    )
    booster, model = Booster(plugin=plugin), undivided()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    zr.convert(model, plugin.tp_group)
    balancer = zr.Balancer(model, optimizer)
    of_rank = f"{folder}/rank{dist.get_rank()}.pt"
    if goes_on:
        booster.load_model(model, f"{folder}/model")
        booster.load_optimizer(optimizer, f"{folder}/optimizer")
        state = torch.load(of_rank, weights_only=True)
        for master, saved in zip(masters(optimizer), state["masters"], strict=True):
            master.copy_(saved)
        balancer.load_state_dict(state["balancer"])  # moves units to where they were

    losses = []
    with zr.StragglerInjector(model, process_group=plugin.tp_group, chi={1: 4.0}):  # leave it out of your training
        for step in range(num_steps // 2 if goes_on else 0, num_steps):
            for number in (2 * step, 2 * step + 1):
                with nullcontext() if number % 2 else booster.no_sync(model, optimizer):
                    loss = model(**batch(number * plugin.dp_group.size() + plugin.dp_group.rank())).loss
                    booster.backward(loss / 2, optimizer)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()  # once for every step of the optimizer
            if step + 1 == num_steps // 2 and not goes_on:
                with balancer.at_home():  # on every rank
                    booster.save_model(model, f"{folder}/model", shard=True)
                    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
                    torch.save({"masters": masters(optimizer), "balancer": balancer.state_dict()}, of_rank)
    balancer.close(at_home=True)
    return losses


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # shows what the balancer does
    colossalai.launch_from_torch()
    losses = main(sys.argv[1], num_steps=200, goes_on=sys.argv[2:] == ["resume"])
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    dist.destroy_process_group()

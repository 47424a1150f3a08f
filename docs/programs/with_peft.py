"""LoRA around a model that transformers has split: torchrun --nproc-per-node 2 docs/programs/with_peft.py"""

import logging
import sys

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model

import zeroresize as zr

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def split(folder):
    """The model that ``folder`` holds, divided over all ranks."""
    options = {"tp_plan": "auto"}
    if int(transformers.__version__.split(".")[0]) >= 5:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())}
    return transformers.LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, **options).train()


def main(folder, num_steps=8):
    """Losses of steps; saves the adapter that training begins with, and the trained one."""
    if dist.get_rank() == 0:  # in place of a model that was trained before
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(1)  # the same on all ranks, as they hold one matrix of each pair whole
    model = get_peft_model(split(folder), LoraConfig(r=4, target_modules=LAYERS))  # before convert and the Balancer
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    balancer = zr.Balancer(model, optimizer)
    model.save_pretrained(f"{folder}/begun")
    losses = []
    for step in range(num_steps):
        words = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))  # the same on all ranks
        loss = model(input_ids=words.to(model.device), labels=words.to(model.device)).loss
        loss.backward()
        zr.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        losses.append(loss.item())
    with balancer.at_home():
        model.save_pretrained(f"{folder}/adapter")  # on every rank; a whole adapter, as PEFT writes it
    balancer.close()
    return losses


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # shows what the balancer does
    dist.init_process_group()
    losses = main(sys.argv[1])
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    dist.destroy_process_group()

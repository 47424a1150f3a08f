"""A model that transformers has split: torchrun --nproc-per-node 2 docs/programs/with_transformers.py folder"""

import logging
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers

import zeroresize as zr


def split(folder):
    """The model that ``folder`` holds, divided over all ranks."""
    options = {"tp_plan": "auto"}
    if int(transformers.__version__.split(".")[0]) >= 5:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())}
    return transformers.LlamaForCausalLM.from_pretrained(folder, **options).train()


def main(folder, num_steps=12, goes_on=False):
    """Losses of steps; the first half is saved, and can be gone on from."""
    if dist.get_rank() == 0 and not goes_on:  # in place of a model that was trained before
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained(folder)
    dist.barrier()
    model = split(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after the split, which makes new weights
    balancer = zr.Balancer(model, optimizer)
    state = {**zr.sharded_state_dict(model, optimizer), "balancer": balancer}
    if goes_on:
        dcp.load(state, storage_reader=zr.CheckpointReader(f"{folder}/saved"))
    losses = []
    for step in range(num_steps // 2 if goes_on else 0, num_steps):
        words = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))  # the same on all ranks
        loss = model(input_ids=words.to(model.device), labels=words.to(model.device)).loss
        loss.backward()
        zr.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        losses.append(loss.item())
        if step + 1 == num_steps // 2 and not goes_on:
            dcp.save(state, checkpoint_id=f"{folder}/saved")  # whole tensors, wherever units are
    with balancer.at_home():
        model.save_pretrained(f"{folder}/trained")  # on every rank; a whole model, as transformers writes it
    balancer.close()
    return losses


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # shows what the balancer does
    dist.init_process_group()
    print("losses:", *main(sys.argv[1]))
    dist.destroy_process_group()

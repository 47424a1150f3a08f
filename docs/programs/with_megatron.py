"""Megatron-Core's layers and optimizer: torchrun --nproc-per-node 4 docs/programs/with_megatron.py folder"""

import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

import zeroresize as zr

WORDS, LENGTH = 64, 16


def build():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=128,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,  # else layers stay as they are
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    torch.manual_seed(0)
    model = GPTModel(config, get_gpt_layer_local_spec(), WORDS, LENGTH, position_embedding_type="rope")
    of_gradients = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(config, of_gradients, model.to(torch.cuda.current_device()))
    of_steps = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True)
    return wrapped, get_megatron_optimizer(of_steps, [wrapped])


def batch(number):
    """Words of this replica, the same on all ranks of its tensor-parallel group."""
    seed = number * parallel_state.get_data_parallel_world_size() + parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (4, LENGTH + 1), generator=generator).to(torch.cuda.current_device())
    positions = torch.arange(LENGTH, device=words.device).expand(4, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=words.device).triu(1)
    return words[:, :-1].contiguous(), positions, mask, words[:, 1:].contiguous()


def state_of(wrapped, optimizer):
    """What Megatron-Core's checkpoints hold, wherever units are."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": wrapped.dp_cp_group}
    model = wrapped.module.sharded_state_dict(metadata=metadata)
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model, metadata=metadata)}


def main(folder, num_steps=8):
    """Losses of this replica's batches, two in a step."""
    wrapped, optimizer = build()
    group = parallel_state.get_tensor_model_parallel_group()
    balancer = zr.Balancer(wrapped, optimizer, process_group=group)
    losses = []
    for step in range(num_steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        for number in (2 * step, 2 * step + 1):
            words, positions, mask, labels = batch(number)
            with nullcontext() if number % 2 else wrapped.no_sync():
                loss = wrapped(words, positions, mask, labels=labels).mean()
                loss.backward()
            losses.append(loss.item())
        finalize_model_grads([wrapped])
        optimizer.step()
        balancer.step()
    dist_checkpointing.save(state_of(wrapped, optimizer), folder)
    balancer.close()
    return losses


if __name__ == "__main__":  # a save starts a process that imports this program
    torch.cuda.set_device(torch.distributed.get_node_local_rank())
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    print("losses:", *main(sys.argv[1]))
    torch.distributed.destroy_process_group()

"""A model that DeepSpeed's AutoTP splits: torchrun --nproc-per-node 2 docs/programs/with_deepspeed.py folder"""

import sys

import deepspeed
import torch
import torch.distributed as dist
import transformers

import zeroresize as zr

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


def main(folder, num_steps=8, goes_on=False):
    """Losses of a training that is saved in ``folder`` after half of it, and can be gone on from there."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, vocab_size=64, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if goes_on:
        engine.load_checkpoint(folder)
    balancer = zr.Balancer(engine, engine.optimizer)

    losses = []
    for step in range(num_steps // 2 if goes_on else 0, num_steps):
        for seed in (2 * step, 2 * step + 1):
            words = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(seed)).to(engine.device)
            loss = engine(input_ids=words, labels=words).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        balancer.step()  # once for every step of the optimizer
        if step + 1 == num_steps // 2 and not goes_on:
            with balancer.at_home():
                engine.save_checkpoint(folder)
    balancer.close(at_home=True)
    return losses


if __name__ == "__main__":
    print("losses:", *main(sys.argv[1]))
    dist.destroy_process_group()

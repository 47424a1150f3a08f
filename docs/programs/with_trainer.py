"""Hugging Face Trainer: torchrun --nproc-per-node 2 docs/programs/with_trainer.py folder"""

import sys

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from zeroresize.integrations.transformers import BalanceCallback


def main(folder, num_steps=8):
    """Losses of the steps of a small LLaMA, which is made in ``folder`` first."""
    whole = f"{folder}/whole"
    if dist.get_rank() == 0:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained(whole)
    dist.barrier()
    split = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(whole, distributed_config=split)
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/run",
        per_device_train_batch_size=4,
        max_steps=num_steps,
        save_steps=4,
        save_only_model=True,  # the callback saves the optimizer's state, whole
        logging_steps=1,
        learning_rate=1e-2,
        use_cpu=not torch.cuda.is_available(),
    )
    words = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": each, "labels": each} for each in words]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[BalanceCallback()])
    trainer.train()
    trainer.save_model(f"{folder}/trained")  # by all ranks: whole tensors, for any number of ranks
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    dist.init_process_group()
    print("losses:", *main(sys.argv[1]))
    dist.destroy_process_group()

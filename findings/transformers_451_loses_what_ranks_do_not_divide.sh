#!/usr/bin/env bash
# transformers 4.51.3 with torch 2.13.0, from_pretrained(..., tp_plan="auto") on a number of ranks that does not divide a
# layer's features: each rank is given floor(features / ranks) of them, and the rest is left out without a message.
#
# Seen on two CPU ranks (gloo), a LLaMA with 51 neurons in its feed-forward layers: all ranks together hold 50, a layer's
# out_features still says 51, the forward runs, and logits differ from those of the model in one process by 0.0055 of the
# largest one. Of 50 neurons they are the same. transformers 5.24 cuts as torch does: 26 and 25.
# Way out: a number of ranks that divides hidden_size, heads times head_dim and intermediate_size.
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0
"$folder/venv/bin/pip" install -q transformers==4.51.3 accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
SIZES = dict(vocab_size=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             max_position_embeddings=32)


def run(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for neurons in (50, 51):
        where = f"{folder}/{neurons}"
        if rank == 0:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=neurons)).save_pretrained(where)
        dist.barrier()
        whole = LlamaForCausalLM.from_pretrained(where, torch_dtype=torch.float64)
        split = LlamaForCausalLM.from_pretrained(where, torch_dtype=torch.float64, tp_plan="auto")
        layer = split.model.layers[0].mlp.up_proj
        held = torch.tensor(layer.weight.to_local().shape[0])
        dist.all_reduce(held)
        words = torch.arange(8)[None]
        with torch.no_grad():
            right, seen = whole(input_ids=words).logits, split(input_ids=words).logits
        error = float((right - seen).abs().max() / right.abs().max())
        if rank == 0:
            print(f"{neurons} neurons: {int(held)} held, out_features={layer.out_features}, logits off by {error:.2g}")
        assert int(held) == 50 and layer.out_features == neurons
        assert (error < 1e-9) == (neurons == 50), error
    dist.destroy_process_group()


if __name__ == "__main__":
    assert transformers.__version__ == "4.51.3"
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
    print("as described")
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/program.py" "$folder"

#!/usr/bin/env bash
# transformers 5.24.0 and torch 2.13.0: the routed experts of a Mixtral that tp_plan="auto" has split cannot be saved by
# torch.distributed.checkpoint, though the same DTensor's full_tensor() is the whole weight, bit for bit.
#
# gate and up lie in one tensor, of which each rank holds its rows of both: placement _StridedShard(dim=1, sf=2). The
# checkpoint takes a rank's rows for one piece, which begins where the first of them does, so pieces of two ranks
# overlap. dcp.save raises a CheckpointException, which is a BaseException: `except Exception` does not see it.
# Seen on two CPU ranks (gloo), alike on both:
#     (_StridedShard(dim=1, sf=2),) (2, 32, 16) whole True
#     CheckpointException is Exception: False, overlapping chunks of experts.gate_up_proj: True
# Way out: save full_tensor(), or the pieces under names of their own. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0 transformers==5.24.0 accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
torch.manual_seed(0)
whole = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads))
if dist.get_rank() == 0:
    whole.save_pretrained("whole")
dist.barrier()
plan = DistributedConfig(tp_plan="auto", tp_size=2)
model = AutoModelForCausalLM.from_pretrained("whole", distributed_config=plan)
name = next(name for name, _ in model.named_parameters() if name.endswith("experts.gate_up_proj"))
weight = dict(model.named_parameters())[name]
is_whole = torch.equal(weight.full_tensor(), dict(whole.named_parameters())[name])
print("SEEN", weight.placements, tuple(weight.shape), "whole", is_whole)
raised = None
try:
    dcp.save(model.state_dict(), checkpoint_id="saved")
except BaseException as error:
    raised = error
overlap = f"{name} has overlapping chunks" in str(raised)
kind, is_exception = type(raised).__name__, isinstance(raised, Exception)
print("SEEN", kind, f"is Exception: {is_exception}, overlapping chunks of experts.gate_up_proj: {overlap}")
assert is_whole and kind == "CheckpointException" and not is_exception and overlap
PROGRAM
cd "$folder"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py > seen 2>&1 || { tail -60 seen; exit 1; }
grep SEEN seen | sort -u
echo "as described"

#!/usr/bin/env bash
# Megatron-Core 0.19.2, DistributedOptimizer with torch's Adam (neither TransformerEngine nor Apex is installed): the step
# after load_state_dict counts as many steps as a rank steps weights. No message.
#
# A checkpoint holds one number of steps. load_state_dict makes one tensor of it and gives that to the state of every
# weight, where torch's Adam counts it up once for each weight. So its bias corrections are those of later steps.
# Seen on a CPU, four weights, 12 steps before saving; the count of each weight after the next step:
#     as loaded                     16 16 16 16
#     with a clone for each weight  13 13 13 13
# Way out: give each weight's state["step"] a clone after loading. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0 packaging triton
"$folder/venv/bin/pip" install -q --no-deps --ignore-requires-python megatron-core==0.19.2
cat > "$folder/program.py" <<'PROGRAM'
from types import SimpleNamespace

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def step(inner, weights):
    for weight in weights:
        weight.grad = torch.ones(2)
    inner.step()


for clones in (False, True):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    inner = torch.optim.Adam(weights)
    optimizer = object.__new__(DistributedOptimizer)  # of which only what saves and loads is run
    optimizer.optimizer, optimizer.grad_scaler = inner, None
    optimizer.ddp_config, optimizer.config = SimpleNamespace(use_megatron_fsdp=False), SimpleNamespace(fp16=False)
    for _ in range(12):
        step(inner, weights)
    optimizer.load_state_dict(optimizer.state_dict())
    for state in inner.state.values() if clones else ():
        state["step"] = state["step"].clone()
    step(inner, weights)
    counts = [int(inner.state[weight]["step"]) for weight in weights]
    print("SEEN", "clones" if clones else "as loaded", *counts)
    assert counts == [13 if clones else 16] * 4, counts
PROGRAM
cd "$folder"
OMP_NUM_THREADS=1 venv/bin/python program.py > seen 2>&1 || { tail -20 seen; exit 1; }
grep SEEN seen
echo "as described"

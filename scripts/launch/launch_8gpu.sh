#!/usr/bin/env bash
# Trains ViT-1B (or another configuration) on one node of eight GPUs, fp16 under Colossal-AI's plugin.
#
#   ZERORESIZE_CIFAR10=path/to/parquet scripts/launch/launch_8gpu.sh
#   scripts/launch/launch_8gpu.sh --config vit_3b --mode off --set straggler.kind=sleep --set 'straggler.chi={3: 4.0}'
#   scripts/launch/launch_8gpu.sh --dry-run          checks configuration, shapes and memory per rank; needs no GPU
#
# GPUS and PYTHON change the number of ranks and the interpreter; all arguments go to vit_examples.train.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

gpus="${GPUS:-8}"
python="${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
arguments=("$@")
[[ " $* " == *" --config"* ]] || arguments=(--config vit_1b "$@")

if [[ " $* " == *" --dry-run "* ]]; then
    exec "$python" -m vit_examples.train "${arguments[@]}" --ranks "$gpus"
fi
exec "$python" -m vit_examples.one_node --nproc-per-node "$gpus" -m vit_examples.train "${arguments[@]}"

#!/usr/bin/env bash
# Two machines with eight GPUs each: run this on both, with the address of the first and with 0 or 1.
#   examples/two_machines.sh 10.0.0.1 0 train --dataset.repo_id=... --output_dir=/shared/run ...
# --output_dir must be on a file system that both see (with --distributed=fsdp both write; to go on, both read).
set -euo pipefail
address="$1" machine="$2"
shift 2
exec torchrun --nnodes=2 --nproc-per-node=8 --node-rank="$machine" --master-addr="$address" --master-port=29500 \
  --no-python pi0-fast "$@"

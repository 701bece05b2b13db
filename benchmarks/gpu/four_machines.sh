#!/usr/bin/env bash
# Measures gridformer on all GPUs of four machines and writes report.md on the first one. Start it on
# every machine, in the same checkout or in copies of it, with the address of the first machine:
#
#     benchmarks/gpu/four_machines.sh FIRST_HOST RANK [options of benchmarks.gpu.cluster]
#
# RANK is 0 on the first machine, and 1, 2 and 3 on the others. Under Slurm, one command does it, with
# as many CPUs for each task as a machine has (Slurm gives a task one CPU otherwise, for all 8 GPUs):
#
#     srun --nodes 4 --ntasks-per-node 1 --exclusive --gpus-per-node 8 --cpus-per-task 64 --cpu-bind none \
#         bash -c 'benchmarks/gpu/four_machines.sh $(scontrol show hostnames | head -1) $SLURM_NODEID'
#
# MACHINES, GPUS (of each machine), PORT and PYTHON can be set in the environment. Port 29500 of the
# first machine must be reachable; torchrun listens there without authentication, so use a private
# network.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
first=$1 rank=$2
shift 2
cd "$(dirname "$0")/../.."
. benchmarks/gpu/environment.sh
# Ranks come from torchrun: gridformer reads its variables rather than those of Slurm.
exec env PYTHONPATH=src:. "$python" -m torch.distributed.run \
  --nnodes "${MACHINES:-4}" --node-rank "$rank" --nproc-per-node "${GPUS:-8}" \
  --master-addr "$first" --master-port "${PORT:-29500}" \
  -m benchmarks.gpu.cluster --out report.md "$@"

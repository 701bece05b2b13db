#!/usr/bin/env bash
# Measures gridformer on all GPUs of this machine and writes report.md: exactness, step times, MFU,
# memory against the estimate, and overlap of every layout. It needs 2, 4 or 8 GPUs, Python 3.11 or
# newer, and about 20 minutes. Options go to benchmarks.gpu.cluster, as in:
#
#     benchmarks/gpu/one_machine.sh --model megatron-2.5b --peak-tflops 989
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
if [ ! -x .venv-gpu/bin/python ]; then
  "$PYTHON" -m venv .venv-gpu
  # The CUDA build of torch that pip chooses for this platform.
  .venv-gpu/bin/python -m pip install --quiet 'torch>=2.11' '.[hf]'
fi
exec env PYTHONPATH=src:. .venv-gpu/bin/python -m benchmarks.gpu.cluster --out report.md "$@"

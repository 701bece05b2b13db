#!/usr/bin/env bash
# Measures gridformer on all GPUs of this machine and writes report.md: exactness, step times, MFU,
# memory against the estimate, and overlap of every layout. It uses 2, 4 or 8 GPUs and needs Python
# 3.11 or newer and about 20 minutes. Options go to benchmarks.gpu.cluster, as in:
#
#     benchmarks/gpu/one_machine.sh --model megatron-2.5b --peak-tflops 989
#
# PYTHON can be set in the environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/gpu/environment.sh
exec env PYTHONPATH=src:. "$python" -m benchmarks.gpu.cluster --out report.md "$@"

#!/usr/bin/env bash
# Measures what one GPU can tell within 8 minutes, the most valuable first, and writes report.md:
#
#     benchmarks/gpu/quarter_hour.sh FOLDER
#
# Each part has a time limit. A part that fails or is cut is named in the report, and the next one
# goes on. FOLDER also gets numbers.jsonl, the calibrated cluster file and each part's output. What a
# part should measure is predicted before, and stands beside it. Without a GPU the same parts run
# with tiny models on the CPU, so that one can see that they work.
#
# PYTHON can be set in the environment, an interpreter with torch and gridformer's dependencies; and
# NCCL_LIBRARY, a libnccl.so.2 of 2.30 or newer, for layouts of several processes if torch's is older.
# Nothing is downloaded. SECONDS_IN_ALL changes the 8 minutes.
set -uo pipefail
if [ $# -ne 1 ]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mkdir -p "$1" || exit 2
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
all=${SECONDS_IN_ALL:-480}
patience=3 # seconds from asking a part to stop until it is killed
report=$folder/report.md
numbers=$folder/numbers.jsonl
cluster=$folder/calibrated.yaml
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
rm -f "$report" "$numbers" "$cluster"

say() { printf '%s\n' "$@" | tee -a "$report"; }

# part NAME SECONDS COMMAND...: runs a command within a time limit; it prints to NAME.log and NAME.err.
part() {
  local name=$1 limit=$2 left=$((all - SECONDS - patience)) began=$SECONDS code=0
  shift 2
  ((limit > left)) && limit=$left
  if ((limit <= patience)); then
    say "" "**$name was left out:** no time was left."
    return 1
  fi
  say "" "<!-- $name: at most $limit s, from second $began on -->"
  timeout -k "$patience" "$limit" "$@" >"$folder/$name.log" 2>"$folder/$name.err" || code=$?
  ((code == 0)) && return
  if ((code == 124 || code == 137)); then
    say "" "**$name was cut** after $limit s. Its last lines:"
  else
    say "" "**$name failed** with exit code $code after $((SECONDS - began)) s. Its last lines:"
  fi
  say "" '```' "$(cat "$folder/$name".{log,err} | grep -v '^|' | tail -n 10 | cut -c -160)" '```'
  return 1
}

# tests NAME SECONDS WORDS...: runs tests and says which of them passed, also if time was up.
tests() {
  local name=$1 limit=$2 log=$folder/$1.log
  shift 2
  say "" "## Tests: $name" "" "Predicted: all pass."
  : >"$log"
  part "$name" "$limit" "$python" -m pytest -vv --tb=short -p no:xdist "$@"
  say "" "Measured: $(grep -c ' PASSED' "$log") passed, $(grep -Ec '(FAILED|ERROR) +\[' "$log") did not."
  grep -E '(FAILED|ERROR) +\[' "$log" | sed 's/^/- /' | tee -a "$report"
}

about=$(timeout -k 5 60 "$python" -c '
import torch
from benchmarks.common.machine import describe_machine
from benchmarks.gpu.report import choose_device, describe
from gridformer.mesh.gpus import nccl_version
name = "cuda" if torch.cuda.is_available() else "cpu"
about = describe_machine("")
nccl = ".".join(map(str, nccl_version() or ["none"]))
print(name)
print(describe(choose_device(name)), f"NCCL {nccl}", about["date"], "commit " + about["commit"], sep="; ")
' 2>"$folder/about.log")
device=${about%%$'\n'*}
say "# What one GPU says within $((all / 60)) minutes" "" "${about#*$'\n'}" "" "\`benchmarks/gpu/quarter_hour.sh $1\`"

gpu=("$python" -m benchmarks.gpu)
written=(--out "$report" --numbers "$numbers")
# The four cells whose processes crashed when the matrix first ran over NCCL: they joined a new world.
four="GPT-2-single-pp2-replicate-no_dropout or Transformer-Megatron_2-D-pp1-none-no_dropout"
four+=" or GPT-2-single-pp4-replicate-no_dropout or BERT-Optimus-pp1-fsdp-dropout"
if [ "$device" = cuda ]; then
  kernels=(tests/gpu/test_kernels.py)
  matrix=(tests/gpu/test_matrix.py)
  others="not ($four)"
  llama=(--model llama-3.2-1b --seq-len 2048)
  gpt2=(--model gpt2-774m --seq-len 1024)
  steps=(--steps 5 --rounds 2)
  calibration=(--limit 40)
  cases=(--cases 10 --limit 25)
  tiles=(--limit-s 50)
  interpreter=()
  export NCCL_MULTI_RANK_GPU_ENABLE=1
else
  say "" "**A rehearsal without a GPU:** tiny models on the CPU, messages over gloo; the figures mean nothing."
  kernels=(tests/models/kernels/test_interpreted.py -k masks)
  matrix=(tests/multirank/test_matrix.py)
  others="Llama-Optimus-pp1-none"
  llama=(--device cpu --quick --backend aot_eager)
  gpt2=("${llama[@]}" --dropout 0.1)
  steps=()
  calibration=(--quick --processes '1,2')
  cases=(--quick)
  tiles=(--device cpu --quick)
  interpreter=(TRITON_INTERPRET=1)
  export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 # tiny tensors gain nothing from more
fi

# 1. What has changed since a GPU last ran it.
tests kernels 50 "${kernels[@]}"
LD_PRELOAD=${NCCL_LIBRARY:-} tests four-cells 35 "${matrix[@]}" -k "$four"
LD_PRELOAD=${NCCL_LIBRARY:-} tests other-cells 50 "${matrix[@]}" -k "$others"

# 2. A training step beside Hugging Face's, and the first one again.
part llama 85 "${gpu[@]}" single "${llama[@]}" "${steps[@]}" --batch 4 --batch 16 \
  --predict dgx-h100 --limit-s 70 "${written[@]}"
part gpt2 75 "${gpu[@]}" single "${gpt2[@]}" "${steps[@]}" --batch 4 --batch 16 \
  --predict dgx-h100 --limit-s 60 "${written[@]}"
say "" "The first steps again, compiled, and their profile:"
part again 30 "${gpu[@]}" single "${llama[@]}" "${steps[@]}" --batch 4 --modes compiled --profile \
  --limit-s 20 "${written[@]}"

# 3. The planner, with the times of this machine, or else with those of the shipped file.
part calibrate 60 "$python" -m gridformer calibrate "${calibration[@]}" --out "$cluster" || cluster=dgx-h100
part predicted 55 "$python" -m benchmarks.predicted gpu --cluster "$cluster" "${cases[@]}" \
  --numbers "$numbers" --out "$folder/predicted.md" && say "" "#$(cat "$folder/predicted.md")"

# 4. Something to tune, with the time that is left.
part tiles "$all" env "${interpreter[@]}" "${gpu[@]}" tiles "${tiles[@]}" "${written[@]}"
say "" "Done after $SECONDS s."

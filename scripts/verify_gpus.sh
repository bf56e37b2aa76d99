#!/usr/bin/env bash
# Verify evodsp on a machine with several GPUs: transposes of collectives, parallel against serial, speed of the all-to-all, and
# training on several meshes.
#
#   scripts/verify_gpus.sh             use all GPUs of the machine (at least 2), with NCCL
#   scripts/verify_gpus.sh --cpu 3     run the same checks on 3 CPU processes with gloo, to test the script itself
#
# Each check prints a line that begins with 'ok' or 'FAILED'. If all succeed the last line is 'all verified' and the exit code is 0,
# otherwise 1. scripts/verify_gpus.expected.txt is an example. Set EVODSP_PYTHON to choose the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${EVODSP_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
if [[ ${1:-} == --cpu ]]; then
  device=cpu available=${2:-2}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
  device=cuda available=$("$python" -c 'import torch; print(torch.cuda.device_count())')
fi
if ((available < 2)); then
  echo "FAILED: at least 2 ranks are needed, found $available; use a machine with 2 GPUs, or test the script with --cpu 3"
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

check() { # check NAME COMMAND…: print one line, and if the command fails all of its output
  local name=$1 start=$SECONDS
  shift
  if "$@" >"$work/log" 2>&1; then
    echo "ok      $name, $((SECONDS - start)) s"
    sed -n 's/^result: /        /p' "$work/log"
  else
    echo "FAILED  $name"
    sed 's/^/        /' "$work/log"
    failed=1
  fi
}

ranks() { # ranks N PROGRAM…: run a program on N ranks of this machine
  local number=$1
  shift
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$number" "$@"
}

for number in 2 3 4 8; do
  ((number <= available)) || continue
  check "collectives and their transposes, $number ranks" ranks "$number" scripts/verify_ranks.py collectives "$device"
  check "model over $number ranks equals one" ranks "$number" scripts/verify_ranks.py model "$device"
  check "speed of the switch, $number ranks" ranks "$number" scripts/verify_ranks.py switch "$device"
done

# Ten training steps with the same global batch of samples on every mesh (data, sequence).
fit() { # fit DATA SEQUENCE
  local data=$1 sequence=$2 precision=32-true
  ranks "$((data * sequence))" -m evodsp fit --config configs/quickstart.yaml --output "$work/fit_${data}_$sequence" \
    --trainer.accelerator "$device" --trainer.precision "$precision" --trainer.max_steps 10 --trainer.log_every_n_steps 1 \
    --trainer.num_sanity_val_steps 0 --trainer.enable_progress_bar false --data.validation_chains null \
    --data.batch_size "$((global / data))" --parallel.sequence "$sequence"
}
global=2
meshes=()
for mesh in "1 1" "1 2" "2 1" "1 3" "2 2" "1 4" "2 4" "1 8"; do
  read -r data sequence <<<"$mesh"
  ((data * sequence <= available)) || continue
  check "ten training steps, (data, sequence) = ($data, $sequence)" fit "$data" "$sequence"
  meshes+=("$work/fit_${data}_$sequence/curve.csv")
done
check "their losses are equal" "$python" scripts/verify_ranks.py curves "${meshes[@]}"

((failed == 0)) && echo "all verified" || exit 1

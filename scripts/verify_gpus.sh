#!/usr/bin/env bash
# Verify evodsp on a machine with GPUs: kernels, half precision, training, resuming and prediction on one GPU; with several GPUs also
# transposes of collectives, parallel against serial, speed of the all-to-all, and training on several meshes.
#
#   scripts/verify_gpus.sh             use all GPUs of the machine, with NCCL
#   scripts/verify_gpus.sh --cpu 3     run the same checks on 3 CPU processes with gloo, to test the script itself; or on 1
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
if ((available < 1)); then
  echo "FAILED: this machine has no GPU; use one that has, or test the script with --cpu 3"
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

# ---- One device ----

check "every kernel equals its formula" ranks 1 scripts/verify_ranks.py kernels "$device"
check "blocks in bf16-mixed against float32" ranks 1 scripts/verify_ranks.py half "$device"

# Training with the same global batch of samples on every mesh (data, sequence); ten steps, unless `steps` says otherwise.
global=2
fit() { # fit NAME DATA SEQUENCE OPTION…: the run's folder is $work/NAME
  local name=$1 data=$2 sequence=$3
  shift 3
  ranks "$((data * sequence))" -m evodsp fit --config configs/quickstart.yaml --output "$work/$name" \
    --trainer.accelerator "$device" --trainer.max_steps "${steps:-10}" --trainer.log_every_n_steps 1 \
    --trainer.num_sanity_val_steps 0 --trainer.enable_progress_bar false --data.validation_chains null \
    --data.batch_size "$((global / data))" --parallel.sequence "$sequence" "$@"
}
curves() { # curves TOLERANCE NAME…: whether the losses of these runs agree
  local tolerance=$1 files=() name
  shift
  for name in "$@"; do files+=("$work/$name/curve.csv"); done
  "$python" scripts/verify_ranks.py curves "$tolerance" "${files[@]}"
}
predict() { # predict PRECISION
  "$python" -m evodsp predict --fasta data/fasta/s005_A.fasta --alignments data/alignments --format pdb \
    --checkpoint "$work/1_1/checkpoints/last.ckpt" --output "$work/$1" --device "$device" --precision "$1"
}

check "ten training steps, (data, sequence) = (1, 1)" fit 1_1 1 1
check "the same in bf16-mixed" fit bf16 1 1 --trainer.precision bf16-mixed
check "their losses are near" curves 0.02 1_1 bf16
check "the same with zero1" fit zero1 1 1 --parallel.parameters zero1
steps=5 check "five steps" fit resumed 1 1
check "resumed for five more" fit resumed 1 1 --ckpt_path last
check "the losses of these three are equal" curves 1e-5 1_1 zero1 resumed
check "ten steps, gradients clipped by batch" fit clipped 1 1 --model.optimizer.clip batch
check "the same with fsdp2" fit fsdp2 1 1 --model.optimizer.clip batch --parallel.parameters fsdp2
check "their losses are equal" curves 1e-5 clipped fsdp2
check "a prediction in fp32" predict fp32
check "a prediction in bf16" predict bf16
check "they are near" "$python" scripts/verify_ranks.py predictions "$work/fp32/s005_A" "$work/bf16/s005_A"

# ---- Several ranks ----

for number in 2 3 4 8; do
  ((number <= available)) || continue
  check "collectives and their transposes, $number ranks" ranks "$number" scripts/verify_ranks.py collectives "$device"
  check "model over $number ranks equals one" ranks "$number" scripts/verify_ranks.py model "$device"
  check "speed of the switch, $number ranks" ranks "$number" scripts/verify_ranks.py switch "$device"
done

meshes=(1_1)
for mesh in "1 2" "2 1" "1 3" "2 2" "1 4" "2 4" "1 8"; do
  read -r data sequence <<<"$mesh"
  ((data * sequence <= available)) || continue
  check "ten training steps, (data, sequence) = ($data, $sequence)" fit "${data}_$sequence" "$data" "$sequence"
  meshes+=("${data}_$sequence")
done
if ((available > 1)); then
  check "their losses are equal" curves 1e-5 "${meshes[@]}"
else
  echo "        one rank: what several ranks do is not verified"
fi

((failed == 0)) && echo "all verified" || exit 1

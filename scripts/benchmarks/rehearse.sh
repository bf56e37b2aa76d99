#!/usr/bin/env bash
# Rehearse what a GPU machine will run, where there is no GPU: `make rehearse` makes an environment like that machine's and calls
# this.
#
#   scripts/benchmarks/rehearse.sh [STEP ...]      all steps (their names are below), or these
#
# EVODSP_PYTHON names the interpreter (default: .venv-rehearsal/bin/python), and NUMPY_FOR_TRITON a folder with a NumPy before 2.4,
# which Triton's interpreter needs (default: .venv-rehearsal/numpy). evodsp is not installed there: it is found in the current
# folder, as on the GPU machine. Each step prints a line that begins with 'ok' or 'FAILED', with its seconds; of one that failed the
# end of its output follows. The others go on. The exit code is 0 if all succeeded, otherwise 1. Two idle cores take 15 minutes.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${EVODSP_PYTHON:-.venv-rehearsal/bin/python}
numpy=${NUMPY_FOR_TRITON:-.venv-rehearsal/numpy}
work=$(mktemp -d)
job=''
stop() { # what runs, with its children; each step is a process group of its own
  [[ -z $job ]] || kill -- "-$job" 2>/dev/null
  rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM
set -m
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Kernels are compiled anew: a cache of another day must not hide that one no longer compiles.
export TRITON_CACHE_DIR=$work/triton

"$python" -c 'import torch, triton' || {
  echo "FAILED  $python has no torch and Triton; make rehearse installs them"
  exit 1
}
[[ -d $numpy/numpy ]] || {
  echo "FAILED  $numpy holds no NumPy; make rehearse installs one"
  exit 1
}

steps=(measurements graphs compiling host ahead verification kernels training prediction)
declare -A does=(
  [measurements]='the parts of gpu.sh, with tiny sizes'
  [graphs]='gpu_graphs, with a stand-in for graphs'
  [compiling]='gpu_compile, by tiny blocks'
  [host]='host_time, whose launches do nothing'
  [ahead]='every Triton kernel that these programs launch, compiled for sm_90'
  [verification]='evodsp selftest on one CPU process'
  [kernels]='tests of kernels'
  [training]='the quickstart, two steps'
  [prediction]='a prediction by what these trained'
)
measurements() {
  # Without the last part, blocks compiled by torch, which take minutes on a CPU.
  "$python" -m scripts.benchmarks.gpu --cpu --backends chunked reference --output "$work/gpu" \
    --only machine checks blocks profile model peers anchors operators longest
}
graphs() { "$python" -m scripts.benchmarks.gpu_graphs --cpu; }
compiling() { "$python" -m scripts.benchmarks.gpu_compile --cpu --limit 600; }
host() { "$python" -m scripts.benchmarks.host_time; }
ahead() { "$python" -m scripts.benchmarks.gpu_ahead; }
verification() { "$python" -m evodsp selftest --cpu 1 --limit 900; }
kernels() { PYTHONPATH=$numpy:$PYTHONPATH "$python" -m pytest -q -m 'not verify' -p no:cacheprovider -n 2 tests/model/kernels; }
training() {
  "$python" -m evodsp fit --config configs/quickstart.yaml --output "$work/run" --trainer.max_steps 2 \
    --trainer.enable_progress_bar false --data.samples_per_epoch 2
}
prediction() {
  "$python" -m evodsp predict data/fasta/s005_A.fasta --alignments data/alignments \
    --checkpoint "$work/run/checkpoints/last.ckpt" --output "$work/predictions" --device cpu
}

failed=0
for step in "${@:-${steps[@]}}"; do
  [[ -n ${does[$step]:-} ]] || {
    echo "FAILED  $step is no step; there are: ${steps[*]}"
    exit 1
  }
  begun=$SECONDS
  "$step" >"$work/output" 2>&1 &
  job=$!
  wait "$job"
  code=$? job=''
  if ((code == 0)); then
    echo "ok      $step: ${does[$step]}, $((SECONDS - begun)) s"
  else
    echo "FAILED  $step: ${does[$step]}, $((SECONDS - begun)) s"
    tail -n 40 "$work/output" | sed 's/^/        /'
    failed=1
  fi
done
((failed)) || echo "all rehearsed"
exit "$failed"

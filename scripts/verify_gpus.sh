#!/usr/bin/env bash
# Verify evodsp on a machine with GPUs: kernels, half precision, training, resuming, prediction and sharding on one GPU; with several
# GPUs also transposes of collectives, parallel against serial, speed of the all-to-all, and training on several meshes.
#
#   scripts/verify_gpus.sh             use all GPUs of the machine, with NCCL
#   scripts/verify_gpus.sh --cpu 3     run the same checks on 3 CPU processes with gloo, to test the script itself; or on 1
#
#   --jobs N           how many checks of one device run at once; default: half as many as there are cores
#   --limit SECONDS    how long a check may take before it is ended and counts as failed; default: 300
#
# Each check prints a line that begins with 'ok' or 'FAILED'. If all succeed the last line is 'all verified' and the exit code is 0,
# otherwise 1. scripts/verify_gpus.expected.txt is an example. Set EVODSP_PYTHON to choose the interpreter; evodsp need not be
# installed in it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${EVODSP_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
exec "$python" -m scripts.verify_gpus "$@"

#!/usr/bin/env bash
# Measure evodsp on one GPU: self-checks, time, memory and launches of blocks and of the whole model, roofline, longest protein.
#
#   scripts/benchmarks/gpu.sh [--output DIR] [--minutes 9] [--only blocks model] [--backends triton]   on the first GPU that is visible; no network
#   scripts/benchmarks/gpu.sh --cpu                                                the same with tiny sizes, to try the program
#   scripts/benchmarks/gpu.sh --dry-run                                            list the parts
#
# Writes DIR/gpu.csv and DIR/gpu.md (default: scripts/benchmarks/results; with --cpu runs/benchmark_cpu), anew every five seconds.
# The exit code is 0 if all was measured, 1 if something failed or was left out for lack of time, which the report lists, and 2 if
# nothing can be measured here. Set EVODSP_PYTHON to choose the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${EVODSP_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
exec "$python" -m scripts.benchmarks.gpu "$@"

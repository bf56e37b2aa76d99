#!/usr/bin/env bash
# Run the paper's experiments (figures 5 to 9) on GPUs: every method, model, size and number of GPUs that fits on what there is.
#
#   scripts/paper/gpu.sh [--output DIR] [--only table4 table7]   on all GPUs of this machine, or of this SLURM job's nodes
#   scripts/paper/gpu.sh --cpu 2                                 on 2 CPU ranks with a tiny model, to try the program
#   scripts/paper/gpu.sh --dry-run                               print the commands
#
# table4: figure 5; table6: figure 7; table7: figures 6 and 9; figure8: figure 8. Cases that DIR (default: runs/paper_gpu) holds
# already are kept, so an interrupted run goes on. 'x': out of memory, or the method cannot spread the model. At the end DIR has
# results.csv, results.txt and PNG files. The exit code is 1 if a case failed otherwise. All 266 cases need 128 GPUs and a few hours;
# one machine with 8 GPUs runs those of up to 8. Set EVODSP_PYTHON to choose the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=runs/paper_gpu
only=() dry='' cpu=0
while (($#)); do
  case $1 in
    --output) output=${2:?a folder must follow --output} && shift 2 ;;
    --only) shift && while (($#)) && [[ $1 != --* ]]; do only+=("$1") && shift; done ;;
    --cpu) cpu=${2:?a number of ranks must follow --cpu} && shift 2 ;;
    --dry-run) dry=1 && shift ;;
    *) echo "gpu.sh: $1 is no option; use --output, --only, --cpu or --dry-run" >&2 && exit 2 ;;
  esac
done

python=${EVODSP_PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
nodes=${SLURM_JOB_NUM_NODES:-1}
options=()
if ((cpu)); then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  here=$cpu options+=(--cpu)
else
  here=${SLURM_GPUS_ON_NODE:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
fi
if ((here < 1)); then
  echo "gpu.sh: this machine has no GPU; use one that has, or try the program with --cpu 2" >&2
  exit 2
fi
options+=(--gpus "$((nodes * here))" --output "$output")

launcher() { # launcher RANKS: set `launch` to the command that starts RANKS ranks, on as few machines as can hold them
  local ranks=$1 used=1
  if ((ranks > here)); then used=$(((ranks + here - 1) / here)); fi
  launch=("$python" -m torch.distributed.run --nproc-per-node "$((ranks / used))")
  if [[ -n ${SLURM_JOB_ID:-} ]]; then
    local head
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    launch=(srun --nodes "$used" --ntasks-per-node 1 --kill-on-bad-exit=1 "${launch[@]}" --nnodes "$used"
      --rdzv-backend c10d --rdzv-endpoint "${head%%$'\n'*}:$((15000 + RANDOM % 15000))" --rdzv-id "$RANDOM")
  else
    launch+=(--standalone)
  fi
}

failed=0 number=0
listed=$("$python" -m scripts.paper.gpu list "${options[@]}" ${only[@]+--only "${only[@]}"})
total=$(wc -l <<<"$listed")
while read -r name ranks; do
  number=$((number + 1))
  launcher "$ranks"
  launch+=(-m scripts.paper.gpu run "$name" "${options[@]}")
  if [[ $dry ]]; then
    echo "${launch[*]}"
    continue
  elif [[ -f $output/$name.json ]]; then
    echo "$number/$total kept    $name"
    continue
  fi
  mkdir -p "$output"
  # Without its own standard input srun would read the list of cases. A rank whose GPU is full ends with an error, but has written 'x'.
  "${launch[@]}" >"$output/log.txt" 2>&1 </dev/null || true
  if [[ ! -f $output/$name.json ]]; then
    echo "$number/$total FAILED  $name"
    sed 's/^/        /' "$output/log.txt"
    failed=1
  elif grep -q '"status": "x"' "$output/$name.json"; then
    echo "$number/$total x       $name"
  else
    echo "$number/$total done    $name"
  fi
done <<<"$listed"
[[ $dry ]] || "$python" -m scripts.paper.gpu report --output "$output"
exit "$failed"

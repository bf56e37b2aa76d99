#!/usr/bin/env bash
# Unpack this kit, which scripts/benchmarks/kit.sh packed, and run a command that finds what is in it.
#
#   KIT/run.sh python3 -m scripts.benchmarks.gpu --output RESULTS     from the root of the source
#
# Unpacks into EVODSP_SITE (default: a folder of the user's in /tmp) what is not there yet: seconds the first time, later nothing.
# If something cannot be unpacked it says so and runs the command all the same, with the command's exit code.
set -euo pipefail
kit=$(cd "$(dirname "$0")" && pwd)
site=${EVODSP_SITE:-/tmp/evodsp-site-$(id -u)}

unpack() { # unpack ARCHIVE: into the folder that is its name up to the first dot, unless this very archive is there
  local name=${1##*/} sum
  local folder=$site/${name%%.*} mark=$site/$name.unpacked
  sum=$(cksum <"$1")
  [[ -f $mark && $(<"$mark") == "$sum" ]] && return
  mkdir -p "$folder"
  tar xJf "$1" -C "$folder" --no-same-owner 2>/dev/null || python3 -m tarfile -e "$1" "$folder"
  echo "$sum" >"$mark"
}

start=$SECONDS jobs=()
for archive in "$kit"/*.tar.xz; do
  unpack "$archive" >&2 &
  jobs+=("$!" "$archive")
done
for ((i = 0; i < ${#jobs[@]}; i += 2)); do
  wait "${jobs[i]}" || echo "FAILED: ${jobs[i + 1]} was not unpacked" >&2
done
echo "kit: $site, $((SECONDS - start)) s" >&2

# The source before other packages' folders; OpenFold last, since a clone of it also holds packages of common names.
export PYTHONPATH=$site/packages:$PWD:$site/cuequivariance${PYTHONPATH:+:$PYTHONPATH}:$site/openfold
exec "$@"

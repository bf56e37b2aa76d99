#!/usr/bin/env bash
# Pack what a GPU machine without network lacks into one folder, so that a run there is one command.
#
#   scripts/benchmarks/kit.sh FOLDER [--openfold CLONE] [--cuequivariance WHEELS]
#   FOLDER/run.sh python3 -m scripts.benchmarks.gpu --output RESULTS      there, from the root of the source
#
# That machine has Python 3.12, PyTorch, Triton and Lightning. FOLDER gets evodsp's other packages and, of peers that are at hand:
#
#   --openfold CLONE         a clone of OpenFold, of which only the folder openfold/ is taken
#   --cuequivariance WHEELS  a folder with the four wheels of cuEquivariance for CUDA 13
#
# FOLDER must not exist, and has at most 50 MiB when all is well; it is for that machine, and never for a repository. Needs a Python
# 3.12 with pip, which PYTHON names (default: python3.12), and xz. Compressing cuEquivariance takes two minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

fail() {
  echo "FAILED: $1" >&2
  exit 1
}

packages=(
  beartype==0.23.1 biopython==1.88 docstring_parser==0.18.0 gemmi==0.7.5 ihm==2.12 jsonargparse==4.53.0 modelcif==1.8
  omegaconf==2.4.0 ruamel.yaml==0.19.1 typeshed_client==2.14.0 zstandard==0.25.0
)
folder='' openfold='' cuequivariance=''
while (($#)); do
  case $1 in
    --openfold) openfold=${2:?} packages+=(dm-tree==0.1.10 ml_collections==1.1.0) && shift 2 ;;
    --cuequivariance) cuequivariance=${2:?} packages+=(platformdirs==4.14.8) && shift 2 ;;
    -*) fail "$1 is not an option; the first lines of $0 list them" ;;
    *) folder=$1 && shift ;;
  esac
done
[[ -n $folder ]] || fail "name the folder to make: $0 FOLDER"
[[ ! -e $folder ]] || fail "$folder exists; name a new folder"
python=${PYTHON:-python3.12}
[[ $("$python" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null) == "3 12" ]] ||
  fail "$python is no Python 3.12, which the packages must be for; set PYTHON"
[[ -z $openfold || -f $openfold/openfold/model/evoformer.py ]] ||
  fail "$openfold holds no openfold/model/evoformer.py; name a clone of OpenFold"
if [[ -n $cuequivariance ]]; then
  for name in cuequivariance cuequivariance_ops_cu13 cuequivariance_ops_torch_cu13 cuequivariance_torch; do
    compgen -G "$cuequivariance/$name-*.whl" >/dev/null || fail "$cuequivariance lacks a wheel of $name"
  done
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work"/{packages,openfold,cuequivariance.{torch,others}}

# All but one have wheels; pip builds that one.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --prefer-binary \
  --target "$work/packages" "${packages[@]}"
archives=(packages)
if [[ -n $openfold ]]; then
  cp -R "$openfold/openfold" "$work/openfold"
  archives+=(openfold)
fi
if [[ -n $cuequivariance ]]; then
  for wheel in "$cuequivariance"/cuequivariance*.whl; do
    part=others
    [[ $wheel != */cuequivariance_ops_torch* ]] || part=torch
    "$python" -m zipfile -e "$wheel" "$work/cuequivariance.$part"
  done
  rm -rf "$work"/cuequivariance.*/{include,lib64} # of a framework for tests
  archives+=(cuequivariance.torch cuequivariance.others)
fi

# All are compressed at once here, and unpacked at once there, into the folder that is an archive's name up to the dot.
mkdir -p "$folder"
jobs=()
for archive in "${archives[@]}"; do
  tar --sort=name --owner=0 --group=0 --numeric-owner --exclude=__pycache__ -C "$work/$archive" -c . |
    xz -6 >"$folder/$archive.tar.xz" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
cp "$here/kit_run.sh" "$folder/run.sh"
printf '%s\n' "${packages[@]}" >"$folder/packages.txt"

size=$(du -sk "$folder" | cut -f1)
echo "$folder: $(((size + 1023) / 1024)) MiB, ${archives[*]}"
((size <= 50 * 1024)) || fail "that is more than 50 MiB, which may not fit beside the source"

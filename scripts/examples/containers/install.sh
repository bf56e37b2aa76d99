#!/usr/bin/env bash
# Install evodsp's wheel into a new environment, with the versions that were tested together. Both recipes of this folder run it.
#
#   install.sh BUILD ENVIRONMENT     BUILD holds constraints.txt and one evodsp-*.whl
#
# EXTRAS: optional packages, such as [relax,hub]. PYTHON: the interpreter (default: python3).
set -euo pipefail
build=$1 environment=$2

wheels=("$build"/evodsp-*.whl)
if ((${#wheels[@]} > 1)) || [[ ! -f ${wheels[0]} ]]; then
  echo "install.sh: expected one evodsp-*.whl in $build, found: ${wheels[*]}; make wheel builds it into dist/" >&2
  exit 1
fi
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/python" -m pip install --no-cache-dir --constraint "$build/constraints.txt" "${wheels[0]}${EXTRAS:-}"
"$environment/bin/evodsp" --version

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Does a PyTorch worker's memory grow on a GPU? Two models, four workers under
# MPS, 24 producers, three kills, for eight minutes; needs python3 with torch and
# torchvision, neither Go nor a network.
#
#   make gpu-bundle                                       # here: binaries into build/gpu
#   OUT=results bash hack/gpu-soak.sh [SECONDS] [FLAG…]   # there; flags are those of hack/gpu/soak.py
#
# The verdict is in $OUT/soak.md, what each worker had every ten seconds in
# $OUT/memory.json.
set -u
cd "$(dirname "$0")/.."
seconds=${1:-480}
[ $# -gt 0 ] && shift
OUT=$(mkdir -p "${OUT:-gpu-soak}" && cd "${OUT:-gpu-soak}" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/build/gpu/python RINGBATCH_LIBRARY=$PWD/build/gpu/libringbatch.so
chmod +x build/gpu/* 2>/dev/null
mps=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d || echo "MPS does not start: this run is without it"
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$mps"' EXIT
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/machine.txt"
python3 hack/gpu/soak.py --seconds "$seconds" --device cuda --bundle build/gpu --out "$OUT" "$@" 2>&1 | tee "$OUT/run.log"
exit "${PIPESTATUS[0]}"

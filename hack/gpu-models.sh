#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Served model files, sizes that vary, compiled code and pipelines on a machine with an
# NVIDIA GPU and python3 with torch, torchvision, onnx, onnxruntime and Pillow; needs neither
# Go nor a network there. Figures are in docs/results/models.md, serve.md and pipelines.md.
#
#   make gpu-bundle                                     # here: binaries into build/gpu
#   OUT=results bash hack/gpu-models.sh [PART…]         # there: about six minutes
#
# Every part goes on when another fails.
set -uo pipefail
cd "$(dirname "$0")/.."
bundle=${BUNDLE:-$PWD/build/gpu}
OUT=$(mkdir -p "${OUT:-gpu-results}" && cd "${OUT:-gpu-results}" && pwd)
export PYTHONUNBUFFERED=1 PYTHON=${PYTHON:-python3} PYTHONPATH=${PYTHONPATH:-$bundle/python}:$PWD/hack/gpu RINGBATCH_LIBRARY=${RINGBATCH_LIBRARY:-$bundle/libringbatch.so} RINGBATCH_BINARY=$bundle/ringbatch
scratch=$(mktemp -d) # also for compiled code: the first start has none, unless a folder is given
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$scratch/compiled} CUDA_MPS_PIPE_DIRECTORY=$scratch/mps CUDA_MPS_LOG_DIRECTORY=$scratch/mps-log
mkdir -p -m 700 "$TORCHINDUCTOR_CACHE_DIR" "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
unset PYTHONDONTWRITEBYTECODE # else PyTorch's sources are compiled at every start
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$scratch/bytecode}
began=$SECONDS

say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - began)); }
timed() {
	local before=$EPOCHREALTIME
	"$@"
	awk -v a="$before" -v b="$EPOCHREALTIME" 'BEGIN { printf "took %.1f s\n", b - a }'
}

# ResNet-50 in float16, channels last: from the command to the end of its first batch, without code of an earlier start and with it.
start() {
	for how in auto auto off auto off; do
		timed timeout 120 "$bundle/ringbatch" torch resnet50:make --input 'x:f16[3,224,224]' --half --channels_last --compile $how --alone 32 <<< x
	done
}
# The same in three processes with a broker, until it answers and until all have attached.
restart() {
	timeout 150 "$PYTHON" hack/gpu/restart.py 3 3 --compile on
	timeout 60 "$PYTHON" hack/gpu/restart.py 2 3 --compile off
}
# The same served: 128 producers, 3 workers, batches of 32.
compiled() {
	TORCH_ARGS="--compile on" timeout 150 "$bundle/bench" --model_type=torch --model_path=resnet50:make --input_shape=3,224,224 --data_type=float16 \
		--worker_num=128 --model_num=3 --max_batch_size=32 --wait_time=0.010 --warmup=1s --duration=2s --max_windows=4 --stability=5 --json="$OUT/fp16-compiled.json"
}
# A .pt2 file in two processes.
exported() {
	"$PYTHON" hack/gpu/resnet50.py "$scratch/resnet50.pt2" && chmod 700 "$scratch" && chmod 600 "$scratch/resnet50.pt2"
	timeout 90 "$PYTHON" hack/gpu/exported.py "$scratch/resnet50.pt2"
}
lengths() { timeout 90 "$PYTHON" bench/python/models.py --only gpu_lengths --rounds 4 --seconds 2 --settle 0.5 --json "$OUT/gpu-lengths.json"; }
images() { timeout 90 "$PYTHON" bench/python/image_pipeline.py --nets 2 --seconds 2 --rounds 2 "$@"; }
images_fp32() { images; }
images_fp16() { images -- --half; }
images_large() { images --size 500x375 -- --half; }
# On the CPU: half of the cores compute, the others are for 64 Python producers and the broker.
cpu() {
	local half=$(($(nproc) / 2))
	timeout 60 "$PYTHON" bench/python/models.py --only onnx_fixed --side 224 --threads $half --apart load --rounds 3 --seconds 1.5 --settle 0.5 --json "$OUT/onnx-224.json"
	timeout 120 "$PYTHON" bench/python/models.py --threads $half --apart load --rounds 3 --seconds 1.5 --settle 0.5 --json "$OUT/models.json"
}
text() { CUDA_VISIBLE_DEVICES='' timeout 90 "$PYTHON" examples/python/read_text.py table --seconds 2; }

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader && nvidia-cuda-mps-control -d || say "no GPU or no MPS here"
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$scratch"' EXIT
for part in ${*:-start restart compiled exported lengths images_fp32 images_fp16 images_large cpu text}; do
	say "$part"
	"$part" 2>&1 | grep -v -e sympy/interp || say "$part failed"
done
say end

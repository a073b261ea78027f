#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU benchmark of docs/gpu.md, on a machine with an NVIDIA GPU and python3
# with torch and torchvision; needs neither Go nor a network there.
#
#   make gpu-bundle                                  # here: binaries into build/gpu
#   OUT=results bash hack/gpu-run.sh [PART…]         # there: about nine minutes
#
# Every part goes on when another fails; all output is in $OUT/run.log, figures
# in $OUT/*.json and, as tables, in $OUT/summary.md.
set -u
cd "$(dirname "$0")/.."
bundle=$PWD/build/gpu
OUT=$(mkdir -p "${OUT:-gpu-results}" && cd "${OUT:-gpu-results}" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH=$bundle/python RINGBATCH_LIBRARY=$bundle/libringbatch.so
parts=${*:-fp32 fp16 small small_ahead single fp32_launched fp16_launched small_launched single_launched fp16_as_is small_as_is single_as_is kill echo mlp mps_table native}
model=/tmp/ringbatch-res50.jit
began=$SECONDS
chmod +x "$bundle"/* 2>/dev/null
exec > >(tee "$OUT/run.log") 2>&1

say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - began)); }

# A private MPS daemon for everything, except where a part turns it off.
mps_on() {
	export CUDA_MPS_PIPE_DIRECTORY=/tmp/ringbatch-mps/pipe CUDA_MPS_LOG_DIRECTORY=/tmp/ringbatch-mps/log
	mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
	nvidia-cuda-mps-control -d || say "MPS does not start: the figures are without it"
}
mps_off() {
	echo quit | nvidia-cuda-mps-control
	unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
	sleep 1
}

# resnet NAME SECONDS FLAGS…: ResNet-50 through ringbatch, with its bound.
resnet() {
	local name=$1 limit=$2
	shift 2
	timeout "$limit" "$bundle/bench" --model_type=torch --model_path=$model --input_shape=3,224,224 --warmup=1s --stability=5 --json="$OUT/$name.json" "$@"
}

native() { # without MPS: one test makes a kernel fault on purpose
	mps_off
	(
		cd worker/cuda || exit
		fault=TestAnIllegalAddressEndsTheWorkerWithoutAnAnswer # by itself: the process has no GPU after it
		timeout 90 "$bundle/cuda.test" -test.v -test.skip $fault 2>&1 | grep -e '^---' -e '_test.go' -e '^[A-Z]*$'
		timeout 30 "$bundle/cuda.test" -test.v -test.run $fault 2>&1 | grep -e '^---' -e '_test.go' -e '^[A-Z]*$'
		timeout 60 "$bundle/cuda.test" -test.run '^$' -test.bench . -test.benchtime 1s
	)
	mps_on
}
mps_table() {
	timeout 100 python3 hack/gpu/mps_table.py $model "$OUT/mps-on.json"
	mps_off
	timeout 100 python3 hack/gpu/mps_table.py $model "$OUT/mps-off.json"
	mps_on
}
# Each with what a worker does by itself (module frozen, CUDA graphs), then
# without graphs, then with the module as it is; the bound has the same.
launched() { TORCH_ARGS=--no_cuda_graphs "$@"; }
as_is() { TORCH_ARGS="--no_cuda_graphs --no_freeze" "$@"; }
big() { resnet "$1" 120 --worker_num=128 --model_num=3 --max_batch_size=32 --wait_time=0.010 --data_type="$2" --duration=2s --max_windows=4; }
eight() { local name=$1; shift; resnet "$name" 90 "$@" --worker_num=8 --model_num=2 --max_batch_size=4 --wait_time=0.003 --data_type=float32 --duration=2s --max_windows=4; }
one() { resnet "$1" 60 --worker_num=1 --model_num=1 --max_batch_size=1 --wait_time=0.010 --data_type=float32 --duration=2s --max_windows=3; }
fp32() { big fp32 float32; }
fp32_launched() { launched big fp32-launched float32; }
fp32_as_is() { as_is big fp32-as-is float32; }
fp16() { big fp16 float16; }
fp16_launched() { launched big fp16-launched float16; }
fp16_as_is() { as_is big fp16-as-is float16; }
small() { eight small; }
small_ahead() { eight small-ahead --write_ahead; } # the next image is written while the producer waits
small_launched() { launched eight small-launched; }
small_as_is() { as_is eight small-as-is; }
single() { one single; }
single_launched() { launched one single-launched; }
single_as_is() { as_is one single-as-is; }
kill() { resnet kill 90 --suite=kill --worker_num=128 --model_num=3 --max_batch_size=32 --wait_time=0.010 --data_type=float16; }
echo_() { timeout 60 "$bundle/bench" --model_type=cuda-echo --input_shape=150528 --data_type=float32 --worker_num=14 --in_flight="$1" --max_batch_size="$2" --model_num=1 --wait_time=0.001 --duration=2s --max_windows=3 --json="$OUT/echo-$1-$2.json"; }
echo_all() { echo_ 4 32; echo_ 8 32; GPU_LANES=3 echo_ 8 16; }
mlp() {
	for d in f32 f16 bf16; do
		timeout 60 "$bundle/bench" --model_type=cuda-mlp --data_type=$d --worker_num=16 --in_flight=8 --max_batch_size=32 --model_num=1 --wait_time=0.001 --duration=2s --max_windows=3 --json="$OUT/mlp-$d.json"
	done
}

say "machine"
nvidia-smi --query-gpu=name,driver_version,compute_mode --format=csv,noheader
python3 -c 'import torch; print("torch", torch.__version__)'
nproc
python3 hack/gpu/resnet50.py $model
mps_on
for part in $parts; do
	((SECONDS - began > ${LIMIT:-510})) && say "$part left out: no time" && continue
	say "$part"
	case $part in echo) echo_all ;; *) "$part" ;; esac || say "$part failed"
done
mps_off
say "summary"
python3 hack/gpu/summary.py "$OUT" > "$OUT/summary.md" && cat "$OUT/summary.md"
say "done"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU rows of docs/results/gpu.md, on a machine with an NVIDIA GPU and python3
# with torch and torchvision; needs neither Go nor a network there.
#
#   make gpu-bundle                                  # here: binaries into build/gpu
#   OUT=results bash bench/gpu/run.sh [PART…]        # there: about six minutes
#
# Every part goes on when another fails; all output is in $OUT/run.log, figures
# in $OUT/*.json and, as tables, in $OUT/summary.md.
set -u
cd "$(dirname "$0")/../.."
bundle=$PWD/build/gpu
OUT=$(mkdir -p "${OUT:-gpu-results}" && cd "${OUT:-gpu-results}" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH=$bundle/python RINGBATCH_LIBRARY=$bundle/libringbatch.so RINGBATCH_BINARY=$bundle/ringbatch
parts=${*:-fp32 fp16 small single native}
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

# resnet NAME SECONDS FLAGS…: ResNet-50 through ringbatch, with its bound. TORCH_ARGS=--no-cuda-graphs is without graphs.
resnet() {
	local name=$1 limit=$2
	shift 2
	timeout "$limit" "$bundle/bench" --model_type=torch --model_path=$model --input_shape=3,224,224 --warmup=1s --stability=5 \
		--duration=2s --max_windows=4 --json="$OUT/$name.json" "$@"
}
fp32() { resnet fp32 120 --worker_num=128 --model_num=3 --max_batch_size=32 --wait_time=0.010 --data_type=float32; }
fp16() { resnet fp16 120 --worker_num=128 --model_num=3 --max_batch_size=32 --wait_time=0.010 --data_type=float16; }
small() { resnet small 90 --worker_num=8 --model_num=2 --max_batch_size=4 --wait_time=0.003 --data_type=float32; }
single() { resnet single 60 --worker_num=1 --model_num=1 --max_batch_size=1 --wait_time=0.010 --data_type=float32; }
packed() { timeout 200 python3 bench/gpu/packed.py --json "$OUT/packed.json"; } # an encoder on texts of all lengths
embeddings() { # a folder of transformers on texts of all lengths
	timeout 300 python3 bench/peers/embeddings.py --device cuda --layers 12 --width 768 --clients 64 --rounds 1 --seconds 4 --processes 3 \
		--json "$OUT/embeddings.json"
}
weights() { timeout 200 python3 bench/gpu/weights.py --json "$OUT/weights.json"; } # live weights
atoms() { timeout 240 python3 -W ignore bench/gpu/atoms.py --json "$OUT/atoms.json"; } # ASE and MACE
lanes() { timeout 90 python3 bench/python/lanes.py --device cuda --rounds 3 --seconds 3 --json "$OUT/lanes.json"; } # a decoder
turns() { timeout 400 python3 bench/gpu/turns.py --json "$OUT/turns.json"; } # two models that do not fit together
native() { # without MPS: one test makes a kernel fault on purpose
	mps_off
	(
		cd worker/cuda || exit
		fault=TestAnIllegalAddressEndsTheWorkerWithoutAnAnswer # by itself: the process has no GPU after it
		timeout 90 "$bundle/cuda.test" -test.v -test.skip $fault 2>&1 | grep -e '^---' -e '_test.go' -e '^[A-Z]*$'
		timeout 30 "$bundle/cuda.test" -test.v -test.run $fault 2>&1 | grep -e '^---' -e '_test.go' -e '^[A-Z]*$'
	)
	mps_on
}

say "machine"
nvidia-smi --query-gpu=name,driver_version,compute_mode --format=csv,noheader
python3 -c 'import torch; print("torch", torch.__version__)'
nproc
python3 bench/gpu/resnet50.py $model
mps_on
for part in $parts; do
	((SECONDS - began > ${LIMIT:-510})) && say "$part left out: no time" && continue
	say "$part"
	"$part" || say "$part failed"
done
mps_off
say "summary"
python3 bench/gpu/summary.py "$OUT" > "$OUT/summary.md" && cat "$OUT/summary.md"
say "done"

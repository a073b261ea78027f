#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tensors in device memory on a GPU, without Python: C producers (cbindings/testdata/device.c),
# a C worker and the native one, kills, with MPS and without. From the repository's root:
#
#   make gpu-bundle && RINGBATCH=build/gpu/ringbatch bash hack/gpu/device_native.sh
RINGBATCH=$(realpath "${RINGBATCH:-build/gpu/ringbatch}")
T=$(mktemp -d)
export RINGBATCH_SOCKET=$T/b.sock
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; }
build() { cc -std=gnu11 -D_GNU_SOURCE -O2 -Icbindings -DRB_VERSION='"dev"' $2 -pthread -o "$T/$1" cbindings/testdata/device.c cbindings/src/*.c -ldl; }
ask() { timeout 20 "$T/$1" client "$RINGBATCH_SOCKET" "${@:2}" 2>&1 | tr '\n' ' '; } # PROGRAM MODEL REQUESTS HOW
await() { for _ in $(seq 200); do grep -q "$2" "$1" && return; sleep 0.1; done; cat "$1"; exit 1; } # FILE TEXT
end() { kill "$@" 2>/dev/null; wait "$@" 2>/dev/null; }
trap 'kill -9 $(jobs -p) 2>/dev/null; rm -rf "$T"' EXIT
SMALL='x:f32[1024]@device:0 -> y:f32[1024]@device:0 sum:f32[]'
build device "" && build row -DWIDTH=150528 || exit 1

round() {
	echo "== $1"
	"$RINGBATCH" broker >"$T/broker.log" 2>&1 & B=$!
	sleep 0.3
	"$T/device" worker "$RINGBATCH_SOCKET" m "$SMALL" >"$T/w.log" 2>&1 & W=$!
	await "$T/w.log" "attached"
	for how in stream patient hasty; do echo "C worker, busy stream, $how: $(BUSY=1073741824 ask device m 400 $how)"; done
	end $W
	DIE=1 "$T/device" worker "$RINGBATCH_SOCKET" k "$SMALL" >"$T/w1.log" 2>&1 &
	await "$T/w1.log" "attached"
	ask device k 400 stream >"$T/c.log" & C=$!
	sleep 1
	"$T/device" worker "$RINGBATCH_SOCKET" k "$SMALL" >"$T/w2.log" 2>&1 & W=$!
	wait $C
	echo "its allocator killed with a batch: $(cat "$T/c.log")"
	for i in 1 2 3; do
		BUSY=1073741824 "$T/device" client "$RINGBATCH_SOCKET" k 100000 stream >/dev/null 2>&1 & K=$!
		sleep 0.7; kill -9 $K; wait $K 2>/dev/null
	done
	echo "after three killed clients: $(ask device k 200 stream)"
	kill -9 $W; wait $W 2>/dev/null
	sleep 0.3; echo "GPU memory in use, nobody but the broker there: $(used) MiB"
	"$RINGBATCH" worker --model affine --name n --gpu 0 --depth 3 --scale 1 --offset 1 --input 'x:f32[150528]@device:0' \
		--slots 512 --max_batch_size 32 --wait_time 0s >"$T/n.log" 2>&1 & W=$!
	await "$T/n.log" "ring registered"
	for how in stream patient; do echo "native worker, rows of 602,112 bytes, $how: $(ask row n 400 $how)"; done
	echo "busy stream: $(BUSY=1073741824 ask row n 200 stream)"
	echo "busy stream, hasty: $(BUSY=1073741824 ask row n 200 hasty)"
	echo "one at a time: $(ONE=1 UNCHECKED=1 ask row n 2000 stream)"
	end $W; end $B
	sleep 0.3; echo "GPU memory in use: $(used) MiB"
}

echo "GPU memory in use before: $(used) MiB"
export CUDA_MPS_PIPE_DIRECTORY=$T/mps CUDA_MPS_LOG_DIRECTORY=$T/mpslog
mkdir -p "$T/mps" "$T/mpslog"
nvidia-cuda-mps-control -d && { round "with MPS"; echo quit | nvidia-cuda-mps-control; }
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
round "without MPS"
echo "GPU memory in use at the end: $(used) MiB"

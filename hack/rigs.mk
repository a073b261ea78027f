# SPDX-License-Identifier: Apache-2.0
# Rigs that break things on purpose, tests with other servers, and generated files. Included by the Makefile.

.PHONY: envoy-test triton-test hosts-test hosts-short chaos chaos-short soak orders compat arm64 proto onnx-go-test

# deploy/envoy with a real Envoy
envoy-test:
	./deploy/envoy/test.sh

# a relay to a real Triton server (installs 2 GB)
triton-test:
	./deploy/triton/test.sh

# relays on a real network: hosts as network namespaces, killed, cut off and upgraded
hosts-test:
	@mkdir -p bin && go build -o bin/ ./cmd/ringbatch ./test/cmd/hosts
	./bin/hosts

# the same in a minute, for CI
hosts-short:
	@mkdir -p bin && go build -o bin/ ./cmd/ringbatch ./test/cmd/hosts
	./bin/hosts --short

# chaos, and beside it the Python client with the C library.
.PHONY: chaos-build
chaos-build: build
	go build -o bin/chaos ./test/cmd/chaos
	$(MAKE) -s -C cbindings BUILD=$(CURDIR)/build/c $(CURDIR)/build/c/libringbatch.so
	cp build/c/libringbatch.so bin/
	rm -rf bin/python && mkdir bin/python && cp -r python/ringbatch bin/python/

# Its Python peers need NumPy: the Python of the Python tests, where they have been run.
CHAOS_RUN = RINGBATCH_PYTHON=$${RINGBATCH_PYTHON:-$(wildcard $(CURDIR)/build/python-venv/bin/python)} ./bin/chaos

# the memory orders of the words that processes share, in every execution of the C11 model; wants cargo and its registry
orders:
	@command -v cargo >/dev/null || { echo "install cargo (rustup.rs, or the Debian package) first" >&2; exit 1; }
	cd test/model/orders && CARGO_TARGET_DIR=$(CURDIR)/build/orders nice cargo run --quiet --locked

# this tree's broker with the clients and workers of an earlier commit, in Go and C, and the other way round
compat:
	nice test/compat/check.sh

# broker, C and Go peers and the Python package for arm64, under qemu's user emulation (PARTS="go c python")
arm64:
	nice test/arm64/check.sh $(PARTS)

# kill campaigns on real processes, at full length; CHAOS has flags, like --only sequences
chaos: chaos-build
	$(CHAOS_RUN) $(CHAOS)

# the same in a minute or two
chaos-short: chaos-build
	$(CHAOS_RUN) --short

# 20 models with room for 5 under random load, the same with faults, steps of a load: half an hour; SECONDS of each for shorter
.PHONY: sleep-test
sleep-test: chaos-build
	$(CHAOS_RUN) --only turns,sleep,steps $(if $(SECONDS),--events $(SECONDS))

# the long runs: hours on 2 cores; docs/results/torture.md has the results
.PHONY: torture
torture: chaos-build
	go test -count=1 -timeout 0 -v -run Simulated ./broker/engine -seeds 1000000
	go test -count=1 -timeout 0 -v -run RandomSchedules ./broker/batcher -schedules 1000000
	$(CHAOS_RUN) --seeds 10 --only clients,workers,brokers,stops,poison,signals,hostile
	$(CHAOS_RUN) --soak 2h

SOAK ?= 20m
# everything at once at low intensity for SOAK
soak: chaos-build
	$(CHAOS_RUN) --soak $(SOAK)

# ONNX files served from Go, with the ONNX Runtime of the Python tests
onnx-go-test: onnx-go
	cd worker/onnx && CGO_ENABLED=1 go vet ./... && \
	  found=$$(ls $(CURDIR)/build/python-venv/lib/python3*/site-packages/onnxruntime/capi/libonnxruntime.so.* 2>/dev/null | \
	    head -n 1 || true) && \
	  ONNXRUNTIME_LIBRARY=$${ONNXRUNTIME_LIBRARY:-$$found} CGO_ENABLED=1 go test -count=1 ./...

# protoc comes with the Python package grpcio-tools; the plugins are pinned.
# regenerate the gateway's messages from gateway/oip/inference.proto
proto:
	@test -x build/proto/bin/python || hack/venv.sh build/proto grpcio-tools==1.81.1
	GOBIN=$(CURDIR)/build/proto/bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
	GOBIN=$(CURDIR)/build/proto/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
	cd gateway/oip && PATH=$(CURDIR)/build/proto/bin:$$PATH $(CURDIR)/build/proto/bin/python -m grpc_tools.protoc -I . \
	  --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative inference.proto

# An environment with the packages that ringbatch.rl adapts.
RL_PYTHON ?= $(CURDIR)/build/rl/bin/python
RL = PYTHONPATH=$(CURDIR)/python RINGBATCH_LIBRARY=$(CURDIR)/build/c/libringbatch.so RINGBATCH_BINARY=$(CURDIR)/bin/ringbatch

# the adapters with TorchRL, Gymnasium and OpenSpiel, and short runs of their examples
.PHONY: rl-build torch-short rl-test rl self-play
rl-test: rl-build
	hack/venv.sh build/rl torchrl==0.14.1 open_spiel==2.0.2
	cd python/tests && $(RL) $(RL_PYTHON) -m pytest -c ../pyproject.toml --rootdir=. --timeout 300 -n 2 --dist loadfile \
	  test_rl.py test_rl_openspiel.py test_rl_torchrl.py

# what needs torch, for CI: modules, packed batches and state, the actors of Gymnasium, IMPALA while processes are killed, and atoms
torch-short: rl-build
	cd python/tests && $(RL) $(RL_PYTHON) -m pytest -c ../pyproject.toml --rootdir=. --timeout 300 -n 2 --dist loadfile \
	  -k '(not impala or learns) and not compiled' \
	  test_ase.py test_rl.py test_torch.py test_torch_files.py test_torch_odd.py test_torch_trials.py test_packed.py test_lists.py test_state_models.py

rl-build: build
	$(MAKE) -s -C cbindings BUILD=$(CURDIR)/build/c $(CURDIR)/build/c/libringbatch.so
	@test -e build/rl/bin/i-pi || hack/venv.sh build/rl torch==2.15.0 gymnasium==1.4.0 ase==3.29.0 matscipy==1.3.1 ipi==3.3.1 \
	  pytest pytest-timeout pytest-xdist

# IMPALA in full, without and with kills; the learning curves go to docs/images
rl: rl-test
	mkdir -p -m 700 build/curves
	for env in CartPole-v1 catch:Catch-v0; do \
	  for kill in 0 5; do \
	    $(RL) RINGBATCH_SOCKET=$(CURDIR)/build/curves/b.sock \
	      $(RL_PYTHON) examples/python/impala.py --env $$env --kill $$kill --curve build/curves/$$kill.json; \
	    tail -c 100 build/curves/$$kill.json; \
	  done; \
	  hack/curve.py "$${env#*:}: mean score of 100 episodes" docs/images/rl-$${env#*:}.svg \
	    "no kills"=build/curves/0.json "a process killed every 5 s"=build/curves/5.json; \
	done

# architectures of six libraries, each served by one line and compared with a direct call; docs/results/zoo.md has the table
.PHONY: zoo
zoo: build
	$(MAKE) -s -C cbindings BUILD=$(CURDIR)/build/c $(CURDIR)/build/c/libringbatch.so
	@test -e build/zoo/bin/pytest || hack/venv.sh build/zoo torch==2.15.0 torchvision==0.29.2 transformers==5.23.0 timm==1.0.31 \
	  segmentation-models-pytorch==0.6.0 diffusers==0.42.1 scikit-learn==1.9.1 sentence-transformers==6.2.0 \
	  pytest pytest-timeout
	cd python/tests && $(RL) nice $(CURDIR)/build/zoo/bin/python -m pytest -c ../pyproject.toml --rootdir=. --timeout 300 test_hf.py
	$(RL) nice build/zoo/bin/python python/zoo/run.py --table docs/results/zoo.md

# Connect Four by self-play at full length; docs/tutorials/self-play.md has the results
self-play: rl-test
	$(RL) RINGBATCH_SOCKET=$$(mktemp -d)/b.sock $(RL_PYTHON) examples/python/self_play.py --json build/self-play.json
	hack/curve.py "Connect Four: score against 64 random rollouts a move" docs/images/self-play-strength.svg net=build/self-play.json

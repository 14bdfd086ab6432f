# Two commands do all the set-up, in .venv: `make quickstart` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA GPU, a CPU build of torch is enough and much smaller.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: system setup quickstart test fuzz property test-sglang test-cli test-clis test-docker test-apptainer test-slime test-verl test-vllm check clean

# Sandboxes need bubblewrap, grading git and patch, tests npm; only what is missing is installed.
system:
	@missing=""; for pair in bwrap:bubblewrap git:git patch:patch npm:npm; do \
	  command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair##*:}"; done; \
	if [ -n "$$missing" ]; then $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; fi

setup: system $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[engine,zstd,dev]'
	touch $@

quickstart: setup
	$(BIN)/polar-plugin quickstart --out out

test: setup
	$(BIN)/python -m pytest -m "not sglang and not cli and not slime and not apptainer and not docker and not verl"

# 100 000 mutated requests of each model API; `make test` has 1 500 of them.
fuzz: setup
	$(BIN)/python -m tests.proxy.fuzz --count 100000

test-sglang: setup
	tests/sglang_cpu/install.sh
	$(BIN)/python -m pytest -m sglang

test-cli: setup
	$(BIN)/python -m tests.cli.install pi codex claude_code
	$(BIN)/python -m pytest -m cli

test-clis: setup
	$(BIN)/python -m tests.cli.install
	$(BIN)/python -m pytest -m cli --conformance
	$(BIN)/python -m tests.cli.conformance

# Installs and starts an engine where none answers, and fails where that cannot be.
test-docker: setup
	tests/runtimes/docker.sh
	$(BIN)/python -m pytest -m docker

# Installs Apptainer into .cache, and an image by debootstrap.
test-apptainer: setup
	tests/runtimes/apptainer.sh
	$(BIN)/python -m tests.cli.install pi
	$(BIN)/python -m pytest -m apptainer

test-slime: setup
	$(BIN)/python -m pytest -m slime

# verl has an environment of its own: it pins other versions than ours.
test-verl: .cache/verl/.ready
	.cache/verl/bin/python -m pytest -W default -m verl tests/verl

.cache/verl/.ready: pyproject.toml tests/verl/install.sh
	PYTHON=$(PYTHON) TORCH="$(TORCH)" tests/verl/install.sh .cache/verl
	touch $@

test-vllm: setup
	$(BIN)/python -m pytest tests/engine/test_vllm.py -k live

# 200 000 random sessions against the oracle: hours. A part at a time: ARGS='-k says[0]'.
property: setup
	$(BIN)/python -m pytest tests/property --sessions 200000 $(ARGS)

check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .cache out

# Two commands do all the set-up, in .venv: `make quickstart` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA GPU, a CPU build of torch is enough and much smaller.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

.PHONY: setup quickstart test test-all test-sglang test-cli test-slime test-vllm check clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[engine,zstd,dev]'
	touch $@

quickstart: setup
	$(BIN)/polar-plugin quickstart --out out

test: setup
	$(BIN)/python -m pytest -m "not sglang and not cli and not slime"

test-sglang: setup
	tests/sglang_cpu/install.sh
	$(BIN)/python -m pytest -m sglang

test-cli: setup
	tests/harnesses/install_pi.sh
	PI_ROOT=$(CURDIR)/.cache/pi $(BIN)/python -m pytest -m cli

test-slime: setup
	$(BIN)/python -m pytest -m slime

test-vllm: setup
	$(BIN)/python -m pytest tests/engine/test_vllm.py -k live

check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .cache out

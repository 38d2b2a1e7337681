# Everything runs from a bare machine: the first target that needs it makes the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= demo
MESSAGES ?= 1000000
SEED ?= 0
KILLS ?= 100
RUNS ?= 20
SHARDS ?= 2
# Else every process that a test or the demo starts would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install test test-quick test-repeated test-heavy test-failed test-long test-wheel test-pages test-sglang test-vllm test-ray test-slurm test-verl test-environments fuzz chaos check demo demo-sglang docs clean

help:
	@echo "make demo     train a tiny calculator policy end to end, and show what happened (3 minutes on 2 cores, once installed)"
	@echo "make demo-sglang SGLANG_PYTHON=PATH   the same over a real SGLang server on the CPU (docs/engines.md)"
	@echo "make test     the tests, but for those of the targets that follow test-quick (8 minutes on 2 cores)"
	@echo "make test-quick  the fast ones of them (1 minute)"
	@echo "make test-repeated  make test again and again, to find tests that fail by chance (RUNS=20; 6 to 8 minutes each on 2 cores)"
	@echo "make test-heavy  those that compile layers, train on several ranks, or wait for limits of time (6 minutes)"
	@echo "make test-failed  those that failed the last time, one after the other"
	@echo "make test-long   whole runs of minutes, several of which have processes killed (10 minutes)"
	@echo "make test-wheel  build the package, install it elsewhere, and run its demo in an empty folder (4 minutes)"
	@echo "make test-pages  the page of asyncrl dashboard in a real Chromium (2 minutes; needs Debian's chromium)"
	@echo "make test-sglang SGLANG_PYTHON=PATH   the tests that need a real SGLang server, on the CPU (10 minutes on 2 cores)"
	@echo "make test-vllm VLLM_PYTHON=PATH   those that need a real vLLM server, on the CPU (4 minutes on 2 cores)"
	@echo "make test-verl VERL_PYTHON=PATH   the tests that compare with the real verl (2 minutes on 2 cores)"
	@echo "make test-ray  runs on a Ray cluster of four nodes, which are killed, and worker groups (15 minutes on 2 cores; installs asyncrl[ray])"
	@echo "make test-slurm  runs as jobs of a real Slurm with three nodes (8 minutes on 2 cores; needs root, slurm-wlm and munge)"
	@echo "make test-environments  the tests with packages of environments that need a Python of their own, which it makes (3 minutes on 2 cores)"
	@echo "make fuzz     damaged messages at a replay, a weight publisher and the endpoint of agents (MESSAGES=1000000 SEED=0)"
	@echo "make chaos    kill -9 at random moments of a whole run, and what it kept to (KILLS=100 SEED=0 SHARDS=2)"
	@echo "make check    ruff, mypy and the rules of plain English"
	@echo "make docs     write the generated pages of docs/ anew"
	@echo "make clean    remove the virtual environment and every run"

# pip's own bars show how much of a file is left.
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

install: $(VENV)/installed

# What the demo and every command need, without linters, tests and sinks.
$(VENV)/package: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "== 1 of 2: torch and the packages that it needs (3 GB with CUDA, 300 MB without)"
	$(PIP) torch
	@echo "== 2 of 2: asyncrl and the packages that it needs (200 MB)"
	$(PIP) --editable .
	@touch $@

$(VENV)/installed: $(VENV)/package
	@echo "== the optional packages, the tests and the checks (400 MB)"
	$(PIP) --editable '.[dev]'
	@touch $@

PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest
NO_SERVERS := --dist worksteal --ignore=tests/sglang --ignore=tests/vllm --ignore=tests/ray --ignore=tests/slurm \
	--ignore=tests/environments

# Two workers more than cores, since many of these tests wait for processes and for limits of time.
TESTS := -n 4 $(NO_SERVERS) -m "not heavy and not long and not browser"

test: install
	$(PYTEST) $(TESTS) $(ARGS)

# On two cores `ARGS="--at-once 2"` keeps both busy: each run then takes twice as long.
test-repeated: install
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.repeated --runs $(RUNS) $(ARGS) -- $(TESTS)

# Each file in one worker: many of its tests share what a minute of two ranks made.
test-heavy: install
	$(PYTEST) -n 3 $(NO_SERVERS) --dist loadfile -m "heavy and not long" $(ARGS)

# The tests that failed the last time, one after the other.
test-failed: install
	$(PYTEST) -n 0 --last-failed --last-failed-no-failures none $(ARGS)

test-quick: install
	$(PYTEST) -n 2 $(NO_SERVERS) -m "not slow and not heavy and not long and not browser"

test-long: install
	$(PYTEST) -n 2 $(NO_SERVERS) -m long $(ARGS)

test-wheel: install
	$(BIN)/python -m tests.packaging.check_wheel $(ARGS)

test-pages: install
	$(PYTEST) -n 0 -rs -m browser tests/dashboard $(ARGS)

# One after the other: a server takes 2 GB and a core.
test-sglang: install
	@test -n "$(SGLANG_PYTHON)" || { echo "name a Python that has sglang: make test-sglang SGLANG_PYTHON=PATH"; exit 2; }
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE ASYNCRL_SGLANG_PYTHON=$(SGLANG_PYTHON) \
		$(if $(ROUTER_PYTHON),ASYNCRL_SGLANG_ROUTER_PYTHON=$(ROUTER_PYTHON)) $(BIN)/python -m pytest -rs tests/sglang $(ARGS)

test-vllm: install
	@test -n "$(VLLM_PYTHON)" || { echo "name a Python that has vllm: make test-vllm VLLM_PYTHON=PATH"; exit 2; }
	ASYNCRL_VLLM_PYTHON=$(VLLM_PYTHON) $(PYTEST) tests/vllm

test-verl: install
	@test -n "$(VERL_PYTHON)" || { echo "name a Python that has verl: make test-verl VERL_PYTHON=PATH"; exit 2; }
	ASYNCRL_VERL_PYTHON=$(VERL_PYTHON) $(PYTEST) tests/compat

test-ray: install
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(PYTEST) tests/ray

# One after the other: all are jobs of one cluster.
test-slurm: install
	$(PYTEST) -n 0 -rs tests/slurm $(ARGS)

# Each package in a virtual environment in .cache/environments; skipped, with the reason, where it does not install.
test-environments: install
	$(PYTEST) -n 2 --dist loadfile -rs tests/environments $(ARGS)

fuzz: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.security.fuzz --messages $(MESSAGES) --seed $(SEED)

chaos: install
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
		$(BIN)/python -m tests.chaos.monkey --kills $(KILLS) --seed $(SEED) --shards $(SHARDS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.plain_english

demo: $(VENV)/package
	$(BIN)/asyncrl demo run.name=$(RUN) $(ARGS)

demo-sglang: $(VENV)/package
	@test -n "$(SGLANG_PYTHON)" || { echo "name a Python that has sglang: make demo-sglang SGLANG_PYTHON=PATH"; exit 2; }
	$(BIN)/asyncrl demo run.name=$(RUN)-sglang engine=sglang_cpu engine.python=$(SGLANG_PYTHON) $(ARGS)

docs: install
	$(BIN)/python -m asyncrl.config.docs docs/configuration.md
	$(BIN)/python -m asyncrl.algorithms.docs docs/algorithms.md
	$(BIN)/python -m asyncrl.compat.verl.configuration.page docs/verl.md
	$(BIN)/python -m asyncrl.compat.trl.page docs/trl.md
	$(BIN)/python -m asyncrl.observe.registry.page docs/metrics.md

clean:
	rm -rf $(VENV) runs .cache

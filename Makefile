# Everything runs in .venv, which `make` creates where it is missing: nothing but Python 3.10 or newer is needed.

# The interpreter that creates .venv; gpu-check and gpu-cluster run in it directly.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Options for the command that a target runs: make test ARGS="-k layout"
ARGS ?=
# Several workers, each with the tests of a file in their order as far as that is balanced.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# A command, and mypy beside it, which uses the time in which tests wait; what it says comes last.
define beside-types
@$(BIN)/mypy > $(VENV)/types.log 2>&1 & types=$$!; \
$(1); tests=$$?; \
wait $$types; types=$$?; \
echo "mypy: $$(cat $(VENV)/types.log)"; \
exit $$((tests | types))
endef
# For gpu-check: a folder of wheels to put on the path on a machine that cannot install.
WHEELS ?=

.DEFAULT_GOAL := help
# A .venv that could not be made, as without Debian's python3-venv, is made again.
.DELETE_ON_ERROR:
.PHONY: help bench install install-test lint test test-all test-quick newcomer docs dist overhead train-for-real data-speed model-speed launch-time status-speed report-speed long-run bubbles parity-matrix parity-experts virtual-matrix virtual-step virtual-truth phases-truth memory-truth plan-truth compare-truth ranks-truth split attack gpu-check gpu-cluster slurm-up slurm-down clean

help:  ## show the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

bench: install  ## compare ddp, pipeline + ddp and fsdp on this machine
	$(BIN)/python train.py -m model=gpt_tiny parallel=ddp,pdp,fsdp repeat=9 train.steps=20 $(ARGS)

install: $(VENV)/.installed  ## install the project into .venv

install-test: $(VENV)/.installed-test

test: lint  ## lint, types and tests, in ten minutes on two cores
	$(call beside-types,$(PYTEST) $(ARGS))

test-all: lint  ## the same with every product, every command of the pages and long races, in half an hour
	$(call beside-types,$(PYTEST) -m "not slow" $(ARGS))

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test-quick: install-test  ## the tests that start no ranks and no SLURM, in a minute
	$(BIN)/python -m pytest -m "not ranks and not slurm and not mpi and not slow and not thorough" $(ARGS)

newcomer: install-test  ## the wheel in an empty environment, every command of the pages, a terminal, a browser: an hour or so
	$(BIN)/python -m pytest -m slow tests/newcomer $(ARGS)

docs: $(VENV)/.installed-docs  ## build the documentation into docs/_build/html; broken links fail
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)

dist: install-test  ## build the source archive and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation $(ARGS)
	$(BIN)/python -m twine check --strict dist/*

overhead: install  ## what steps and checkpoints cost, and whether collectives and products are timed right
	$(BIN)/python benchmarks/overhead.py $(ARGS)
	$(BIN)/python benchmarks/checkpoint_cost.py
	$(BIN)/python benchmarks/collectives_truth.py
	$(BIN)/python benchmarks/matmul_truth.py

train-for-real: install-test  ## whether training comes to a result: digits to an accuracy, text to its bits per byte
	$(BIN)/python benchmarks/train_for_real.py $(ARGS)

data-speed: install  ## what each data pipeline delivers, and how fast the step loop asks for it
	$(BIN)/python benchmarks/data_speed.py $(ARGS)

model-speed: install-test  ## our GPT-2, Llama or Mixtral against the one of transformers
	$(BIN)/python benchmarks/model_speed.py $(ARGS)

launch-time: install  ## how long local ranks take to start, against torchrun, and what a run of a sweep costs
	$(BIN)/python benchmarks/launch_time.py $(ARGS)

status-speed: install  ## how long `ptdbench status` takes on a sweep of 1,000 runs
	$(BIN)/python benchmarks/status_speed.py $(ARGS)

report-speed: install-test  ## how long a report of 1,000 and of 10,000 runs takes to write, and to open in Chromium
	$(BIN)/python benchmarks/report_speed.py $(ARGS)

long-run: install  ## 50,000 steps of toy: do memory, saves and evaluations stay as they began
	$(BIN)/python -m benchmarks.long_run $(ARGS)

plan-truth: install  ## how fast and how right `ptdbench plan` and train.micro_batch=max are; ARGS="--only sizes"
	$(BIN)/python benchmarks/plan_truth.py $(ARGS)

compare-truth: install-test  ## how often repeats tell identical configurations apart, and miss slower ones: an hour
	$(BIN)/python benchmarks/compare_truth.py $(ARGS)

ranks-truth: install-test  ## how often ranks are wrong, and decide, in made sweeps; ARGS="--bench 20": make bench 20 times
	$(BIN)/python -m benchmarks.ranks_truth $(ARGS)

split: install  ## few long runs or many short ones: which tell more in a given time
	$(BIN)/python -m benchmarks.split $(ARGS)

phases-truth: install  ## the phases of a step against steps whose communication costs nothing
	$(BIN)/python benchmarks/phases_truth.py $(ARGS)

memory-truth: install  ## what plan says of each rank's training state and messages, against the same steps on real ranks
	$(BIN)/python benchmarks/memory_truth.py $(ARGS)

bubbles: install  ## how long each pipeline schedule idles, against its formula
	$(BIN)/python benchmarks/bubbles.py $(ARGS)

parity-matrix: install  ## does every layout compute the same numbers under every lever; the table of docs/parity.md
	$(BIN)/python benchmarks/parity_matrix.py $(ARGS)

parity-experts: install  ## losses and norms of gradients of a model with experts, every layout against one rank; the table of docs/experts.md
	$(BIN)/python benchmarks/parity_experts.py $(ARGS)

virtual-matrix: install  ## does every layout run on virtual GPUs, in each precision; the table of docs/virtual.md
	$(BIN)/python benchmarks/virtual_matrix.py $(ARGS)

virtual-step: install  ## kernels, bytes, FLOPs and memory of a training step on a virtual GPU: ours, nanoGPT's and transformers'
	$(BIN)/python benchmarks/virtual_step.py $(ARGS)

virtual-truth: install  ## memory reserved on virtual GPUs, against what torchtitan has published; the table of docs/virtual.md
	$(BIN)/python benchmarks/virtual_truth.py $(ARGS)

attack: install  ## SIGKILL random processes of real runs 250 times: is anything lost; ARGS="--slurm 0" without SLURM
	$(BIN)/python -m benchmarks.attack $(ARGS)

gpu-check:  ## the acceptance run of one GPU: make gpu-check PYTHON=python3 WHEELS=wheels ARGS="--part numbers"
	$(PYTHON) -m benchmarks.gpu_check $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

gpu-cluster:  ## every layout, the links, and failures under every launcher, on two GPUs or more; in an allocation on all its nodes
	$(PYTHON) -m benchmarks.gpu_cluster $(ARGS)

slurm-up: $(BIN)/python  ## start a SLURM of two nodes on this machine, as root; make test does it by itself
	$(BIN)/python -m tests.slurm_cluster up $(ARGS)

slurm-down: $(BIN)/python  ## stop it and remove what it wrote
	$(BIN)/python -m tests.slurm_cluster down $(ARGS)

clean:  ## remove .venv, caches and what was built; outputs stay
	rm -rf $(VENV) docs/_build dist .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"ptdbench needs Python 3.10 or newer, and {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@ $(VENV)/.installed

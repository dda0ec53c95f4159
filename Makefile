# Everything runs in .venv, which `make` creates where it is missing: nothing but Python 3.10 or newer is needed.

# The interpreter that creates .venv; gpu-check, gpu-cluster and gpu-calibrate run in it directly.
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
# With the target's name; KEEP=1 stores what it finds in benchmarks/results.json, and rewrites benchmarks/README.md.
BENCHMARK = $(BIN)/python -m benchmarks $@ $(ARGS)
# For gpu-check: a folder of wheels to put on the path on a machine that cannot install.
WHEELS ?=

.DEFAULT_GOAL := help
# A .venv that could not be made, as without Debian's python3-venv, is made again.
.DELETE_ON_ERROR:
.PHONY: help bench install install-test lint test test-all test-quick newcomer docs dist overhead launch-time model-speed train-for-real plan-truth memory-truth ranks-truth parity-matrix virtual-truth time-truth any-program zoo attack gpu-check gpu-cluster gpu-calibrate slurm-up slurm-down clean

help:  ## show the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

bench: install  ## compare ddp, pipeline + ddp and fsdp on this machine
	$(BIN)/python train.py -m model=gpt_tiny parallel=ddp,pdp,fsdp repeat=9 train.steps=20 $(ARGS)

install: $(VENV)/.installed  ## install the project into .venv

install-test: $(VENV)/.installed-test

test: lint  ## lint, types and tests, in ten minutes on two cores
	$(call beside-types,$(PYTEST) $(ARGS))

test-all: lint $(VENV)/.installed-interop  ## the same with every product, every command of the pages and long races, in half an hour
	$(call beside-types,$(PYTEST) -m "not slow" $(ARGS))

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test-quick: install-test  ## the tests that start no ranks and no SLURM, in a minute
	$(BIN)/python -m pytest -m "not ranks and not slurm and not mpi and not slow and not thorough" $(ARGS)

newcomer: install-test  ## the wheel in an empty environment, every command of the pages: an hour or so
	$(BIN)/python -m pytest -m slow tests/newcomer $(ARGS)

docs: $(VENV)/.installed-docs  ## build the documentation into docs/_build/html; broken links fail
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)

dist: install-test  ## build the source archive and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation $(ARGS)
	$(BIN)/python -m twine check --strict dist/*

overhead: install  ## what steps and checkpoints cost, and whether collectives and products are timed right; ARGS=phases
	$(BENCHMARK)

launch-time: install  ## how long local ranks take to start, against torchrun, and what a run of a sweep costs
	$(BENCHMARK)

model-speed: install-test  ## our GPT-2, Llama or Mixtral against the one of transformers
	$(BENCHMARK)

train-for-real: install-test  ## whether training comes to a result: digits to an accuracy, text to its bits per byte
	$(BENCHMARK)

plan-truth: install  ## how fast and how right `ptdbench plan` is; ARGS="--only sizes"
	$(BENCHMARK)

memory-truth: install  ## what plan says of each rank's training state and messages, against the same steps on real ranks
	$(BENCHMARK)

ranks-truth: install-test  ## how often ranks are wrong, and decide, in made sweeps; ARGS="--bench 20": make bench 20 times
	$(BENCHMARK)

parity-matrix: install  ## does every layout compute the same numbers under every lever: docs/parity.md; ARGS=experts
	$(BENCHMARK)

virtual-truth: install  ## memory on virtual GPUs against real ones; ARGS=layouts: does every layout run; docs/virtual.md
	$(BENCHMARK)

time-truth: install  ## predicted steps beside measured ones: docs/ledger.md; ARGS="--record all"
	$(BENCHMARK)

any-program: install  ## do programs of other libraries run on virtual GPUs: docs/any-program.md; ARGS="--sources FOLDER"
	$(BENCHMARK)

zoo: install-test  ## do 60 public architectures train alike under every layout: docs/zoo.md; ARGS=--all, --resume
	$(BENCHMARK)

attack: install  ## SIGKILL random processes of real runs 250 times: is anything lost; ARGS="--slurm 0" without SLURM
	$(BENCHMARK)

gpu-check:  ## the acceptance run of one GPU: make gpu-check PYTHON=python3 WHEELS=wheels ARGS="--part numbers"
	$(PYTHON) -m benchmarks.gpu_check $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

gpu-cluster:  ## every layout, the links, and failures under every launcher, on two GPUs or more; in an allocation on all its nodes
	$(PYTHON) -m benchmarks.gpu_cluster $(ARGS)

gpu-calibrate:  ## what this GPU reaches, into a file for the predicted times of ptdbench plan; ARGS="--file h100.json"
	$(PYTHON) -m benchmarks.gpu_calibrate $(ARGS)

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

$(VENV)/.installed-interop: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test,interop]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@ $(VENV)/.installed

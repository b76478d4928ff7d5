# Two commands on a fresh machine:  make up    make test
# PYTHON=/path/to/python3.12 make ...  chooses the interpreter of a new environment.

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
# Bytecode is written at first use; writing all of it at once would double the time to the first token. Where the
# environment forbids it every process of every cluster compiles torch's sources anew, so what is made here may write it.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PYTHON ?= python3
ARGS ?=
FAULTS ?= 1000
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help up test check format setup soak clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## ?/  make \1\t/' | expand -t 16

up: $(RUNTIME)  ## start a cluster and the console; ARGS="--profile 1gbe" and the like go to pdconsole up
	$(BIN)/pdconsole up --profile 10gbe $(ARGS)

# Tests that start clusters use every core themselves: two at a time, after the rest.
test: check  ## everything in make check, then the whole test suite; ARGS="tests/engine -x" narrows it
ifeq ($(strip $(ARGS)),)
	$(BIN)/pytest -m "not slow" -n auto --dist loadfile
	$(BIN)/pytest -m slow -n 2 --dist loadfile
else
	$(BIN)/pytest $(ARGS)
endif

# Not part of test: a thousand faults take about an hour.
soak: $(RUNTIME)  ## random faults from a seed; FAULTS=1000 SEED=0, the verdict goes to docs/soak.json
	$(BIN)/pdconsole drill soak --faults $(FAULTS) --seed $(SEED) --quiet --json $(ARGS) > docs/soak.json

check: $(DEV)  ## format, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layering.py

format: $(DEV)  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pictures: $(DEV)  ## the README's pictures and key table, from a recorded run
	$(BIN)/python -m docs.make_pictures

setup: $(DEV)  ## the environment only, with what tests need

# Exact versions by constraints.txt; again only when what is asked for has changed.
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "pdconsole needs Python 3.11 or newer, and $(PYTHON) is not." \
	       "Choose another: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(DEV): $(RUNTIME)
	@echo "installing what tests need into $(VENV)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

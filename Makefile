# Each command sets up what it needs: a virtual environment with pinned versions, once.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
STAMP = $(VENV)/.installed

# Compiled modules, and tests with their asserts rewritten, are kept for the next process.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-engines check format docs bench wheel clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "marlhf needs Python 3.11 to 3.14; try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## SFT, reward model, PPO and macro PPO on the offline task, and a report
	$(BIN)/marlhf run toy
	@echo "open runs/toy/report.html in a browser"

test: $(STAMP)  ## all tests, a process for each core
	$(BIN)/python -m pytest -q -n auto --dist loadgroup --no-loadscope-reorder

# verl needs an older transformers than constraints.txt has, so it has an environment of its own.
ENGINES ?= .venv-engines
ENGINES_PIP = $(ENGINES)/bin/python -m pip install --disable-pip-version-check -q \
  -c constraints-engines.txt

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt
	@echo "setting up $(ENGINES) (once; several minutes)"
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES_PIP) torch
	@$(ENGINES_PIP) -e '.[verl]' pytest pytest-timeout hypothesis
	@touch $@

test-engines:  ## macro actions inside verl, on a CPU, in an environment of its own
	@if $(MAKE) -s $(ENGINES)/.installed; then \
	  $(ENGINES)/bin/python -m pytest -q -m engines tests/engines; \
	else \
	  echo "skipped: verl cannot be installed here, see above"; \
	fi

check: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)  ## let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## run every example of README and docs, and build the site into site/; broken links fail
	$(BIN)/python -m pytest -q tests/test_docs.py
	@$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)  ## the benchmarks that fit this machine
	$(BIN)/python bench/core.py

wheel: $(STAMP)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove what the commands above made, runs aside
	rm -rf $(VENV) $(ENGINES) dist build site .pytest_cache .ruff_cache .hypothesis

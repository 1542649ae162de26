# Every target makes the environment it needs; running one twice is safe.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOT := setup.py miner_guard/flight_recorder/_hot.c
DEMO_STATE := $(CURDIR)/.demo/state
# Most tests wait for processes that they watch: three at a time keep two cores busy.
PARALLEL := -n 3 --dist loadfile
# Real processes and signals on a loaded machine: a failure counts when it repeats, and the summary names what was run again.
AGAIN := --reruns 1

.PHONY: demo test check unit faults bench soak screens dist clean

demo: $(VENV)/.demo
	MINER_GUARD_STATE_DIR="$${MINER_GUARD_STATE_DIR:-$(DEMO_STATE)}" $(BIN)/miner-guard demo $(DEMO_ARGS)

test: check
	$(BIN)/python -m pytest -m "not long" $(PARALLEL) $(AGAIN) tests/unit tests/integration tests/faults $(PYTEST_ARGS)

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) tests/unit $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

faults: $(VENV)/.dev
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m long tests $(PYTEST_ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks

screens: $(VENV)/.dev
	$(BIN)/python -m tests.support.screens

# The same bytes for the same commit and compiler, wherever and whenever it is built.
dist: $(VENV)/.dev
	rm -rf dist && mkdir dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m tests.support.distribution . dist

clean:
	rm -rf $(VENV) .demo build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt $(HOT) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(HOT) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.demo

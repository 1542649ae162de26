# Every target creates the environment it needs; running one twice is safe.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
DEMO_STATE := $(CURDIR)/.demo/state
# Most tests wait for processes that they watch: with four workers, two cores would be idle a third of the time. Files run in
# the order of SUITE. By default, xdist would start the files with the fewest tests last; these have the longest tests, so
# workers would sit idle at the end.
WORKERS ?= 6
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The tests use real processes and signals on a loaded machine, so a failure counts only if it repeats; the summary lists
# reruns.
AGAIN := --reruns 1

.PHONY: demo test suite test-lowest test-newest check unit faults bench soak docs screens gpu gpu-pack dist release clean

demo: $(VENV)/.demo
	MINER_GUARD_STATE_DIR="$${MINER_GUARD_STATE_DIR:-$(DEMO_STATE)}" $(BIN)/miner-guard demo $(DEMO_ARGS)

# Types and lint use one core for a minute, while the first tests of the suite wait for processes.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs=2 check suite

SUITE := tests/faults tests/integration tests/unit
suite: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not long" $(PARALLEL) $(AGAIN) $(SUITE) $(PYTEST_ARGS)

# The suite with the lowest versions that pyproject.toml allows, and with the newest available.
test-lowest test-newest: test-%: $(VENV)/.dev
	$(BIN)/python -m tests.support.version_bounds $* > .venv-$*.new
	cmp -s .venv-$*.new .venv-$*.txt && rm .venv-$*.new || mv .venv-$*.new .venv-$*.txt
	$(MAKE) suite VENV=.venv-$* CONSTRAINTS=.venv-$*.txt

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) tests/unit $(PYTEST_ARGS)

# Every tool runs, even after one fails.
check: $(VENV)/.dev
	@failed=; for tool in "ruff format --check ." "ruff check ." mypy lint-imports; do \
	  echo "$(BIN)/$$tool"; $(BIN)/$$tool || failed="$$failed, $$tool"; \
	done; [ -z "$$failed" ] || { echo "failed$${failed#,}" >&2; exit 1; }

faults: $(VENV)/.dev
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m long tests $(PYTEST_ARGS)

# Acceptance test on one GPU, without a network. If `make gpu-pack` has filled .gpu/wheels, it uses the machine's own Python
# and torch (GPU_PYTHON), otherwise the development environment, with or without a GPU. Prints a table and writes
# .gpu/gpu-acceptance.json.
GPU_PYTHON ?= python3
GPU := .gpu
gpu:
	@if [ -d $(GPU)/wheels ]; then \
	  $(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $(GPU)/site $(GPU)/wheels/*.whl && \
	  PATH="$(CURDIR)/$(GPU)/site/bin:$$PATH" PYTHONPATH=$(CURDIR)/$(GPU)/site:$(CURDIR) $(GPU_PYTHON) -m pytest -q -s -p no:cacheprovider tests/gpu $(PYTEST_ARGS); \
	else $(MAKE) $(VENV)/.dev && $(BIN)/python -m pytest -q -s tests/gpu $(PYTEST_ARGS); fi

# The wheels that `make gpu` needs on a machine without a network, for that machine's Python; at most 64 MiB, ignored by git.
GPU_PACK_PYTHON ?= 3.12
GPU_PACK := --only-binary=:all: --python-version $(GPU_PACK_PYTHON) --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform linux_x86_64
gpu-pack: $(VENV)/.dev
	rm -rf $(GPU)/wheels
	$(BIN)/python -m pip download --quiet $(GPU_PACK) --dest $(GPU)/wheels --requirement tests/gpu/packages.txt
	du -sh $(GPU)/wheels

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks

# The documentation's site, in site/; every warning is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

screens: $(VENV)/.dev
	$(BIN)/python -m tests.support.screens

# The same commit and compiler give the same bytes, wherever and whenever they are built.
dist: $(VENV)/.dev
	rm -rf dist && mkdir dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m tests.support.distribution . dist

# Sets the version in its two places, commits, and tags; pushing the tag publishes: make release VERSION=1.2.3
release:
	@echo "$(VERSION)" | grep -qE '^[0-9]+\.[0-9]+\.[0-9]+$$' || { echo "make release VERSION=1.2.3"; exit 64; }
	@git diff --quiet HEAD || { echo "commit your changes first"; exit 64; }
	sed -i 's/^__version__ = .*/__version__ = "$(VERSION)"/' miner_guard/__init__.py
	sed -i 's/^## .* (not yet published)/## $(VERSION)/' CHANGELOG.md
	git commit -am "Release $(VERSION)" && git tag -a "v$(VERSION)" -m "v$(VERSION)"

clean:
	rm -rf .venv .venv-* .demo build dist *.egg-info

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS)
	@.ci/install $(PYTHON) $(VENV) demo $(CONSTRAINTS)
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS)
	@.ci/install $(PYTHON) $(VENV) dev $(CONSTRAINTS)
	@touch $@ $(VENV)/.demo

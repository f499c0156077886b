# Every target makes the environment that it needs, in .venv, with the versions of constraints.txt.
#   PYTHON=...     the Python to make it with, 3.11 or newer
#   ARGS=...       overrides for `run` (make run ARGS="PHASES.epochs=2"), options of pytest for `test` and `test-slow`
#   JOBS=...       tests that run at the same time: a number, or `auto` for one per core
.DEFAULT_GOAL := help
.PHONY: help run recipes test test-slow check bench gpu reference docs docs-site screenshots matrix release-check clean

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= auto
BIN := $(VENV)/bin
# As an environment variable the constraints hold for the isolated builds of source packages too.
INSTALL := PIP_CONSTRAINT="$(CURDIR)/constraints.txt" $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
# Tests of a file share runs, so a file stays on one worker; slow tests share little and are moved.
BY_FILE := --dist loadfile --no-loadscope-reorder
BY_TEST := --dist worksteal
# Containers often set it; each worker and each process of a test would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/core  ## train the default experiment: hand-written digits, under a minute on 2 cores
	@$(BIN)/python tools/run.py $(ARGS)

recipes: $(VENV)/full  ## repeat the recipes that take less than 10 minutes, and compare them with their results
	$(BIN)/python tools/check_recipes.py --max-minutes 10 $(ARGS)

# pytest ends with 5 if it has selected no test: ARGS may select tests of one job only, but not of none.
test: SHELL := bash
test: $(VENV)/full  ## run the tests of the core, then those of the add-ons, with the time of both
	@# Each run asks git for changes, which reads the content of files that are as new as the index.
	@git update-index -q --refresh > /dev/null 2>&1 || true
ifneq (,$(findstring tests,$(ARGS)))
	$(PYTEST) $(BY_FILE) $(ARGS)
else
	@trap 'exit 130' INT; \
	code=5; \
	for job in "core tests --ignore=tests/addons" "add-ons tests/addons"; do \
		TIMEFORMAT="$${job%% *}: %R s, and %U s + %S s of CPU"; \
		time $(PYTEST) $(BY_FILE) $${job#* } $(ARGS); \
		case $$? in \
			0) [ $$code = 1 ] || code=0 ;; \
			5) ;; \
			*) code=1 ;; \
		esac; \
	done; \
	exit $$code
endif

test-slow: $(VENV)/full  ## run the tests that take minutes
	$(PYTEST) $(BY_TEST) -m slow $(ARGS)

check: $(VENV)/full  ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/core  ## measure the overhead per step, the start-up, saving, seeking and resuming
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/waits.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/seek.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/distributed.py
	$(BIN)/python benchmarks/profiling.py

gpu: $(VENV)/full  ## run the tests that need a GPU in groups, and keep the results in runs/gpu; the same command continues
	$(BIN)/python tools/gpu.py $(ARGS)

reference: $(VENV)/core  ## write the generated pages and tables of docs/
	$(BIN)/python -m phasetrain.addons.authoring.reference > docs/reference.md
	$(BIN)/python -m phasetrain.addons.vissl.key_page > docs/addons/vissl_keys.md
	$(BIN)/python -m phasetrain.addons.experiments.recipes.pages docs/recipes
	$(BIN)/python tools/docs_tables.py

docs: $(VENV)/full  ## run every code block of the docs
	$(PYTEST) $(BY_TEST) -m "" tests/rules/test_docs.py $(ARGS)

docs-site: $(VENV)/full  ## build the documentation site in site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

screenshots: $(VENV)/full  ## make the pictures of the docs: of the terminal, and of the report, which needs Chromium
	$(BIN)/python benchmarks/screenshots.py
	$(BIN)/python benchmarks/report_screenshots.py

matrix: $(BIN)/python  ## test other versions of Python and the dependencies, and write docs/versions.md; takes an hour
	$(INSTALL) uv # the version of constraints.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/matrix.py $(ARGS)

release-check:  ## build wheel and sdist in dist/, and train with each in an empty environment
	PYTHON=$(PYTHON) tools/check_release.sh

clean:  ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "phasetrain needs Python 3.11 or newer; give one with PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/full: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[test,dev]"
	@touch $@ $(VENV)/core

# Newcomers: `make demo` shows what dcpstore does, `make test` runs every check.
# Both need only make and a Python >= 3.10 with pip; they build .venv themselves.
# Another interpreter: `make test PYTHON=python3.12`. Which torch build is installed (CPU or
# CUDA) is decided by pip's own settings, such as PIP_INDEX_URL.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS_READY := $(VENV)/.peers-ready
# Three workers on two cores: many tests wait for a server or a time-out most of their time.
PYTEST_ARGS ?= -n 3 --dist worksteal
DEMO_ARGS ?=
BENCH_ARGS ?=
CAMPAIGN_ARGS ?= --wire 12000 --gloo 1000 --verbs 90000 --seed 1 --minutes 170 --workers 2 --out campaign.json

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit bench gpu campaign clean

help:
	@echo 'make demo      train, save to an emulated bucket, load on other ranks, compare'
	@echo 'make test      every check: format, lint, types, layers, tests'
	@echo 'make lint      the same without the tests'
	@echo 'make bench     benchmarks beside the peers (BENCH_ARGS=--quick: do they run?)'
	@echo 'make gpu       tests that need a CUDA device'
	@echo 'make campaign  a hundred thousand schedules of faults, and the long tests'
	@echo 'make clean     remove .venv and caches'

setup: $(READY)

# torch first and alone: resolving it together with the rest could admit a newer release.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "dcpstore needs Python >= 3.10, but $(PYTHON) is " + sys.version + "; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m dcpstore demo $(DEMO_ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

unit: $(READY)
	$(BIN)/python -m pytest -m 'not gpu and not campaign' $(PYTEST_ARGS)

# In this order also under `make -j`: the cheap checks first, pytest's summary last.
test: $(READY)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit

# What dcpstore is measured beside; torch stays the one that is there.
$(PEERS_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	@touch $@

bench: $(PEERS_READY)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

campaign: $(READY)
	$(BIN)/python -m tests.campaign $(CAMPAIGN_ARGS)
	$(BIN)/python -m pytest -m campaign --timeout 3600 $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

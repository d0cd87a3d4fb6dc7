# Two commands are enough on a fresh machine with Python 3.10 or newer and a C++ compiler:
#   make demo    set up, run the main job, print what happened
#   make test    set up, run linters, types and the fast tier of tests
#
# TORCH=...  what to install when .venv has no torch 2.11 or newer yet. On a machine without a GPU a CPU build is smaller
#            by gigabytes; point PIP_INDEX_URL at an index that has one, or make .venv yourself with any torch in it.
# PYTHON=... which Python makes .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

TORCH ?= torch==2.13.0
VENV ?= .venv
MINUTES ?= 600
BUDGET ?= 60
SUITE ?=
COMPARED := --peers compile,max-autotune,liger --limit 36000
NAME ?= cpu-$(shell uname -m)
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$p && break; done)
PYTEST := $(BIN)/python -m pytest
PYTHON_SOURCES := torch_autokern benchmarks tests setup.py
CPP_SOURCES := $(wildcard csrc/*.cpp csrc/*.h)

.PHONY: help setup demo test lint test-fast test-long judge-the-judge torture coverage-store bench bench-gpu packs format clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

$(STAMPS)/torch:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10 or newer with venv on PATH; set PYTHON=/path/to/python3" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	$(PIP) install --quiet 'setuptools>=77' wheel ninja
	$(BIN)/python -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null \
		|| $(PIP) install '$(TORCH)'
	touch $@

$(STAMPS)/install: $(STAMPS)/torch pyproject.toml setup.py
	$(PIP) install --quiet --no-build-isolation -e '.[dev,cuda,sign,ray]'
	touch $@

# The install has built the extension against the torch in .venv; a later change in csrc/ builds only what it touches.
$(STAMPS)/package: $(STAMPS)/install $(CPP_SOURCES)
	test -z "$$(find csrc -type f -newer $(STAMPS)/install)" || $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(STAMPS)/demo: $(STAMPS)/package
	$(BIN)/python -c 'from importlib.metadata import requires; print(*(r.split(";")[0] for r in requires("torch-autokern") \
		if "extra == \"demo\"" in r), sep="\n")' > $(STAMPS)/demo.txt
	$(PIP) install --quiet -r $(STAMPS)/demo.txt
	touch $@

setup: $(STAMPS)/package ## install everything that the tests need into .venv

demo: $(STAMPS)/demo ## the main job: a real model, stock, recorded, warmed, optimised; writes demo.json
	$(BIN)/autokern demo --json demo.json

test: lint test-fast ## linters, types, import direction, and the fast tier of tests

lint: $(STAMPS)/package ## ruff, mypy, clang-format; nothing is changed
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)

test-fast: $(STAMPS)/package ## the fast tier of tests alone
	$(PYTEST) -m "not long and not cuda"

test-long: $(STAMPS)/demo ## the rest of the tests
	$(PYTEST) -m "long and not cuda"

judge-the-judge: $(STAMPS)/package ## both corpora through the judge: caught and falsely refused, by reason
	$(BIN)/python -m tests.judge.judge_the_judge

torture: $(STAMPS)/package ## the store under fire, long form; goes on where it was stopped (MINUTES=5: a slice)
	$(BIN)/python -m tests.torture --json benchmarks/results/torture.json --minutes $(MINUTES)

coverage-store: $(STAMPS)/package ## branch coverage of store, packs and trust by their own tests; fails below 100 %
	$(BIN)/python -m tests.store.coverage_of_store

bench: $(STAMPS)/demo ## measurements, written as JSON to benchmarks/results/
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.import_time --json benchmarks/results/import_time.json
	$(BIN)/python -m benchmarks.overhead --json benchmarks/results/overhead.json
	$(BIN)/autokern demo --json benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.readme_table

bench-gpu: $(STAMPS)/package ## on a GPU: sets of calls against stock, torch.compile and Liger (SUITE="--allow-weak-box")
	$(BIN)/python -m benchmarks.suite --set headline --json benchmarks/results/headline.json $(COMPARED) $(SUITE)
	$(BIN)/python -m benchmarks.suite --set gpu_table,products,backward_gpu,awkward --json benchmarks/results/suite.json \
		$(COMPARED) $(SUITE)

packs: $(STAMPS)/package ## a prebuilt pack of this machine's kernels (NAME=..., BUDGET=minutes); goes on where it was stopped
	$(BIN)/python -m benchmarks.prebuilt_packs --name $(NAME) --budget $(BUDGET)

format: $(STAMPS)/package ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(CPP_SOURCES)

clean: ## remove .venv, builds and caches of tools (never the kernel store)
	rm -rf $(VENV) build dist *.egg-info torch_autokern/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.json
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

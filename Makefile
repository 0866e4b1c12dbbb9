# Everything runs in .venv, which `make install` builds. `make help` lists the targets.
ifeq ($(OS),Windows_NT)
$(error This Makefile needs a POSIX shell. On Windows use WSL, or run the commands below by hand)
endif

.PHONY: help install demo fast test coverage lint docs wheel bench clean
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F '|' '{ printf "make %-9s %s\n", $$1, $$2 }'

install: .venv/installed ## build .venv

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) hatchling hatch-fancy-pypi-readme editables torch
	$(PIP) --no-build-isolation --editable '.[dev,docs]'
	touch $@

demo: install ## where chains win and where they do not, on a page with pictures: about three minutes
	$(BIN)/mcvae demo

fast: install ## the tests that take less than a minute together
	$(BIN)/pytest --numprocesses 2 -m 'not slow'

test: install ## all tests
	$(BIN)/pytest --numprocesses 2

coverage: install ## all tests, and the lines that none of them runs
	$(BIN)/pytest --numprocesses 2 --cov --cov-report=term --cov-report=html

lint: install ## style, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install ## the site, in site/
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

wheel: install ## build sdist and wheel, and test the wheel with the tests of the sdist
	.ci/wheel $(BIN)/python

bench: install ## measure docs/performance.md anew
	$(BIN)/python benchmarks/bench.py --write docs/performance.md

clean: ## remove what was built
	rm -rf .venv dist site htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

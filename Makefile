.PHONY: install demo test lint bench docs clean

PYTHON ?= python3
BIN := .venv/bin

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt hatchling editables torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,docs]'
	touch $@

demo: install
	$(BIN)/mcvae demo

test: install
	$(BIN)/pytest --numprocesses 2

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python benchmarks/bench.py --write docs/performance.md

docs: install
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install check test test-all docs bench pictures clean

# torch first and by its exact version: a plain `torch` pulls gigabytes of CUDA packages.
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable ".[all]" --group dev
	touch $@

check: install
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

test: install
	$(BIN)/pytest -m "not slow and not gpu"

test-all: install
	$(BIN)/pytest -m "not gpu"

docs: install
	$(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python benchmarks/accuracy.py

clean:
	rm -rf site build dist .mypy_cache .ruff_cache .pytest_cache

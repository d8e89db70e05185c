PYTHON ?= python3
BIN := .venv/bin

.PHONY: install constraints servers check test test-all coverage docs bench matrix matrix-ci release-check campaign pages pictures redraw clean

# torch first and by its exact version: a plain `torch` pulls gigabytes of CUDA packages.
# With another Python than 3.11, some of the pinned versions may not exist: `make install CONSTRAINTS=/dev/null`.
CONSTRAINTS ?= constraints.txt
install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[all]" --group dev
	touch $@

# The newest versions of everything that development uses, tried by CI with the commit that takes them.
constraints:
	rm -rf .cache/constraints && $(PYTHON) -m venv .cache/constraints
	.cache/constraints/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.cache/constraints/bin/python -m pip install --quiet torch==2.13.0
	.cache/constraints/bin/python -m pip install --quiet ".[all]" --group dev
	(echo "# Made by \`make constraints\` with $$($(PYTHON) --version): what development and CI install."; \
	  .cache/constraints/bin/python -m pip freeze | grep -vE "^(flopwatch|torch)\b") > constraints.txt

# MLflow, Prometheus, Slurm and a browser for the tests that need them; without them those are skipped.
servers:
	bash tests/servers/install

check: install
	$(BIN)/ruff format --check src tests benchmarks testbeds examples conftest.py
	$(BIN)/ruff check src tests benchmarks testbeds examples conftest.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# One thread per worker: the models are tiny, and more would only wait for each other.
# The tests of a file share what is dear to start (a server, ranks), so they stay in one worker; conftest.py puts the
# longest files first, and xdist must not sort them again.
# Two workers per core for all tests, because many of them wait for processes that they have started.
WORKERS ?= $(shell nproc)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadfile --no-loadscope-reorder

test: install
	$(PYTEST) --numprocesses $(WORKERS) -m "not slow and not gpu"

# No test that fails is run again: one that fails now and then is a defect of the test or of the code.
test-all: install
	$(PYTEST) --numprocesses $$((2 * $(WORKERS))) -m "not gpu" --durations 20 -r fEsxX

# All tests with the lines that they run, in their child processes too; fails below `fail_under` of pyproject.toml.
coverage: install
	rm -rf .cache/coverage && mkdir -p .cache/coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest --dist loadfile --no-loadscope-reorder \
	  --numprocesses $$((2 * $(WORKERS))) -m "not gpu" -r fEsxX || touch .cache/coverage/failed
	$(BIN)/coverage combine --quiet .cache/coverage
	$(BIN)/coverage report --skip-covered --sort cover
	test ! -e .cache/coverage/failed

docs: install
	$(BIN)/mkdocs build --strict --quiet

# The tables that stand in the docs, written there by the command; other tools go into a venv of their own.
bench: install
	$(BIN)/python benchmarks/accuracy/accuracy_table.py
	$(BIN)/python benchmarks/overhead/monitor_overhead.py

# The portable suite with every torch, Python and framework of benchmarks/matrix/rows.py; needs no .venv.
matrix:
	PYTHONPATH=benchmarks $(PYTHON) -m matrix

# The newest and the oldest, without the longest tests; writes nothing into the docs.
matrix-ci:
	PYTHONPATH=benchmarks $(PYTHON) -m matrix --only newest oldest --jobs 2 --quick --any-python --no-write

# Builds dist/, and tries the wheel with the core only and with each extra alone; needs no .venv.
release-check:
	PYTHONPATH=benchmarks $(PYTHON) -m release

# Too long for CI: every part of benchmarks/campaign/parts.py, about a day; docs/campaigns.md has the last run of each.
campaign: install
	PYTHONPATH=benchmarks $(BIN)/python -m campaign $(PARTS)

# Schemas, tables and drawings that come from the code; a quick test fails when a schema or a table is out of date.
pages: install
	$(BIN)/python benchmarks/pages/translations.py
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/pages/schemas.py
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/pages/reference_pages.py
	$(BIN)/python benchmarks/pages/drawings.py
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/house/weight.py

# Records a training, ranks and a sweep, about 8 minutes on a machine that does nothing else, and draws them.
pictures: install
	$(BIN)/python benchmarks/pages/record.py
	$(MAKE) redraw

# Draws the recorded runs as today's code shows them; a quick test fails when a picture is out of date.
redraw: install pages
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/pages/redraw.py

clean:
	rm -rf site build dist .mypy_cache .ruff_cache .pytest_cache

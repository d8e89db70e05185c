PYTHON ?= python3
BIN := .venv/bin

.PHONY: install servers check test test-all docs bench matrix matrix-ci release-check campaign pages pictures redraw clean

# torch first and by its exact version: a plain `torch` pulls gigabytes of CUDA packages.
install: .venv/.installed

.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[all]" --group dev
	touch $@

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

# Too long for CI; figures go into docs/accuracy.md, overhead.md, sweep.md, ranks.md and scale.md.
campaign: install matrix
	$(BIN)/python benchmarks/accuracy/more_architectures.py
	PYTHONPATH=src:benchmarks $(BIN)/python -m zoo
	$(BIN)/python benchmarks/startup/start_cost.py
	$(BIN)/python benchmarks/pages/loops_table.py
	$(BIN)/python benchmarks/late_changes.py
	$(BIN)/python benchmarks/compiled/trainings.py
	for backend in aot_eager inductor; do $(BIN)/python benchmarks/compiled/harm.py --backend $$backend; done
	$(BIN)/python benchmarks/ranks/counted_at_random.py --runs 200
	PYTHONPATH=src:benchmarks:. $(BIN)/python benchmarks/live_formulas.py --shapes 500
	FLOPWATCH_LONG=1 FLOPWATCH_TEST_SHAPES=50 $(PYTEST) tests/flops/test_law.py
	$(BIN)/python benchmarks/reliability/kills.py --kills 50
	$(BIN)/python benchmarks/reliability/long_run.py --calls 2000000
	$(BIN)/python benchmarks/sweeps/scale.py --trials 10000
	$(BIN)/python benchmarks/sweeps/isolation.py --trials 1000
	$(BIN)/python benchmarks/sweeps/campaign.py
	$(BIN)/python benchmarks/reliability/folder_corruptions.py --count 200
	$(BIN)/python benchmarks/hostile/hostile_words.py 500
	for engine in local slurm ray; do $(BIN)/python benchmarks/reliability/never_twice.py --engine $$engine --kills 20; done
	$(BIN)/python benchmarks/sweeps/nfs_sweep.py --seconds 60
	PYTHONPATH=. $(BIN)/python benchmarks/sweeps/week.py --trials 20000
	$(BIN)/python benchmarks/sweeps/memory.py
	$(BIN)/python benchmarks/sweeps/many_processes.py --engines local slurm ray
	FLOPWATCH_LONG=1 $(PYTEST) -m "campaign and not gpu"
	$(BIN)/python benchmarks/ranks/rank_overhead.py
	$(BIN)/python benchmarks/ranks/rank_overhead.py --link
	$(BIN)/python benchmarks/scale/growth.py
	$(BIN)/python benchmarks/ranks/straggler_ranks.py
	$(BIN)/python benchmarks/ranks/elastic_job.py
	$(BIN)/python benchmarks/ranks/disturbed_ranks.py
	$(BIN)/python benchmarks/ranks/teardowns.py --count 200
	$(BIN)/python benchmarks/ranks/store_dies.py
	$(BIN)/python benchmarks/scale/simulate.py

# Schemas, tables and drawings that come from the code; a quick test fails when a schema or a table is out of date.
pages: install
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

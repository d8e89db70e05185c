"""The light side does not load torch, in a fresh interpreter because the import linter cannot see lazy names.

Tests and benchmarks do not import each other.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = """
import sys
{statement}
heavy = ["torch", "transformers", "pydantic", "rich.console"]
sys.__stdout__.write("loaded: " + " ".join(name for name in heavy if name in sys.modules))
"""

RUN = """
from flopwatch.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
"""


def heavy_modules_after(statement):
    code = REPORT.format(statement=statement)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.rpartition("loaded: ")[2].split()


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("import flopwatch", marks=pytest.mark.portable),
        "import flopwatch.hardware",
        "import flopwatch.hardware.peaks",
        "import flopwatch.runs, flopwatch.runs.explain, flopwatch.records.metrics",
        "import flopwatch.sweep.supervisor.supervise, flopwatch.sweep.runner.run, flopwatch.sweep.runner.plan",
        "import flopwatch.sweep.runner.run",
        "import flopwatch.sweep.engines.local, flopwatch.records.trial",
        RUN.format(arguments=["sweep", "--help"]),
        RUN.format(arguments=["trial", "--help"]),
        RUN.format(arguments=["report", "--help"]),
        "import flopwatch.sinks.protocol, flopwatch.sinks.jsonl, flopwatch.sinks.thread",
        RUN.format(arguments=["watch", "--help"]),
        RUN.format(arguments=["explain", "--help"]),
        RUN.format(arguments=["why", "--help"]),
        "import flopwatch.runs.waterfall, flopwatch.runs.advice",
        RUN.format(arguments=["compare", "--help"]),
        "import flopwatch; assert flopwatch.peak_flops(name='NVIDIA H100 80GB HBM3').flops_per_s == 989.4e12",
        RUN.format(arguments=["--help"]),
        pytest.param(RUN.format(arguments=["--version"]), marks=pytest.mark.portable),
        RUN.format(arguments=["peak", "--help"]),
        RUN.format(arguments=["peak", "--name", "NVIDIA H100 80GB HBM3"]),
        RUN.format(arguments=["peak", "--name", "NVIDIA H100 80GB HBM3", "--dtype", "bf16", "--json"]),
    ],
)
def test_nothing_heavy_is_loaded(statement):
    assert heavy_modules_after(statement) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement", ["import flopwatch; flopwatch.peak_flops('cpu')", RUN.format(arguments=["peak", "--device", "cpu"])]
)
def test_looking_at_a_device_loads_torch_so_the_check_above_can_fail(statement):
    assert "torch" in heavy_modules_after(statement)


IMPORT_TIMES = """
import time
def seconds(module):
    began = time.process_time()
    __import__(module)
    return time.process_time() - began
print(*map(seconds, ["flopwatch", "torch"]))
"""


def time_of_the_import_compared_with_torch():
    done = subprocess.run([sys.executable, "-c", IMPORT_TIMES], capture_output=True, text=True, check=True)
    flopwatch, torch = map(float, done.stdout.split())
    return flopwatch / torch


@pytest.mark.slow
def test_importing_flopwatch_takes_at_most_5_percent_of_importing_torch():
    """One of three tries is enough, because a disturbance makes an import slower, never quicker."""
    assert any(time_of_the_import_compared_with_torch() <= 0.05 for _ in range(3))


ROOT = Path(__file__).parents[1]


def imported_roots(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("user", "other"), [("tests", "benchmarks"), ("benchmarks", "tests"), ("testbeds", "tests")])
def test_tests_and_benchmarks_share_testbeds_and_nothing_else(user, other):
    shared = {"testbeds", *(path.stem for path in (ROOT / user).iterdir())}
    theirs = {path.stem for path in (ROOT / other).iterdir()} - shared
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in (ROOT / user).rglob("*.py")
        for name in theirs.intersection(imported_roots(file))
    }
    assert found == set()

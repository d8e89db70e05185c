"""Runs the portable suite in an environment and reads what pytest found."""

import json
import os
import signal
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from matrix.environments import ROOT, Environment
from matrix.rows import Row

SHOWN = ("torch", "transformers", "numpy", "lightning", "accelerate")

LIMIT_SECONDS = 3600

QUICK = "not compiled and not layouts and not sweep_of_four and not test_law and not profiler and not without_unix"
"""The part of the portable suite that CI runs, as a `-k` expression of pytest: all but the slowest tests."""


@dataclass
class Outcome:
    """The results of one row."""

    name: str
    python: str
    day: str = ""
    commit: str = ""
    """What was run, if it is in the repository; empty if the source had changes that were not committed."""
    versions: dict[str, str] = field(default_factory=dict)
    not_run: str = ""
    """Why nothing was run, for example because there is no interpreter."""
    changed_packages: list[str] = field(default_factory=list)
    added_packages: list[str] = field(default_factory=list)
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why tests were skipped, by test: what this version lacks."""
    equal_architectures: list[str] = field(default_factory=list)
    counted_by_step: list[str] = field(default_factory=list)
    """Those of `equal_architectures` that were counted by a real step, because they could not be traced."""
    absent_architectures: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Private names of torch that failed their check, and what flopwatch does without them."""
    crash: str = ""
    seconds: float | None = None

    @property
    def is_green(self) -> bool:
        return not (self.failed or self.crash or self.changed_packages) and self.passed > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_suite(row: Row, environment: Environment, *, quick: bool) -> Outcome:
    """Run the suite with the installed wheel, not with src/."""
    outcome = Outcome(row.name, _python_version(environment.python))
    outcome.versions = {name: environment.after[name] for name in SHOWN if name in environment.after}
    outcome.changed_packages = environment.changes()
    outcome.added_packages = sorted(set(environment.after) - set(environment.before))
    report = environment.folder / "portable.xml"
    command = [environment.python, "-m", "pytest", "-v", "-m", "portable", "-p", "no:cacheprovider"]
    command += ["-o", "pythonpath=. benchmarks tests", f"--junitxml={report}", *(["-k", QUICK] if quick else [])]
    log = environment.folder / "portable.log"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):  # they may name modules that the environment does not have
        variables.pop(name, None)
    with log.open("w") as output:
        ended = _ended(command, output, variables)
    if ended not in (0, 1) or not report.exists():
        outcome.crash = f"{_words(ended)}; {_last_line(log)}"
    if report.exists():
        _read(report, outcome)
    return outcome


def _ended(command: list[str], output: Any, variables: dict[str, str]) -> int | None:
    """Run the command and return its exit status; None if it took too long and was stopped."""
    try:
        return subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=ROOT, timeout=LIMIT_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _words(status: int | None) -> str:
    if status is None:
        return f"not done after {LIMIT_SECONDS} s"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"pytest ended with status {status}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")[:200]


def _read(report: Path, outcome: Outcome) -> None:
    root = ET.parse(report).getroot()
    outcome.seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    for item in root.iterfind("testsuite/properties/property[@name='missing']"):
        outcome.missing = (item.get("value") or "").split("\t") if item.get("value") else []
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        properties = {item.get("name"): item.get("value") or "" for item in case.iter("property")}
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(name)
        elif skipped is not None:
            outcome.skipped[name] = skipped.get("message") or ""
        else:
            outcome.passed += 1
            if architecture := properties.get("architecture"):
                outcome.equal_architectures.append(architecture)
                if properties.get("method") == "step":
                    outcome.counted_by_step.append(architecture)
        if skipped is not None and "test_a_count_equals_the_truth" in name:
            outcome.absent_architectures.append(name.partition("[")[2].rstrip("]"))


def _python_version(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def read_results(file: Path) -> dict[str, Outcome]:
    """Read the outcomes by row name; empty if there is no file."""
    if not file.exists():
        return {}
    return {name: Outcome(**content) for name, content in json.loads(file.read_text()).items()}


def write_results(file: Path, results: dict[str, Outcome]) -> None:
    file.write_text(json.dumps({name: item.to_json() for name, item in results.items()}, indent=1) + "\n")

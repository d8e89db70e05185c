"""Builds the package and tries the wheel in a fresh environment with the core only and with each extra alone.

    make release-check
    PYTHONPATH=benchmarks python -m release --only core wandb

Needs only the standard library; uv is found or installed as in `make matrix`. The wheel and the sdist stay in
dist/; build/ gets a software bill of materials (CycloneDX) of what the wheel installs.
"""

import argparse
import os
import shutil
import subprocess
import time
from pathlib import Path

from matrix.environments import ROOT, WORK, CannotBuildError, Environment, packages, pip_sources, run, uv
from release.contents import build, sdist_problems, twine_check, version_problems, wheel_problems

TORCH = "torch==2.13.0"
EXTRAS = ("tensorboard", "wandb", "mlflow", "prometheus", "hf", "lightning", "dp", "ray", "nvml")
INSIDE = Path(__file__).with_name("inside.py")
COMMANDS = (("--version",), ("--help",), ("doctor",))
SBOM = ROOT / "build" / "flopwatch.cdx.json"
SBOM_TOOL = "cyclonedx-bom==7.5.0"
_START = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=["core", *EXTRAS], choices=["core", *EXTRAS])
    chosen = parser.parse_args().only
    _say("building wheel and sdist")
    wheel, sdist = build(ROOT / "dist")
    _say("twine check --strict")
    twine_check(wheel, sdist)
    problems = [*wheel_problems(wheel), *sdist_problems(sdist), *version_problems(wheel)]
    rows = []
    for extra in chosen:
        row, found = _tried(extra, wheel)
        rows.append(row)
        problems += [f"{extra}: {problem}" for problem in found]
    _print_table(wheel, sdist, rows)
    for problem in problems:
        print(f"FAIL  {problem}")
    print(f"{len(problems)} problems, {time.monotonic() - _START:.0f} s")
    return int(bool(problems))


def _say(words: str) -> None:
    print(f"[{time.monotonic() - _START:4.0f} s] {words}", flush=True)


def _tried(extra: str, wheel: Path) -> tuple[list[str], list[str]]:
    """Install the wheel with one extra beside torch and try it. Returns a row of the table, and the problems."""
    made = Environment(WORK / f"release-{extra}")
    began = time.monotonic()
    try:
        _say(f"{extra}: installing")
        run([uv(), "venv", "--quiet", "--clear", str(made.folder)])
        install = [uv(), "pip", "install", "--quiet", "--python", made.python, *pip_sources()]
        run([*install, TORCH])
        made.before = packages(made.python)
        run([*install, str(wheel) if extra == "core" else f"{wheel}[{extra}]"])
        made.after = packages(made.python)
        install_seconds = time.monotonic() - began
        if extra == "core":
            _write_sbom(made)
        _say(f"{extra}: names, extras and commands")
        checked, problems = _checked(extra, made)
    except CannotBuildError as error:
        return [extra, "", "", "", "cannot be installed"], [str(error)]
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)
    problems += [f"the install changed {change}" for change in made.changes()]
    added = len(set(made.after) - set(made.before))
    seconds = time.monotonic() - began
    return [extra, str(added), f"{install_seconds:.0f} s", f"{seconds:.0f} s", checked], problems


def _write_sbom(made: Environment) -> None:
    """What the wheel brings without extras, by the environment in which it is installed."""
    SBOM.parent.mkdir(exist_ok=True)
    tool = [uv(), "tool", "run", "--quiet", *pip_sources(), "--from", SBOM_TOOL, "cyclonedx-py", "environment"]
    run([*tool, made.python, "--mc-type", "library", "--output-reproducible", "-o", str(SBOM)])
    _say(f"core: bill of materials in {SBOM.relative_to(ROOT)}")


def _checked(extra: str, made: Environment) -> tuple[str, list[str]]:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    inside = _run([made.python, "-I", str(INSIDE), extra], made.folder, variables)
    lines = [line for line in inside.stdout.splitlines() if line.startswith(("ok ", "FAIL "))]
    problems = [line.removeprefix("FAIL ") for line in lines if line.startswith("FAIL ")]
    if inside.returncode not in (0, 1) or not lines:
        problems.append(f"the checks ended with status {inside.returncode}: {inside.stderr[-300:]}")
    program = str(Path(made.python).with_name("flopwatch"))
    for arguments in COMMANDS:
        done = _run([program, *arguments], made.folder, variables)
        if done.returncode:
            problems.append(f"flopwatch {' '.join(arguments)} ended with {done.returncode}: {done.stdout[-300:]}")
    passed = sum(line.startswith("ok ") for line in lines)
    return f"{passed} of {len(lines)} checks ok" + (", commands ok" if not problems else ""), problems


def _run(command: list[str], folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def _print_table(wheel: Path, sdist: Path, rows: list[list[str]]) -> None:
    print(f"\nwheel {wheel.stat().st_size / 1e3:.0f} kB, sdist {sdist.stat().st_size / 1e3:.0f} kB")
    head = ["installed", "packages added to torch", "install", "all", "result"]
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    raise SystemExit(main())

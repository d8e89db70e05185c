"""The budget of lines: what each package of `src` may have, and the tests, the benchmarks and the docs as a whole.

PYTHONPATH=benchmarks python benchmarks/house/budget.py            # what is used, and what is allowed
PYTHONPATH=benchmarks python benchmarks/house/budget.py --lower    # writes the smaller of both into budget.json

A number only goes down. Whoever moves code from one package to another moves its lines in `budget.json` too, so that
the sum stays. What is not Python is counted by its kind: a table in JSON must be maintained as much as one in Python.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = ROOT / "benchmarks" / "house" / "budget.json"
WHOLES = {"tests": ("tests",), "benchmarks and testbeds": ("benchmarks", "testbeds")}
APART = {"schemas": "schemas (make pages)", "translations": "Chinese sentences"}
"""Files of these folders that are not Python: what a command writes, and sentences in another language."""


def used_lines(root: Path) -> dict[str, int]:
    """Lines by what they are: a package, a kind of other file in `src`, all of `src`, tests, benchmarks, docs."""
    source = root / "src" / "flopwatch"
    used: Counter[str] = Counter()
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".mo":
            used[_kind(path.relative_to(source))] += _lines(path)
    used["all Python of src"] = sum(map(_lines, source.rglob("*.py")))
    for name, folders in WHOLES.items():
        used[name] = sum(_lines(path) for folder in folders for path in (root / folder).rglob("*.py"))
    used["docs"] = sum(map(_lines, (root / "docs").rglob("*.md")))
    return {name: lines for name, lines in used.items() if lines}


def _kind(path: Path) -> str:
    folder = path.parts[0] if len(path.parts) > 1 else "files of the root"
    if path.suffix == ".py":
        return folder
    if path.suffix == ".po":
        return "Chinese sentences"
    return APART.get(folder) or f"{path.suffix.removeprefix('.') or path.name} of {folder}"


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def above(used: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """A line for each package that has more than it may have; one without a budget may have nothing."""
    compared = [(name, lines, allowed.get(name, 0)) for name, lines in used.items()]
    return [
        f"{name}: {lines:,} lines, {lines - most:,} more than the {most:,} of budget.json"
        for name, lines, most in compared
        if lines > most
    ]


def lowered(used: dict[str, int], allowed: dict[str, int]) -> dict[str, int]:
    """The smaller of both; what is gone has no budget any more."""
    return {name: min(lines, used[name]) for name, lines in allowed.items() if name in used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write the smaller of both into budget.json")
    options = parser.parse_args()
    used, allowed = used_lines(ROOT), json.loads(BUDGET.read_text("utf-8"))
    for name in sorted(used | allowed):
        print(f"{name:32} {used.get(name, 0):>8,} of {allowed.get(name, 0):>8,}")
    print(*above(used, allowed), sep="\n")
    if options.lower:
        BUDGET.write_text(json.dumps(lowered(used, allowed), indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

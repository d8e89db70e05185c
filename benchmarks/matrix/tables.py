"""Writes the results of the matrix as a table into docs/versions.md."""

from pathlib import Path

from matrix.environments import ROOT
from matrix.rows import ROWS
from matrix.suite import Outcome

BEGIN, END = "<!-- matrix: make matrix -->", "<!-- end of matrix -->"

HEAD = ("torch", "Python", "transformers", "numpy", "lightning", "accelerate", "portable suite",
        "architectures equal to the truth", "packages changed by the install", "what it lacks",
        "run on, at commit")  # fmt: skip
PAGE = ROOT / "docs" / "versions.md"


def write_tables(results: dict[str, Outcome]) -> None:
    """Write all rows with stored results, in the order of the matrix."""
    ordered = [results[row.name] for row in ROWS if row.name in results]
    _replace(PAGE, long_table(ordered))


def long_table(outcomes: list[Outcome]) -> str:
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for outcome in outcomes:
        versions = [_version(outcome, name) for name in ("transformers", "numpy", "lightning", "accelerate")]
        cells = [_torch(outcome), outcome.python, *versions]
        if outcome.not_run:
            lines.append(_line([*cells, "not run", "", "", outcome.not_run, ""]))
            continue
        changed = ", ".join(outcome.changed_packages) or "none"
        lines.append(_line([*cells, suite_words(outcome), _equal(outcome), changed, lacks(outcome), _run_on(outcome)]))
    return "\n".join(lines)


def suite_words(outcome: Outcome) -> str:
    words = f"{outcome.passed} passed"
    if outcome.failed:
        words += f", **{len(outcome.failed)} failed**: " + ", ".join(_short(name) for name in outcome.failed)
    return words + (f", **{outcome.crash}**" if outcome.crash else "")


def lacks(outcome: Outcome) -> str:
    """What these versions lack: skipped tests, architectures counted by a real step, and missing private names."""
    absent = [f"transformers has no {', '.join(outcome.absent_architectures)}"] if outcome.absent_architectures else []
    by_step = [f"counted by a real step: {', '.join(outcome.counted_by_step)}"] if outcome.counted_by_step else []
    reasons = {reason for name, reason in outcome.skipped.items() if "test_a_count_equals_the_truth" not in name}
    return "; ".join([*absent, *by_step, *sorted(reasons), *outcome.missing]) or "nothing"


def _equal(outcome: Outcome) -> str:
    wrong = sum("test_a_count_equals_the_truth" in name for name in outcome.failed)
    return f"{len(outcome.equal_architectures)} / {len(outcome.equal_architectures) + wrong}"


def _run_on(outcome: Outcome) -> str:
    return ", ".join(filter(None, [outcome.day, outcome.commit and f"`{outcome.commit}`"]))


def _short(name: str) -> str:
    return name.rpartition(".")[2] if "[" not in name else name[name.rindex(".", 0, name.index("[")) + 1 :]


def _torch(outcome: Outcome) -> str:
    release = _version(outcome, "torch") or outcome.name.partition("-")[0].removeprefix("torch")
    return release + " (lowest versions)" * outcome.name.endswith("-lowest")


def _version(outcome: Outcome, package: str) -> str:
    return outcome.versions.get(package, "").partition("+")[0]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _replace(page: Path, table: str) -> None:
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    if not found:
        raise SystemExit(f"{page.relative_to(ROOT)} has no line {BEGIN}")
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")

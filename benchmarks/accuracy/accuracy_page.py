"""The accuracy table in words: for the terminal, and as the generated section of docs/accuracy.md."""

from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich import box
from rich.table import Table

from accuracy.columns import COLUMNS, Column
from accuracy.outcomes import Grade, Outcome, Results, cell_text, grade, relative_error
from accuracy.rivals_venv import RIVAL_PINS
from testbeds.architectures import BY_NAME

START = "<!-- table: python benchmarks/accuracy/accuracy_table.py -->"
END = "<!-- end -->"

_STYLES: dict[Grade, str] = {"exact": "green", "near": "yellow", "off": "dark_orange", "wrong": "red", "none": "dim"}


def shown_columns(results: Results) -> list[Column]:
    return [column for column in COLUMNS if column.tool in results]


def terminal_table(truths: dict[str, int], results: Results) -> Table:
    table = Table(title="FLOPs of one training step against the truth", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("architecture", no_wrap=True)
    for column in shown_columns(results):
        group = "flopwatch\n" if column.group == "flopwatch" else ""
        table.add_column(group + column.heading, justify="right", no_wrap=True)
    for name, truth in truths.items():
        outcomes = [results[column.tool][name] for column in shown_columns(results)]
        cells = [f"[{_STYLES[grade(outcome, truth)]}]{cell_text(outcome, truth)}" for outcome in outcomes]
        table.add_row(name, *cells)
    return table


def section(truths: dict[str, int], results: Results) -> str:
    """Everything between the markers."""
    parts = [
        _provenance(),
        "### In short",
        _summary_table(truths, results),
        "### Every architecture",
        "A cell has the relative error of the tool's count. If the count is below half or above twice the truth, the "
        "cell has count / truth instead (as in `2.4x`). `exact` means equal to the FLOP.",
        _full_table(truths, results),
        *notes(truths, results),
        "### How each column was obtained",
        "\n".join(f"- **{column.title}**: {column.how}" for column in shown_columns(results)),
    ]
    return "\n\n".join(parts)


def notes(truths: dict[str, int], results: Results) -> list[str]:
    """Why cells are empty, and what the tools that report multiply-adds besides FLOPs say there."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for column in shown_columns(results):
        for name in truths:
            outcome = results[column.tool][name]
            if outcome.flops is None:
                reasons[column.title, outcome.reason].append(name)
    lines = [f"No number from {title} for {', '.join(names)}: {reason}." for (title, reason), names in reasons.items()]
    for tool, title in (("deepspeed_macs", "DeepSpeed"), ("calflops_macs", "calflops")):
        if tool in results:
            exact = [name for name, outcome in results[tool].items() if outcome.flops == truths[name]]
            names = f" ({', '.join(exact)})" if exact else ""
            lines.append(
                f"{title} also returns multiply-adds, without element-wise work. Times 6 they are exact on "
                f"{len(exact)} of {len(truths)}{names}."
            )
    return lines


def write_section(page: Path, text: str) -> None:
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{page} has no {START} ... {END} to write between")
    page.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}")


def _provenance() -> str:
    here = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    rivals = ", ".join(f"{name} {pin}" for name, pin in RIVAL_PINS.items())
    return f"Counted on {date.today().isoformat()}, on a CPU, with {here}, {rivals}."


def _summary_table(truths: dict[str, int], results: Results) -> str:
    lines = [
        "| tool | exact | within 5 % | within 20 % | lowest | highest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {_full_title(column)} | {' | '.join(_summary_cells(truths, results[column.tool]))} |"
            for column in shown_columns(results)
        ),
    ]
    return "\n".join(lines)


def _summary_cells(truths: dict[str, int], outcomes: dict[str, Outcome]) -> list[str]:
    errors = {
        name: relative_error(outcome.flops, truths[name])
        for name, outcome in outcomes.items()
        if outcome.flops is not None
    }
    shares = [sum(abs(error) <= limit for error in errors.values()) for limit in (0, 0.05, 0.20)]
    cells = [f"{share} of {len(truths)}" for share in shares]
    for name in (min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)) if errors else ():
        text = cell_text(outcomes[name], truths[name])
        cells.append(text if text == "exact" else f"{text} ({name})")
    return cells if errors else [*cells, "", ""]


def _full_title(column: Column) -> str:
    return f"{column.group} {column.title}" if column.group in ("flopwatch", "PyTorch") else column.title


def _full_table(truths: dict[str, int], results: Results) -> str:
    columns = shown_columns(results)
    header = ["architecture", "kind", "truth, FLOPs", *(column.title for column in columns)]
    lines = [_row(header), _row(["---", "---", "---:", *("---:" for _ in columns)])]
    for name, truth in truths.items():
        cells = [cell_text(results[column.tool][name], truth) for column in columns]
        lines.append(_row([name, BY_NAME[name].kind, f"{truth:,}", *cells]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

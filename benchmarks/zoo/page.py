"""The zoo in words: lines and a table for the terminal, and docs/zoo.md."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich import box
from rich.table import Table

import flopwatch
from zoo.extras import PINS
from zoo.families import FAMILIES
from zoo.specimen import COLUMNS, Outcome, Verdict

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
COMMAND = "PYTHONPATH=src:benchmarks python -m zoo"
_STATES = ("equal", "told", "wrong", "not asked")


def line(row: Outcome) -> str:
    """One architecture in one line."""
    if row.error:
        return f"{row.family} {row.name}: not built, {row.error}"
    cells = "  ".join(f"{column} {_cell(row.cells[column])}" for column in COLUMNS)
    return f"{row.family} {row.name} ({row.kind}, {row.seconds} s): {cells}"


def _cell(cell: Verdict) -> str:
    if cell.status in ("equal", "not asked"):
        return cell.status
    numbers = "" if cell.got is None else f" {cell.got:,} of {cell.truth:,}"
    return f"{cell.status.upper()}{numbers} [{cell.reason[:160]}]"


def summary_table(rows: list[Outcome]) -> Table:
    """Counts per family and column, for the terminal."""
    table = Table(title="Architectures held against real steps", box=box.SIMPLE_HEAD)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for cells in _summary(rows):
        table.add_row(*cells)
    return table


_HEADINGS = (
    "family",
    "tried",
    "built",
    *(f"{column}: {state}" for column in COLUMNS for state in ("equal", "reported", "wrong")),
)


def _summary(rows: list[Outcome]) -> list[tuple[str, ...]]:
    """A line per package, and below transformers one per kind of model: what was not built has none."""
    lines = []
    for family in FAMILIES:
        of_family = [row for row in rows if row.family == family]
        if of_family:
            lines.append(_counts(family, of_family))
        kinds: dict[str, list[Outcome]] = defaultdict(list)
        for row in of_family:
            if family == "transformers" and not row.error:
                kinds[row.kind.split(",")[0].removesuffix(" with images")].append(row)
        lines += [_counts(f"{family}, {kind}", kinds[kind]) for kind in sorted(kinds)]
    return [*lines, _counts("all", rows)]


def _counts(name: str, rows: list[Outcome]) -> tuple[str, ...]:
    built = [row for row in rows if not row.error]
    states = Counter((column, row.cells[column].status) for row in built for column in COLUMNS)
    numbers = [states[column, state] for column in COLUMNS for state in ("equal", "told", "wrong")]
    return (name, *(str(number) for number in (len(rows), len(built), *numbers)))


def page(rows: list[Outcome], not_tried: Sequence[tuple[str, str]] = ()) -> str:
    """All of docs/zoo.md; `not_tried` are families and names without a row."""
    parts = ["# The zoo", _introduction(rows), _provenance(rows), "## In short", _markdown_summary(rows)]
    for state, title in (("wrong", "## Wrong"), ("told", "## Reported")):
        parts += [title, *(_cells_section(rows, column, state) for column in COLUMNS)]
    parts += [
        "## Not tried",
        _not_tried(not_tried),
        "## Not built",
        _not_built(rows),
        "## Equal in every column that could be asked",
        _all_equal(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(rows: list[Outcome]) -> str:
    tried = [family for family in FAMILIES if any(row.family == family for row in rows)]
    sources = " and ".join(filter(None, [", ".join(tried[:-1]), *tried[-1:]]))
    return f"""This page compares the FLOPs that flopwatch counts with those of real steps on a CPU, for small
models of many architectures. The models are made automatically from the configuration classes and model lists of
{sources}. What was not tried and what could not be built stands below.
`{COMMAND}` writes this page again; `--only`, `--family` and `--resume` run a part.
The first run installs torchvision, timm and diffusers into `.cache/zoo`, without their dependencies.

- **count**: `count_flops` of one batch is compared with a real step with eager attention, counted by torch's own
  formulas (with the closed form for the backward pass of grouped convolutions). The executed FLOPs of the eager model
  and the model FLOPs of the model with its default attention must both be equal to this count.
- **law**: `fit_flops_law` of that batch is evaluated for other batch sizes and, if the model takes sequences, for three
  other lengths, even and odd, one of them longer than the example. Each value is compared with a real step.
- **padding**: a batch has three rows of different lengths and an attention mask. `model_flops` is compared with the sum
  over the rows, run alone without padding; work that does not depend on the number of rows is counted once. In
  encoder-decoders, source and target are padded separately.

*Equal* means equal to the FLOP. *Reported* means not equal, but the count or the law says that it is not exact. *Wrong*
means not equal without such a report, or an exception that is not one of flopwatch's errors. A model that was built is
in none of the three where there is nothing to compare: in padding if it takes no attention mask over a sequence, and in
law or padding if the real step fails with such a batch."""


def _provenance(rows: list[Outcome]) -> str:
    installed = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    packages = f"flopwatch {flopwatch.__version__}, {installed}"
    others = ", ".join(pin.replace("==", " ") for pin in PINS)
    minutes = sum(row.seconds for row in rows) / 60
    return (
        f"Made on {date.today().isoformat()} on a CPU with {packages}, {others}; "
        f"{minutes:.0f} minutes of processor time for {len(rows)} architectures tried."
    )


def _markdown_summary(rows: list[Outcome]) -> str:
    heading = "| " + " | ".join(_HEADINGS) + " |"
    rule = "| --- |" + " ---: |" * (len(_HEADINGS) - 1)
    return "\n".join([heading, rule, *("| " + " | ".join(cells) + " |" for cells in _summary(rows))])


def _cells_section(rows: list[Outcome], column: str, state: str) -> str:
    """The cells of one column in this state, those with the same reason together."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        cell = row.cells.get(column)
        if cell is not None and cell.status == state:
            by_reason[_reason(cell, state)].append(f"{row.name}{_ratio(cell)}")
    if not by_reason:
        return f"**{column}**: none."
    lines = [f"- {reason}: {', '.join(sorted(names))}" for reason, names in sorted(by_reason.items())]
    return f"**{column}**\n\n" + "\n".join(lines)


def _reason(cell: Verdict, state: str) -> str:
    if cell.reason:
        return cell.reason.replace("|", "/").replace("<", "`<").replace("\n", " ")[:300]
    return "no reason given" if state == "told" else "another number"


def _ratio(cell: Verdict) -> str:
    return f" ({cell.got / cell.truth:.3f}x)" if cell.got is not None and cell.truth else ""


def _not_tried(tasks: Sequence[tuple[str, str]]) -> str:
    by_family = defaultdict(list)
    for family, name in tasks:
        by_family[family].append(name)
    lines = [f"**{family}** ({len(names)}): {', '.join(sorted(names))}." for family, names in by_family.items()]
    return "\n\n".join(lines) or "None."


def _not_built(rows: list[Outcome]) -> str:
    """Why there is no row: the automatic builder's limits, not flopwatch's."""
    by_family = defaultdict(list)
    for row in rows:
        if row.error:
            by_family[row.family].append(f"- {row.name}: {_escaped(row.error)}")
    parts = [f"**{family}**\n\n" + "\n".join(sorted(lines)) for family, lines in by_family.items()]
    return "\n\n".join(parts) or "None."


def _escaped(text: str) -> str:
    return "`" + text.replace("`", "'").replace("\n", " ")[:140] + "`"


def _all_equal(rows: list[Outcome]) -> str:
    fine = defaultdict(list)
    for row in rows:
        if not row.error and all(row.cells[column].status in ("equal", "not asked") for column in COLUMNS):
            fine[row.family].append(row.name)
    return "\n\n".join(f"**{family}** ({len(names)}): {', '.join(sorted(names))}." for family, names in fine.items())

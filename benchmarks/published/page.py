"""What the comparison says: tables for the terminal, and the generated part of docs/published.md."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from published.cases import Group
from published.models import MODELS
from published.verdicts import BOUND, Tally, Verdict, of_group, tally

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
START = "<!-- rows: PYTHONPATH=benchmarks python -m published -->"
END = "<!-- end -->"
_SHOWN: dict[Group | None, str] = {
    "stated": "stated",
    "own term": "stated, own term",
    "inferred": "inferred",
    None: "not compared",
}


def summary(all_verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Rows of the first table: each source with each of its groups, then each group of all sources."""
    by_source = defaultdict[str, list[Verdict]](list)
    for verdict in all_verdicts:
        by_source[verdict.row.source].append(verdict)
    rows = []
    for source, own in (*by_source.items(), ("all", list(all_verdicts))):
        for group, shown in _SHOWN.items():
            found = tally(of_group(own, group))
            if found.rows:
                rows.append((source, shown, *_cells(found)))
    return rows


_SUMMARY_HEAD = (
    "source",
    "convention",
    "rows",
    "rounded tokens/s",
    "compared, not rounded",
    "within 0.5 %",
    "farthest",
)


def _cells(found: Tally) -> tuple[str, ...]:
    if not found.compared:
        return str(found.rows), "", "", "", ""
    share = f"{found.unrounded_within} ({found.unrounded_within / found.unrounded:.1%})" if found.unrounded else ""
    worst = "" if found.worst is None else f"{found.worst.difference:+.2%}"
    return str(found.rows), str(found.compared - found.unrounded), str(found.unrounded), share, worst


def models_table(all_verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Rows of the second table: each model of a source at a length."""
    found = defaultdict[tuple[str, str, int, str], list[Verdict]](list)
    for each in all_verdicts:
        if each.case is not None and not each.row.is_repeated:
            found[each.row.source, each.case.model, each.row.length, each.case.says].append(each)
    rows: list[tuple[str, ...]] = []
    for (source, model, length, says), own in found.items():
        of_all = tally(own)
        per_token = f"{(own[0].flops_per_token or 0) / 1e9:,.3f}"
        worst = max((abs(each.difference or 0) for each in own), default=0)
        rows.append((source, model, f"{length:,}", says, per_token, str(len(own)), str(of_all.within), f"{worst:.2%}"))
    return rows


_MODELS_HEAD = ("source", "model", "length", "convention", "GFLOP per token", "rows", "within 0.5 %", "farthest")


def misses(all_verdicts: Iterable[Verdict]) -> list[tuple[str, ...]]:
    """Every compared row outside the bound."""
    rows: list[tuple[str, ...]] = []
    for each in all_verdicts:
        if each.difference is None or each.is_within or each.row.is_repeated:
            continue
        row = each.row
        unit = "" if row.peak_tflops is None else " %"
        name = " ".join(filter(None, (row.source, row.release, row.model)))
        rates = f"{row.tokens_per_s:,.0f}", f"{row.published:g}{unit}"
        rows.append((name, f"{row.length:,}", row.hardware, *rates, f"{each.difference:+.2%}", each.reason or ""))
    return rows


_MISSES_HEAD = ("row", "length", "on", "tokens/s", "published", "ours", "reason")


def not_compared(all_verdicts: Iterable[Verdict]) -> list[tuple[str, ...]]:
    found = Counter(
        (each.row.source, each.row.model, each.reason or "")
        for each in all_verdicts
        if each.case is None and not each.row.is_repeated
    )
    return [(source, model, str(rows), why) for (source, model, why), rows in found.items()]


def section(all_verdicts: Sequence[Verdict]) -> str:
    """Everything between the markers of the page."""
    used = {each.case.model for each in all_verdicts if each.case is not None}
    sources = [(name, model.source) for name, model in MODELS.items() if name in used and not name.startswith("MPT")]
    sources.append(("MPT", MODELS["MPT 125m"].source))
    repeated = sum(each.row.is_repeated for each in all_verdicts)
    parts = [
        f"{len(all_verdicts)} rows were processed. {repeated} of them stand in two files and count once below.",
        _markdown(_SUMMARY_HEAD, summary(all_verdicts), right=5),
        "### Models",
        _markdown(_MODELS_HEAD, models_table(all_verdicts), right=4),
        f"### Every row outside {BOUND:.1%}",
        _markdown(_MISSES_HEAD, misses(all_verdicts)),
        "### Rows that were not compared",
        _markdown(("source", "model", "rows", "reason"), not_compared(all_verdicts)),
        "### Where the sizes of the models come from",
        _markdown(("model", "source"), sources),
    ]
    return "\n\n".join(parts)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    rule = ["---"] * (len(head) - right) + ["--:"] * right
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def tables(all_verdicts: Sequence[Verdict]) -> list[Table]:
    """The tables of the terminal."""
    return [
        _terminal("Published rows against flopwatch's FLOPs per token", _SUMMARY_HEAD, summary(all_verdicts), right=5),
        _terminal("Every compared row outside 0.5 %", _MISSES_HEAD, misses(all_verdicts)),
    ]


def _terminal(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place >= len(head) - right else "left")
    for cells in rows:
        table.add_row(*cells)
    return table


def with_section(text: str, new: str) -> str:
    """The page with another part between its markers."""
    begin = text.index(START) + len(START)
    return f"{text[:begin]}\n\n{new}\n\n{text[text.index(END, begin) :]}"


def write(new: str) -> None:
    PAGE.write_text(with_section(PAGE.read_text("utf-8"), new), "utf-8")


def write_csv(path: Path, all_verdicts: Iterable[Verdict]) -> None:
    head = ("source", "release", "model", "length", "hardware", "kind", "tokens_per_s", "published", "peak_tflops")
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow((*head, "counted_as", "convention", "group", "flops_per_token", "difference", "reason"))
        for each in all_verdicts:
            row, case = each.row, each.case
            own = (case.model, case.convention, case.group) if case is not None else ("", "", "")
            rows.writerow(
                (*(getattr(row, name) for name in head), *own, each.flops_per_token, each.difference, each.reason)
            )

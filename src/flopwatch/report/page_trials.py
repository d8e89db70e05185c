"""The table of all trials: its data as JSON, drawn by the page's script some hundred rows at a time."""

import json
from collections.abc import Iterator
from typing import Any

from flopwatch.plain_text import plain
from flopwatch.report.charts_bars import outcome_class
from flopwatch.report.records import SweepSummary, TrialRow
from flopwatch.report.svg import esc

# Name, heading, kind (how the script writes it), shown as a column; the rest is told when a row is clicked.
_COLUMNS = (
    ("name", "trial", "text", True),
    ("trainer", "trainer", "words", True),
    ("model", "model", "words", True),
    ("dtype", "dtype", "words", True),
    ("batch_size", "batch", "count", True),
    ("seq_len", "sequence", "count", True),
    ("outcome", "outcome", "words", True),
    ("step_seconds", "step", "seconds", True),
    ("tokens_per_s", "tokens/s", "rate", True),
    ("peak_bytes", "peak", "bytes", True),
    ("mfu", "MFU", "share", True),
    ("hfu", "HFU", "share", True),
    ("reason", "reason", "words", False),
    ("trace", "trace", "text", False),
    ("command", "command", "text", False),
    ("is_unstable", "unstable", "flag", False),
)
_NAMES = [name for name, *_ in _COLUMNS]
MOST_WITH_COMMANDS = 2000


def trial_section(summary: SweepSummary) -> Iterator[str]:
    outcomes = "".join(f'<option value="{esc(name)}">{esc(name)}</option>' for name in summary.totals.by_outcome)
    shown = [(place, heading, kind) for place, (_, heading, kind, is_shown) in enumerate(_COLUMNS) if is_shown]
    heads = "".join(
        f'<th data-column="{place}"{"" if kind in ("text", "words") else " class=n"}>{heading}</th>'
        for place, heading, kind in shown
    )
    yield '<section id="all-trials"><h2>All trials</h2><div class="filter">'
    yield '<input id="trial-filter" type="search" placeholder="Filter: ghost 512 oom" aria-label="Filter trials">'
    yield f'<select id="trial-outcome" aria-label="Outcome"><option value="">every outcome</option>{outcomes}</select>'
    yield '<span class="soft small" id="trial-count"></span></div>'
    yield f'<div class="scroll"><table id="trials"><thead><tr>{heads}</tr></thead><tbody></tbody></table></div>'
    yield '<p><button id="more-trials" hidden>Show 200 more</button></p>'
    yield '<p class="soft small">Click a heading to sort, a row for its reason and command.</p>'
    yield f'<script type="application/json" id="trial-data">{embedded(_data(summary.rows))}</script></section>'


def embedded(content: Any) -> str:
    """JSON that may stand in a script element: no character of it can end the element or open a comment."""
    written = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(rows: tuple[TrialRow, ...]) -> dict[str, Any]:
    """Words that many rows share are stored once."""
    words: list[dict[str, int]] = [{} for _ in _COLUMNS]
    with_commands = len(rows) <= MOST_WITH_COMMANDS
    table = [[_value(row, place, words, with_commands) for place in range(len(_COLUMNS))] for row in rows]
    outcome = _NAMES.index("outcome")
    return {
        "columns": [
            {"kind": "text" if kind == "words" else kind, "shown": is_shown}
            | ({"words": list(words[place])} if kind == "words" else {})
            for place, (_, _, kind, is_shown) in enumerate(_COLUMNS)
        ],
        "rows": table,
        "outcomeColumn": outcome,
        "outcomeClasses": [outcome_class(word) for word in words[outcome]],
        "timeColumn": _NAMES.index("step_seconds"),
        "unstableColumn": _NAMES.index("is_unstable"),
    }


def _value(row: TrialRow, place: int, words: list[dict[str, int]], with_commands: bool) -> Any:
    name, _, kind, _ = _COLUMNS[place]
    value = getattr(row, name)
    if kind == "words":
        return words[place].setdefault(plain(value), len(words[place]))
    if kind == "flag":
        return int(value)
    if isinstance(value, str):
        return plain(value) if name == "name" or with_commands else ""
    return float(f"{value:.4g}") if isinstance(value, float) else value

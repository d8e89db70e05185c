"""The report as one self-contained HTML page. It loads nothing, and all text in it is escaped."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwatch.number_format import UNKNOWN, byte_size, count, duration, percent
from flopwatch.records.reading import plain
from flopwatch.records.trial import LABELS
from flopwatch.report.contents import (
    CLASSES_APART,
    NOTHING_TO_CHOOSE,
    choice_notes,
    choice_sentence,
    layer_words,
    narrowed,
    outcome_class,
    some_choices,
    tally,
    throughput,
    totals_sentence,
)
from flopwatch.report.html_page.group import group_section
from flopwatch.report.html_page.svg import COLOURS, esc
from flopwatch.report.records import Cell, Choice, Failure, Group, SweepSummary, TrialRow
from flopwatch.version import __version__

DETAILED_GROUPS = 12
MOST_WARNINGS = 20


def report_page(summary: SweepSummary) -> str:
    """The whole page."""
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    colours = trainer_colours(summary)
    title = f"Sweep {summary.name}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{esc(title)}</title><style>{style}</style></head><body>",
            *_header(summary),
            "<main>",
            *_sections(summary, colours),
            "</main>",
            f"<footer>flopwatch {esc(__version__)}, from {esc(summary.folder)}. This page loads nothing.</footer>",
            f"<script>{script}</script></body></html>\n",
        ]
    )


def trainer_colours(summary: SweepSummary) -> dict[str, int]:
    """The colour and marker of each trainer on the whole page; built-in trainers have the same in every report."""
    fixed = {trainer: place for place, trainer in enumerate(LABELS)}
    names = dict.fromkeys(name for group in summary.groups for name in group.trainers)
    others = [name for name in names if name not in fixed]
    is_free = not any(name in fixed for name in names)
    return fixed | {name: place if is_free else place + len(fixed) for place, name in enumerate(others)}


def _policy(script: str) -> str:
    """A Content-Security-Policy under which nothing is loaded and only our own script runs."""
    own = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; base-uri 'none'; form-action 'none'"
    )


def _header(summary: SweepSummary) -> Iterator[str]:
    made = f", {datetime.fromtimestamp(summary.created, timezone.utc):%Y-%m-%d %H:%M} UTC" if summary.created else ""
    engine = f", engine {summary.engine}" if summary.engine else ""
    yield f"<header><h1><small>flopwatch sweep{esc(engine)}{made}</small>{esc(summary.name)}</h1>"
    yield f'<p class="soft">{esc(totals_sentence(summary))}.</p></header>'
    links = ["run:What to run", "trainers:Trainers", "groups:Measurements"]
    links += ["failures:What did not run"] if summary.failures else []
    links += ["environment:Environment", "all-trials:All trials"]
    yield "<nav>" + "".join('<a href="#{}">{}</a>'.format(*link.split(":")) for link in links) + "</nav>"


def _sections(summary: SweepSummary, colours: dict[str, int]) -> Iterator[str]:
    yield _tiles(summary)
    yield outcome_strip(summary.totals.by_outcome, with_legend=True)
    yield from (f'<div class="warn">{esc(warning)}</div>' for warning in summary.warnings[:MOST_WARNINGS])
    yield from run_section(summary, colours)
    yield from trainer_section(summary, colours)
    yield '<h2 id="groups">Measurements</h2>' if len(summary.groups) > 1 else '<div id="groups"></div>'
    for place, group in enumerate(summary.groups[:DETAILED_GROUPS]):
        yield from group_section(narrowed(group), colours, is_open=place == 0, is_only=len(summary.groups) == 1)
    if len(summary.groups) > DETAILED_GROUPS:
        more = len(summary.groups) - DETAILED_GROUPS
        yield f'<p class="soft">{more} more groups are in the table of all trials and in the JSON report.</p>'
    yield from failure_section(summary)
    yield from preflight_section(summary)
    yield from environment_section(summary)
    yield from trial_section(summary)


def _tiles(summary: SweepSummary) -> str:
    counted = tally(summary)
    not_run = counted.unsupported + counted.skipped + counted.cancelled + counted.missing
    tried = sum(one.tried for one in summary.trainers)
    tiles = [
        (f"{summary.totals.trials:,}", "planned trials"),
        (percent(counted.ok / tried) if tried else UNKNOWN, f"success: {counted.ok:,} of {tried:,} run"),
        (f"{counted.out_of_memory:,}", f"out of memory, {counted.inferred:,} inferred"),
        (f"{counted.failed:,}", "failed"),
        (f"{not_run:,}", f"not run, {counted.missing:,} missing"),
        (duration(summary.totals.trial_seconds), f"of trials, {duration(summary.totals.wall_seconds)} wall time"),
    ]
    return '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _tile(number: str, words: str) -> str:
    return f'<div class="tile"><b>{esc(number)}</b><span>{esc(words)}</span></div>'


MOST_CHOICES = 16
MOST_GROUPS = 40
MOST_FAILURES = 60
MOST_ROWS = 200
_ORDER = {"ok": 0, "oom": 1, "failed": 2, "not-run": 3}


def outcome_strip(by_outcome: Mapping[str, int], *, with_legend: bool = False) -> str:
    """The shares of outcomes as one bar."""
    total = sum(by_outcome.values())
    if not total:
        return ""
    counts = sorted(by_outcome.items(), key=lambda item: (_ORDER[outcome_class(item[0])], -item[1]))
    bars = "".join(
        f'<i class="{outcome_class(name)}" style="width:{100 * n / total:.3f}%" data-t="{esc(name)}: {n:,}"></i>'
        for name, n in counts
    )
    legend = "".join(f'<span><i class="{outcome_class(name)}"></i>{esc(name)} {n:,}</span>' for name, n in counts)
    return f'<div class="strip">{bars}</div>' + (f'<div class="legend">{legend}</div>' if with_legend else "")


def run_section(summary: SweepSummary, colours: Mapping[str, int]) -> Iterator[str]:
    """What to run, which is the answer most readers look for."""
    yield '<section id="run"><h2>What to run</h2>'
    groups = [group for group in summary.groups if group.choices]
    if not groups:
        yield f"<p>{NOTHING_TO_CHOOSE}</p></section>"
        return
    yield (
        '<p class="soft">The fastest trial at each sequence length, and the trial with the least memory within 10 % of '
        f"its throughput. {CLASSES_APART}</p>"
    )
    for place, group in enumerate(groups[:MOST_GROUPS]):
        table = _choices(group, colours)
        title = f"{esc(group.title)}"
        if place < 3:
            yield f"<h3>{title}</h3>{table}"
        else:
            yield f"<details><summary>{title}</summary>{table}</details>"
    if len(groups) > MOST_GROUPS:
        yield f"<p>{len(groups) - MOST_GROUPS:,} more groups are in the JSON report.</p>"
    yield "</section>"


def trainer_section(summary: SweepSummary, colours: Mapping[str, int]) -> Iterator[str]:
    yield '<section id="trainers"><h2>Trainers</h2><div class="scroll"><table><thead><tr><th>trainer</th><th>class</th>'
    heads = ("ok / run", "success", "out of memory", "failed", "not run", "mean peak", "on shared ones")
    yield "<th>outcomes</th>" + "".join(f'<th class="n">{head}</th>' for head in heads) + "</tr></thead><tbody>"
    for one in summary.trainers[:MOST_ROWS]:
        numbers = (
            f"{one.ok:,} / {one.tried:,}",
            percent(one.success_rate),
            f"{one.out_of_memory:,}",
            f"{one.failed:,}",
            f"{one.not_run:,}",
            byte_size(one.mean_peak_bytes),
            byte_size(one.shared_mean_peak_bytes),
        )
        yield f'<tr><td class="name">{_dot(one.trainer, colours)}{esc(one.trainer)}</td><td>{_chip(one.privacy)}</td>'
        yield (
            f"<td>{outcome_strip(one.by_outcome)}</td>" + "".join(f'<td class="n">{n}</td>' for n in numbers) + "</tr>"
        )
    shared = max((one.shared_peaks for one in summary.trainers), default=0)
    yield "</tbody></table></div>"
    yield (
        '<p class="soft small">Success is the share of trials that ran which are ok. A trainer that ran only small '
        "configurations has a small mean peak, so the last column is the mean over the configurations that every "
        f"trainer ran ({shared:,}).</p></section>"
    )


def failure_section(summary: SweepSummary) -> Iterator[str]:
    if not summary.failures:
        return
    yield '<section id="failures"><h2>What did not run, and why</h2>'
    yield '<p class="soft">Grouped by cause; numbers and paths in messages are replaced so that causes match.</p>'
    for place, failure in enumerate(summary.failures[:MOST_FAILURES]):
        yield _failure(failure, is_open=place < 2)
    if len(summary.failures) > MOST_FAILURES:
        yield f"<p>{len(summary.failures) - MOST_FAILURES:,} more causes are in the JSON report.</p>"
    yield "</section>"


def environment_section(summary: SweepSummary) -> Iterator[str]:
    yield '<section id="environment"><h2>Environment</h2>'
    if not summary.environments:
        yield "<p>No trial recorded its environment.</p>"
    else:
        names = list(dict.fromkeys(name for one in summary.environments for name in one.settings))
        heads = "".join(f"<th>{esc(name)}</th>" for name in names)
        yield f'<div class="scroll"><table><thead><tr><th class="n">trials</th>{heads}</tr></thead><tbody>'
        for one in summary.environments[:MOST_ROWS]:
            cells = "".join(f"<td>{esc(one.settings.get(name, UNKNOWN))}</td>" for name in names)
            yield f'<tr><td class="n">{one.trials:,}</td>{cells}</tr>'
        yield "</tbody></table></div>"
    yield "</section>"


def preflight_section(summary: SweepSummary) -> Iterator[str]:
    if not summary.preflight:
        return
    yield '<section id="preflight"><h2>Preflight</h2><div class="scroll"><table><thead><tr>'
    yield '<th>trainer</th><th>model</th><th>can</th><th class="n">parameters</th>'
    yield "<th>layers</th><th>why not</th></tr></thead><tbody>"
    for row in summary.preflight[:MOST_ROWS]:
        size = row.get("parameters")
        words = count(size) if isinstance(size, int | float) else UNKNOWN
        can = ("yes" if row.get("tried", True) else "not known") if row["supported"] else "no"
        yield f"<tr><td>{esc(row['trainer'])}</td><td>{esc(row['model'])}</td><td>{can}</td>"
        yield f'<td class="n">{words}</td><td>{esc(layer_words(row))}</td>'
        yield f"<td>{esc(row.get('reason') or '')}</td></tr>"
    yield "</tbody></table></div></section>"


def _choices(group: Group, colours: Mapping[str, int]) -> str:
    shown = some_choices(group.choices, MOST_CHOICES)
    most = max((choice.fastest.samples_per_s or 0) * choice.seq_len for choice in shown)
    head = '<th class="n">sequence</th><th>class</th><th>fastest that ran</th><th class="n">throughput</th><th></th>'
    head += '<th class="n">peak</th><th>least memory within 10 %</th><th class="n">peak</th><th>measured verdict</th>'
    rows = "".join(_choice_row(choice, most, colours) for choice in shown)
    left_out = len(group.choices) - len(shown)
    note = f'<p class="soft small">{left_out:,} more rows are in the JSON report.</p>' if left_out else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'


def _choice_row(choice: Choice, most: float, colours: Mapping[str, int]) -> str:
    fastest, lightest = choice.fastest, choice.lightest
    rate = (fastest.samples_per_s or 0) * choice.seq_len
    kind = colours[fastest.trainer] % COLOURS
    is_same = lightest is not None and lightest.trial == fastest.trial
    lighter = '<span class="soft">the same</span>' if is_same else _named(lightest, colours) if lightest else UNKNOWN
    notes = choice_notes(choice)
    verdict = esc(choice_sentence(choice)) + (f'; <span class="soft">{esc(notes)}</span>' if notes else "")
    return (
        f'<tr class="{"tied" if choice.tied else ""}"><td class="n">{choice.seq_len}</td>'
        f"<td>{_chip(choice.privacy)}</td>"
        f'<td>{_named(fastest, colours, "≈ " if choice.tied else "")}</td><td class="n">{throughput(fastest)}</td>'
        f'<td><span class="bar k{kind}" style="width:{round(70 * rate / most) if most else 0}px"></span></td>'
        f'<td class="n">{byte_size(fastest.peak_bytes)}</td><td>{lighter}</td>'
        f'<td class="n">{"" if is_same or lightest is None else byte_size(lightest.peak_bytes)}</td>'
        f'<td class="small verdict">{verdict}</td></tr>'
    )


def _failure(failure: Failure, *, is_open: bool) -> str:
    kind = outcome_class(failure.outcome)
    trainers = ", ".join(f"{name} {number:,}" for name, number in failure.by_trainer.items())
    place = f"phase {failure.phase}" + (f", step {failure.step}" if failure.step is not None else "")
    evidence = ", ".join(f"{name} {value}" for name, value in failure.evidence.items() if name != "exception")
    facts = {"trainers": trainers, "example": failure.example, "it says": failure.reason, "where": place}
    facts["evidence"] = evidence
    listed = "".join(f"<dt>{name}</dt><dd>{esc(fact)}</dd>" for name, fact in facts.items() if fact)
    advice = "".join(f"<dt>advice</dt><dd><b>{esc(line)}</b></dd>" for line in failure.advice)
    blocks = {"runs it again": failure.command, "last lines of its log": failure.log_tail, "stacks": failure.stacks}
    shown = "".join(f'<span class="soft small">{name}</span><pre>{esc(b)}</pre>' for name, b in blocks.items() if b)
    return (
        f'<details class="failure o-{kind}"{" open" if is_open else ""}><summary><b>{esc(failure.outcome)}</b> '
        f'<span class="chip">{failure.count:,}×</span> {esc(failure.cause)}</summary>'
        f'<div class="body"><dl>{listed}{advice}</dl>{shown}</div></details>'
    )


def _named(cell: Cell, colours: Mapping[str, int], mark: str = "") -> str:
    name = f'{mark}{esc(cell.trainer)} <span class="b">batch {cell.batch_size}</span>'
    return f'<span class="run">{_dot(cell.trainer, colours)}{name}</span>'


def _dot(trainer: str, colours: Mapping[str, int]) -> str:
    return f'<span class="dot k{colours.get(trainer, 0) % COLOURS}"></span>'


def _chip(words: str) -> str:
    return f'<span class="chip">{esc(words)}</span>'


# The table of all trials is JSON that the page's script draws, 200 rows at a time: field, heading, kind (which decides
# the script's format), and whether it is a column; the other fields are shown when a row is clicked.
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
    yield '<p class="soft small">Click a heading to sort, or a row to see its reason and command.</p>'
    yield f'<script type="application/json" id="trial-data">{embedded(_data(summary.rows))}</script></section>'


def embedded(content: Any) -> str:
    """JSON for a script element: without characters that could end the element or begin a comment."""
    written = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(rows: tuple[TrialRow, ...]) -> dict[str, Any]:
    """The rows, with texts that many rows share stored once."""
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

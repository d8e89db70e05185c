"""Write the report as one HTML page, which loads no other files. All text from trials is escaped."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwatch.numbers import UNKNOWN, byte_size, duration, percent
from flopwatch.present.svg import COLOURS, esc
from flopwatch.records.trial import FAILED, LABELS, OUT_OF_MEMORY
from flopwatch.report import contents
from flopwatch.report.html_page.frame import whole_page
from flopwatch.report.html_page.group import group_section
from flopwatch.report.records import Cell, Choice, Failure, Group, SweepSummary, TrialRow
from flopwatch.text import plain

DETAILED_GROUPS = 12


def report_page(summary: SweepSummary) -> str:
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    sections = _sections(summary, trainer_colours(summary))
    return whole_page(f"Sweep {summary.name}", _header(summary), sections, summary.folder, script=script)


def trainer_colours(summary: SweepSummary) -> dict[str, int]:
    """Assign a colour and marker to each trainer. Built-in trainers have the same ones in every report."""
    fixed = {trainer: place for place, trainer in enumerate(LABELS)}
    names = dict.fromkeys(name for group in summary.groups for name in group.trainers)
    others = [name for name in names if name not in fixed]
    is_free = not any(name in fixed for name in names)
    return fixed | {name: place if is_free else place + len(fixed) for place, name in enumerate(others)}


def _header(summary: SweepSummary) -> Iterator[str]:
    made = f", {datetime.fromtimestamp(summary.created, timezone.utc):%Y-%m-%d %H:%M} UTC" if summary.created else ""
    engine = f", engine {summary.engine}" if summary.engine else ""
    yield f"<header><h1><small>flopwatch sweep{esc(engine)}{made}</small>{esc(summary.name)}</h1>"
    yield f'<p class="soft">{esc(contents.totals_sentence(summary))}.</p></header>'
    links = ["run:What to run", "trainers:Trainers", "groups:Measurements"]
    links += ["failures:What did not run"] if summary.failures else []
    links += ["environment:Environment", "all-trials:All trials"]
    yield "<nav>" + "".join('<a href="#{}">{}</a>'.format(*link.split(":")) for link in links) + "</nav>"


def _sections(summary: SweepSummary, colours: dict[str, int]) -> Iterator[str]:
    yield _tiles(summary)
    yield outcome_strip(summary.totals.by_outcome, with_legend=True)
    yield from (f'<div class="warn">{esc(warning)}</div>' for warning in contents.shown_warnings(summary))
    yield from run_section(summary, colours)
    yield from trainer_section(summary, colours)
    yield '<h2 id="groups">Measurements</h2>' if len(summary.groups) > 1 else '<div id="groups"></div>'
    for place, group in enumerate(summary.groups[:DETAILED_GROUPS]):
        yield from group_section(
            contents.narrowed(group), colours, is_open=place == 0, is_only=len(summary.groups) == 1
        )
    if len(summary.groups) > DETAILED_GROUPS:
        more = len(summary.groups) - DETAILED_GROUPS
        yield f'<p class="soft">{more} more groups are in the table of all trials and in the JSON report.</p>'
    yield from failure_section(summary)
    yield from preflight_section(summary)
    yield from environment_section(summary)
    yield from trial_section(summary)


def _tiles(summary: SweepSummary) -> str:
    ok, missing = contents.trials_with(summary, "ok"), contents.trials_with(summary, "missing")
    tried = sum(one.tried for one in summary.trainers)
    tiles = [
        (f"{summary.totals.trials:,}", "planned trials"),
        (percent(ok / tried) if tried else UNKNOWN, f"success: {ok:,} of {tried:,} trials that ran"),
        (
            f"{contents.trials_with(summary, *OUT_OF_MEMORY):,}",
            f"out of memory, {contents.trials_with(summary, 'oom_inferred'):,} of them inferred",
        ),
        (f"{contents.trials_with(summary, *FAILED):,}", "failed"),
        (
            f"{contents.trials_with(summary, 'unsupported', 'skipped', 'cancelled') + missing:,}",
            f"not run, {missing:,} of them without a result yet",
        ),
        (duration(summary.totals.trial_seconds), f"of trials in {duration(summary.totals.wall_seconds)} wall time"),
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
    """Draw the shares of the outcomes as one horizontal bar."""
    total = sum(by_outcome.values())
    if not total:
        return ""
    counts = sorted(by_outcome.items(), key=lambda item: (_ORDER[contents.outcome_class(item[0])], -item[1]))
    bars = "".join(
        f'<i class="{contents.outcome_class(name)}" style="width:{n / total:.3%}" data-t="{esc(name)}: {n:,}"></i>'
        for name, n in counts
    )
    legend = "".join(
        f'<span><i class="{contents.outcome_class(name)}"></i>{esc(name)} {n:,}</span>' for name, n in counts
    )
    return f'<div class="strip">{bars}</div>' + (f'<div class="legend">{legend}</div>' if with_legend else "")


def run_section(summary: SweepSummary, colours: Mapping[str, int]) -> Iterator[str]:
    yield '<section id="run"><h2>What to run</h2>'
    groups = [group for group in summary.groups if group.choices]
    if not groups:
        yield f"<p>{contents.NOTHING_TO_CHOOSE}</p></section>"
        return
    yield (
        '<p class="soft">For each sequence length: the fastest trial, and the trial with the least memory among those '
        f"with at least 90 % of its throughput. {contents.CLASSES_APART}</p>"
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
    heads = (*contents.TRAINER_HEADINGS, "mean peak, shared")
    yield "<th>outcomes</th>" + "".join(f'<th class="n">{head}</th>' for head in heads) + "</tr></thead><tbody>"
    for one in summary.trainers[:MOST_ROWS]:
        yield f'<tr><td class="name">{_dot(one.trainer, colours)}{esc(one.trainer)}</td><td>{_chip(one.privacy)}</td>'
        cells = "".join(f'<td class="n">{text}</td>' for text in contents.trainer_cells(one))
        yield f"<td>{outcome_strip(one.by_outcome)}</td>{cells}</tr>"
    shared = max((one.shared_peaks for one in summary.trainers), default=0)
    yield "</tbody></table></div>"
    yield (
        '<p class="soft small">Success is the share of ok trials among those that ran. A trainer that ran only small '
        "configurations has a small mean peak. To compare trainers, use the last column: it is the mean over the "
        f"{shared:,} configurations that every trainer ran.</p></section>"
    )


def failure_section(summary: SweepSummary) -> Iterator[str]:
    if not summary.failures:
        return
    yield '<section id="failures"><h2>What did not run, and why</h2>'
    yield '<p class="soft">Trials are grouped by cause. Numbers and paths in messages are replaced by N and PATH.</p>'
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
    heads = "".join(f"<th>{heading}</th>" for heading in contents.PREFLIGHT_HEADINGS)
    yield '<section id="preflight"><h2>Preflight: which trainer supports which model</h2>'
    yield f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>'
    for row in summary.preflight[:MOST_ROWS]:
        yield "<tr>" + "".join(f"<td>{esc(cell)}</td>" for cell in contents.preflight_cells(row)) + "</tr>"
    yield "</tbody></table></div></section>"


def _choices(group: Group, colours: Mapping[str, int]) -> str:
    shown = contents.some_choices(group.choices, MOST_CHOICES)
    most = max((choice.fastest.samples_per_s or 0) * choice.seq_len for choice in shown)
    head = '<th class="n">sequence</th><th>class</th><th>fastest that ran</th><th class="n">throughput</th><th></th>'
    head += '<th class="n">peak</th><th>least memory within 10 %</th><th class="n">peak</th><th>verdict</th>'
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
    notes = "; ".join(choice.caveats)
    verdict = esc(choice.verdict) + (f'; <span class="soft">{esc(notes)}</span>' if notes else "")
    return (
        f'<tr class="{"tied" if choice.tied else ""}"><td class="n">{choice.seq_len}</td>'
        f"<td>{_chip(choice.privacy)}</td>"
        f"<td>{_named(fastest, colours, '≈ ' if choice.tied else '')}</td>"
        f'<td class="n">{contents.throughput(fastest)}</td>'
        f'<td><span class="bar k{kind}" style="width:{round(70 * rate / most) if most else 0}px"></span></td>'
        f'<td class="n">{byte_size(fastest.peak_bytes)}</td><td>{lighter}</td>'
        f'<td class="n">{"" if is_same or lightest is None else byte_size(lightest.peak_bytes)}</td>'
        f'<td class="small verdict">{verdict}</td></tr>'
    )


def _failure(failure: Failure, *, is_open: bool) -> str:
    kind = contents.outcome_class(failure.outcome)
    facts = contents.failure_facts(failure).items()
    listed = "".join(f"<dt>{name}</dt><dd>{esc(fact)}</dd>" for name, fact in facts if fact)
    advice = "".join(f"<dt>advice</dt><dd><b>{esc(line)}</b></dd>" for line in failure.advice)
    blocks = {
        "command to run the example again": failure.command,
        "last lines of its log": failure.log_tail,
        "stack traces": failure.stacks,
    }
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


# The script of the page draws the table of all trials from JSON, 200 rows at a time. Each entry is a field of
# `TrialRow`: its name, its heading, its kind (which decides how the script formats it), and whether it is a column of
# the table. The script shows the other fields when the user clicks a row.
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
    """Write JSON for a script element, escaping the characters that could end the element or begin a comment."""
    written = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(rows: tuple[TrialRow, ...]) -> dict[str, Any]:
    """Return the content of the table for the script. Texts that many rows share are stored only once."""
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
        "outcomeClasses": [contents.outcome_class(word) for word in words[outcome]],
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

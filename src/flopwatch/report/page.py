"""The report as one self-contained page: nothing is loaded, everything shown is escaped."""

import hashlib
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from flopwatch.report.figures import duration, share
from flopwatch.report.page_group import group_section
from flopwatch.report.page_sections import (
    environment_section,
    failure_section,
    outcome_strip,
    preflight_section,
    run_section,
    trainer_section,
)
from flopwatch.report.page_trials import trial_section
from flopwatch.report.records import SweepSummary
from flopwatch.report.selection import narrowed
from flopwatch.report.sentences import tally, totals_sentence
from flopwatch.report.svg import esc
from flopwatch.version import __version__

DETAILED_GROUPS = 12
MOST_WARNINGS = 20


def report_page(summary: SweepSummary) -> str:
    """The whole page as text."""
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
    """The same colour and marker for a trainer everywhere; the four known ones always theirs."""
    fixed = {"standard": 0, "dpsgd": 1, "ghost": 2, "fast": 3}
    names = dict.fromkeys(name for group in summary.groups for name in group.trainers)
    others = [name for name in names if name not in fixed]
    is_free = not any(name in fixed for name in names)
    return fixed | {name: place if is_free else place + 4 for place, name in enumerate(others)}


def _policy(script: str) -> str:
    """Nothing may be loaded, and no script but ours may run."""
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
        (f"{summary.totals.trials:,}", "trials asked for"),
        (share(counted.ok / tried) if tried else "–", f"success: {counted.ok:,} of {tried:,} run"),
        (f"{counted.out_of_memory:,}", f"out of memory, {counted.inferred:,} inferred"),
        (f"{counted.failed:,}", "failed"),
        (f"{not_run:,}", f"not run, {counted.missing:,} missing"),
        (duration(summary.totals.trial_seconds), f"of trials, {duration(summary.totals.wall_seconds)} on the clock"),
    ]
    return '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _tile(number: str, words: str) -> str:
    return f'<div class="tile"><b>{esc(number)}</b><span>{esc(words)}</span></div>'

"""The report as Markdown that can be pasted into a GitHub issue."""

import re
from collections.abc import Iterable, Iterator, Sequence

from flopwatch.records.reading import one_line, plain
from flopwatch.report.figures import UNKNOWN, count, duration, factor, memory, share
from flopwatch.report.matrices import (
    Metric,
    best_trials,
    cell_text,
    evenly,
    known_metrics,
    matrix_rows,
    narrowed,
    some_choices,
)
from flopwatch.report.records import Cell, Choice, Failure, Group, SweepSummary
from flopwatch.report.sentences import (
    HEADINGS,
    MATRIX_NOTES,
    choice_notes,
    choice_sentence,
    configuration,
    crossover_digest,
    denominator_sentence,
    frontier_words,
    privacy_cells,
    privacy_notes,
    throughput,
    totals_sentence,
)

MOST_ROWS = 60
MOST_GROUPS = 6
MOST_FAILURES = 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#|~$])")


def report_markdown(summary: SweepSummary) -> str:
    """Headings, tables and folded logs; nothing of it is taken for markup that a trial printed."""
    return "\n".join(_lines(summary)).rstrip() + "\n"


def escaped(text: str) -> str:
    r"""One line that shows as it is.

    >>> escaped("a|b <script> @user #12")
    'a\\|b \\<script\\> @\u200buser \\#12'
    """
    # A name after @ would notify somebody who has nothing to do with it.
    return _SPECIAL.sub(r"\\\1", one_line(text)).replace("@", "@\u200b")


def fenced(text: str) -> str:
    """A block of code that nothing in the text can end."""
    text = plain(text)  # first: what it takes out may have held backticks apart
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _lines(summary: SweepSummary) -> Iterator[str]:
    yield f"## Sweep {escaped(summary.name)}"
    yield f"\n{totals_sentence(summary)}; {duration(summary.totals.trial_seconds)} of trials.\n"
    yield from (f"> **Note:** {escaped(warning)}\n" for warning in summary.warnings[:MOST_FAILURES])
    groups = summary.groups[:MOST_GROUPS]
    yield "### What to run\n"
    yield from _what_to_run(groups)
    yield "### Trainers\n"
    yield from _trainers(summary)
    for group in groups:
        yield from _group(narrowed(group))
    if len(summary.groups) > MOST_GROUPS:
        yield f"\n{len(summary.groups) - MOST_GROUPS} more groups are in the HTML and JSON reports.\n"
    if summary.failures:
        yield "### What did not run, and why\n"
        for failure in summary.failures[:MOST_FAILURES]:
            yield from _failure(failure)
    if summary.environments:
        yield "### Environment\n"
        for environment in summary.environments[:MOST_ROWS]:
            settings = ", ".join(f"{name} {value}" for name, value in environment.settings.items())
            yield f"- {environment.trials:,} trials: {escaped(settings)}"


def _what_to_run(groups: Sequence[Group]) -> Iterator[str]:
    head = ("", "seq", "class", "fastest that ran", "throughput", "peak", "least memory within 10 %", "peak", "")
    rows = [(group, choice) for group in groups for choice in some_choices(group.choices, MOST_ROWS // len(groups))]
    if not rows:
        yield "Nothing ran to its end with a measured time: there is nothing to choose from.\n"
        return
    yield from _table(head, (_choice_cells(group, choice) for group, choice in rows), "l1l")
    yield "\nPrivate and not private trainers are never weighed against each other.\n"


def _choice_cells(group: Group, choice: Choice) -> tuple[str, ...]:
    fastest, lightest = choice.fastest, choice.lightest
    remarks = [choice_sentence(choice)] if choice.tied else []
    remarks += [note] if (note := choice_notes(choice)) else []
    name = escaped(configuration(fastest))
    return (
        escaped(group.title),
        str(choice.seq_len),
        choice.privacy,
        f"≈ {name}" if choice.tied else f"**{name}**",
        throughput(fastest),
        memory(fastest.peak_bytes),
        escaped(configuration(lightest)) if lightest else UNKNOWN,
        memory(lightest.peak_bytes if lightest else None),
        escaped("; ".join(remarks)),
    )


def _trainers(summary: SweepSummary) -> Iterator[str]:
    head = ("trainer", "class", "ok / run", "success", "out of memory", "failed", "not run", "mean peak", "shared¹")
    rows = (
        (
            escaped(one.trainer),
            one.privacy,
            f"{one.ok:,} / {one.tried:,}",
            share(one.success_rate),
            f"{one.out_of_memory:,}",
            f"{one.failed:,}",
            f"{one.not_run:,}",
            memory(one.mean_peak_bytes),
            memory(one.shared_mean_peak_bytes),
        )
        for one in summary.trainers[:MOST_ROWS]
    )
    yield from _table(head, rows, "ll")
    yield "\n¹ Mean over the configurations that every trainer ran.\n"


def _group(group: Group) -> Iterator[str]:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    yield f"### {escaped(group.title)}{parameters}\n"
    metrics = known_metrics(group)
    for metric in metrics:
        yield from _matrix(group, metric)
    if metrics:
        yield "\n".join(f"<sub>{note.replace('>', '&gt;')}</sub>  " for note in MATRIX_NOTES) + "\n"
    if sentence := denominator_sentence(group):
        yield f"{escaped(sentence)}\n"
    yield from _factors(group)
    yield from _frontier(group)
    yield from _privacy(group)
    yield from (f"- {escaped(sentence)}" for sentence in crossover_digest(group.crossovers)[:MOST_ROWS])
    yield ""


def _matrix(group: Group, metric: Metric) -> Iterator[str]:
    rows = matrix_rows(group)
    shown = evenly(rows, MOST_ROWS)
    of_all = f" ({len(shown)} of {len(rows):,} rows)" if len(shown) < len(rows) else ""
    yield f"**{metric.title}**{of_all}\n"
    head = ("seq", "batch", *(escaped(name) for name in group.trainers))
    cells = ((str(row.seq_len), str(row.batch_size), *_matrix_cells(row.cells, metric)) for row in shown)
    yield from _table(head, cells)
    yield ""


def _matrix_cells(cells: Sequence[Cell | None], metric: Metric) -> Iterator[str]:
    best = best_trials(cells, metric)
    for cell in cells:
        text = escaped(cell_text(cell, metric))
        yield f"**{text}**" if cell is not None and cell.trial in best else text


def _factors(group: Group) -> Iterator[str]:
    if not group.cost_factors:
        return
    yield "**Cost against standard**\n"
    rows = (
        (str(one.seq_len), str(one.batch_size), escaped(one.trainer), *map(factor, (one.time, one.memory, one.flops)))
        for one in evenly(group.cost_factors, MOST_ROWS)
    )
    yield from _table(("seq", "batch", "trainer", "time", "memory", "FLOPs"), rows)
    yield ""


def _frontier(group: Group) -> Iterator[str]:
    yield "**Largest batch that ran (smallest out of memory)**\n"
    points = {(point.trainer, point.seq_len): point for point in group.frontier}
    rows = (
        (str(seq), *(frontier_words(points[name, seq]) if (name, seq) in points else "" for name in group.trainers))
        for seq in evenly(group.seq_lens, MOST_ROWS)
    )
    yield from _table(("seq", *(escaped(name) for name in group.trainers)), rows)
    yield ""


def _privacy(group: Group) -> Iterator[str]:
    if group.privacy_spent:
        yield "**Privacy**\n"
        shown = evenly(group.privacy_spent, MOST_ROWS)
        yield from _table(HEADINGS, (tuple(map(escaped, privacy_cells(row))) for row in shown))
        yield ""
    yield from (f"{escaped(note)}\n" for note in privacy_notes(group))


def _failure(failure: Failure) -> Iterator[str]:
    yield f"#### {escaped(failure.outcome)}, {failure.count:,}×: {escaped(failure.cause)}\n"
    yield f"- example {escaped(failure.example)}: {escaped(failure.reason)}"
    yield from (f"- {escaped(advice)}" for advice in failure.advice)
    if failure.command:
        yield f"\n{fenced(one_line(failure.command))}"
    for title, block in (("last lines of its log", failure.log_tail), ("stacks", failure.stacks)):
        if block:
            yield f"\n<details><summary>{title}</summary>\n\n{fenced(block)}\n\n</details>"
    yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], sides: str = "") -> Iterator[str]:
    """Numbers to the right, unless `sides` says `l` for the column."""
    yield f"| {' | '.join(head)} |"
    marks = [":--" if place < len(sides) and sides[place] == "l" else "--:" for place in range(len(head))]
    yield f"| {' | '.join(marks)} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)

"""Sections of the page about the whole sweep."""

from collections.abc import Iterator, Mapping

from flopwatch.report.charts_bars import outcome_class
from flopwatch.report.figures import UNKNOWN, count, memory, share
from flopwatch.report.records import Cell, Choice, Failure, Group, SweepSummary
from flopwatch.report.selection import some_choices
from flopwatch.report.sentences import choice_notes, choice_sentence, layer_words, throughput
from flopwatch.report.svg import COLOURS, esc

MOST_CHOICES = 16
MOST_GROUPS = 40
MOST_FAILURES = 60
MOST_ROWS = 200
_ORDER = {"ok": 0, "oom": 1, "failed": 2, "not-run": 3}


def outcome_strip(by_outcome: Mapping[str, int], *, with_legend: bool = False) -> str:
    """Shares of outcomes as one bar."""
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
    """The answer first."""
    yield '<section id="run"><h2>What to run</h2>'
    groups = [group for group in summary.groups if group.choices]
    if not groups:
        yield "<p>Nothing ran to its end with a measured time: there is nothing to choose from.</p></section>"
        return
    yield (
        '<p class="soft">The fastest that ran at each sequence length, and the one with the least memory within 10 % '
        "of it. Private and not private trainers are never weighed against each other.</p>"
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
            share(one.success_rate),
            f"{one.out_of_memory:,}",
            f"{one.failed:,}",
            f"{one.not_run:,}",
            memory(one.mean_peak_bytes),
            memory(one.shared_mean_peak_bytes),
        )
        yield f'<tr><td class="name">{_dot(one.trainer, colours)}{esc(one.trainer)}</td><td>{_chip(one.privacy)}</td>'
        yield (
            f"<td>{outcome_strip(one.by_outcome)}</td>" + "".join(f'<td class="n">{n}</td>' for n in numbers) + "</tr>"
        )
    shared = max((one.shared_peaks for one in summary.trainers), default=0)
    yield "</tbody></table></div>"
    yield (
        '<p class="soft small">Success is of those that were run. A trainer that ran only small configurations has a '
        f"small mean peak; the last column is over what every trainer ran ({shared:,}).</p></section>"
    )


def failure_section(summary: SweepSummary) -> Iterator[str]:
    if not summary.failures:
        return
    yield '<section id="failures"><h2>What did not run, and why</h2>'
    yield '<p class="soft">Grouped by cause; numbers and paths are taken out of messages, so like ones meet.</p>'
    for place, failure in enumerate(summary.failures[:MOST_FAILURES]):
        yield _failure(failure, is_open=place < 2)
    if len(summary.failures) > MOST_FAILURES:
        yield f"<p>{len(summary.failures) - MOST_FAILURES:,} more causes are in the JSON report.</p>"
    yield "</section>"


def environment_section(summary: SweepSummary) -> Iterator[str]:
    yield '<section id="environment"><h2>Environment</h2>'
    if not summary.environments:
        yield "<p>No trial told where it ran.</p>"
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
        f'<td class="n">{memory(fastest.peak_bytes)}</td><td>{lighter}</td>'
        f'<td class="n">{"" if is_same or lightest is None else memory(lightest.peak_bytes)}</td>'
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

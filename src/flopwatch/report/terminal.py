"""The report in a terminal: first the answer, then matrices, then failures."""

from collections.abc import Iterator, Sequence

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flopwatch.plain_text import one_line, plain
from flopwatch.report.figures import count, duration
from flopwatch.report.matrices import METRICS, Metric, known_metrics
from flopwatch.report.privacy import privacy_notes
from flopwatch.report.records import Failure, Group, SweepSummary
from flopwatch.report.selection import column_chunks, narrowed
from flopwatch.report.sentences import (
    MATRIX_NOTES,
    WHOLE_PROCESS,
    crossover_digest,
    denominator_sentence,
    device_sentence,
    totals_sentence,
)
from flopwatch.report.terminal_tables import (
    choices_table,
    environments_table,
    factors_table,
    frontier_table,
    matrix_table,
    outcome_style,
    preflight_table,
    privacy_table,
    tie_sentences,
    trainers_table,
)

MOST_GROUPS = 3
MOST_CROSSOVERS = 8
MOST_FAILURES = 8
MOST_LINES = 15
MOST_WARNINGS = 10
_CELL_WIDTH, _FACTORS_WIDTH, _LEFT_WIDTH = 15, 21, 14


def draw_report(summary: SweepSummary, metrics: Sequence[str] = (), width: int = 80) -> RenderableType:
    """Everything, for a rich console that is so many characters wide."""
    return Renderables(*_parts(summary, [METRICS[name] for name in metrics], width))


def _parts(summary: SweepSummary, metrics: Sequence[Metric], width: int) -> Iterator[RenderableType]:
    yield from _head(summary)
    if not summary.totals.trials:
        yield _indented(Text("Nothing was asked for and nothing was run."))
        return
    shown = summary.groups[:MOST_GROUPS]
    yield from _what_to_run(shown)
    yield _section_heading("Trainers")
    yield _indented(trainers_table(summary.trainers))
    for group in shown:
        yield from _group(narrowed(group), metrics, width)
    if hidden := len(summary.groups) - len(shown):
        names = "; ".join(one_line(group.title) for group in summary.groups[MOST_GROUPS : MOST_GROUPS + 4])
        yield _note(f"\n{hidden} more groups ({names}{'; ...' if hidden > 4 else ''}): --html or --json shows them")
    yield from _failures(summary.failures)
    if summary.preflight:
        yield _section_heading("Preflight")
        yield _indented(preflight_table(summary.preflight))
    if summary.environments:
        yield _section_heading("Environment")
        yield _indented(environments_table(summary.environments))


def _head(summary: SweepSummary) -> Iterator[RenderableType]:
    yield Text.assemble(("flopwatch report ", "bold"), plain(summary.folder))
    spent = f"; {duration(summary.totals.trial_seconds)} of trials" if summary.totals.trial_seconds else ""
    yield Text(totals_sentence(summary) + spent)
    for warning in summary.warnings[:MOST_WARNINGS]:
        yield Text.assemble(("! ", "bold yellow"), (one_line(warning), "yellow"))


def _what_to_run(groups: Sequence[Group]) -> Iterator[RenderableType]:
    yield _section_heading("What to run")
    if not any(group.choices for group in groups):
        yield _indented(Text("Nothing ran to its end with a measured time: there is nothing to choose from."))
        return
    for group in groups:
        if group.choices:
            yield _indented(Text(one_line(group.title), style="italic"))
            yield _indented(choices_table(group))
            yield from (_note(sentence) for sentence in tie_sentences(group))
    yield _note("Private and not private trainers are never weighed against each other.")


def _group(group: Group, metrics: Sequence[Metric], width: int) -> Iterator[RenderableType]:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    yield _section_heading(f"{one_line(group.title)}{parameters}")
    chosen = list(metrics) or known_metrics(group)
    pieces = column_chunks(group, max((width - _LEFT_WIDTH) // _CELL_WIDTH, 1))
    for metric in chosen:
        yield from (_indented(matrix_table(piece, metric)) for piece in pieces)
    if chosen:
        yield from (_note(note) for note in _notes_that_apply(group))
        yield Text()
    if group.cost_factors:
        for piece in column_chunks(group, max((width - _LEFT_WIDTH) // _FACTORS_WIDTH + 1, 1)):
            if piece.cost_factors:
                yield _indented(factors_table(piece))
        if any(one.memory_above_start is not None for one in group.cost_factors):
            yield _note(WHOLE_PROCESS)
            yield Text()
    yield from (_indented(frontier_table(piece)) for piece in pieces)
    for sentence in (device_sentence(group.cells), denominator_sentence(group)):
        if sentence:
            yield _note(one_line(sentence))
    yield from _privacy(group)
    yield from _crossovers(group)


def _privacy(group: Group) -> Iterator[RenderableType]:
    if group.privacy_spent:
        yield Text()
        yield _indented(privacy_table(group))
    yield from (_note(one_line(note)) for note in privacy_notes(group))


def _notes_that_apply(group: Group) -> Iterator[str]:
    outcomes = {cell.outcome for cell in group.cells}
    bold, times, endings, bounds = MATRIX_NOTES
    if any(cell.seconds for cell in group.cells):
        yield from [bold] if len(group.trainers) > 1 else []
        yield times
    if outcomes & {"oom_device", "oom_host", "oom_inferred", "unsupported"}:
        yield endings
    if any(cell.is_lower_bound for cell in group.cells):
        yield bounds


def _crossovers(group: Group) -> Iterator[RenderableType]:
    sentences = crossover_digest(group.crossovers)
    undecided = sum(not crossover.is_claimed for crossover in group.crossovers)
    if not sentences and not undecided:
        return
    yield Text("\n  Crossovers, interpolated between measured neighbours", style="bold")
    for sentence in sentences[:MOST_CROSSOVERS]:
        yield _indented(Text(one_line(sentence)), 4)
    if len(sentences) > MOST_CROSSOVERS:
        yield _note(f"  {len(sentences) - MOST_CROSSOVERS} more: --html or --json shows them")
    if undecided:
        yield _note(f"  {undecided} more where medians cross but intervals overlap: not decided")


def _failures(failures: Sequence[Failure]) -> Iterator[RenderableType]:
    if not failures:
        return
    yield _section_heading("What did not run, and why")
    for failure in failures[:MOST_FAILURES]:
        yield from _failure(failure)
    if len(failures) > MOST_FAILURES:
        yield _note(f"{len(failures) - MOST_FAILURES} more causes: --html or --json shows them")


def _failure(failure: Failure) -> Iterator[RenderableType]:
    style = outcome_style(failure.outcome)
    title = Text.assemble((f"{failure.outcome} ", f"bold {style}"), (f"{failure.count:,}× ", "bold"))
    title.append(one_line(failure.cause))
    yield _indented(title)
    trainers = ", ".join(f"{one_line(name)} {number:,}" for name, number in failure.by_trainer.items())
    place = f"phase {failure.phase}" + (f", step {failure.step}" if failure.step is not None else "")
    lines = [("trainers", trainers), ("example", failure.example), ("it says", failure.reason)]
    lines += [("where", place)] if failure.outcome not in ("unsupported", "invalid") else []
    evidence = ", ".join(f"{name} {value}" for name, value in failure.evidence.items() if name != "exception")
    lines += [("evidence", evidence)] if evidence else []
    lines += [("advice", line) for line in failure.advice]
    lines += [("rerun", failure.command)] if failure.command else []
    for label, text in lines:
        if text:
            yield _labelled(label, one_line(text))
    for label, block in (("log", failure.log_tail), ("stacks", failure.stacks)):
        if block:
            yield _labelled(label, "")
            yield _indented(Text("\n".join(plain(block).splitlines()[-MOST_LINES:]), style="dim"), 6)
    yield Text()


def _labelled(label: str, text: str) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    line.add_column(width=8, style="dim")
    line.add_column(overflow="fold")
    line.add_row(label, Text(text))
    return _indented(line, 4)


def _section_heading(title: str) -> RenderableType:
    return Text(f"\n{title}", style="bold cyan")


def _note(sentence: str) -> RenderableType:
    return _indented(Text(sentence, style="dim"))


def _indented(content: RenderableType, by: int = 2) -> RenderableType:
    return Padding(content, (0, 0, 0, by))

"""Write the report for a terminal: what to run, totals of the trainers, measurements, and failures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flopwatch.numbers import UNKNOWN, byte_size, count, duration, percent
from flopwatch.report import contents
from flopwatch.report.records import Cell, Choice, CostFactor, Environment, Failure, Group, SweepSummary, TrainerTotals
from flopwatch.text import one_line, plain, plural

MOST_ROWS = 24
MOST_TIES = 4
_LONGEST_HEADING = 36
_PRIVACY_WORDS = {"not private": "no DP", "private": "DP", "unknown": "unknown"}


def choices_table(group: Group) -> RenderableType:
    choices = contents.some_choices(group.choices, MOST_ROWS)
    table = _table("seq:r", "class", "fastest that ran", "throughput:r", "peak:r")
    table.add_column("least memory\nwithin 10 %")
    table.add_column("peak", justify="right", no_wrap=True)
    for choice in choices:
        table.add_row(*_choice_cells(choice))
    return _with_words("", table, len(group.choices), len(choices))


def verdict_lines(group: Group) -> list[str]:
    """Return what the rows of the table do not say: ties, and each caveat once, with the rows it is about."""
    tied = [choice for choice in group.choices if choice.tied]
    lines = [f"≈ {_place(choice)}: {one_line(choice.verdict)}" for choice in tied[:MOST_TIES]]
    lines += [plural(len(tied) - MOST_TIES, "more note")] if len(tied) > MOST_TIES else []
    places: dict[str, list[str]] = {}
    for choice in group.choices:
        for caveat in choice.caveats:
            places.setdefault(caveat, []).append(f"{_place(choice)}, {_short(choice.fastest)}")
    for caveat, found in places.items():
        more = f"; and {len(found) - MOST_TIES} more rows" if len(found) > MOST_TIES else ""
        lines.append(f"! {'; '.join(found[:MOST_TIES])}{more}: {caveat}")
    return lines


def _place(choice: Choice) -> str:
    return f"seq {choice.seq_len}, {_PRIVACY_WORDS[choice.privacy]}"


def trainers_table(trainers: Sequence[TrainerTotals]) -> RenderableType:
    table = _table("trainer", "class", "ok/run:r", "success:r", "OOM:r", "failed:r", "not run:r", "mean peak:r")
    has_shared = any(trainer.shared_peaks for trainer in trainers)
    if has_shared:
        table.add_column("shared¹", justify="right", no_wrap=True)
    for one in trainers[:MOST_ROWS]:
        counts = [f"{one.ok:,}/{one.tried:,}", percent(one.success_rate), _some(one.out_of_memory), _some(one.failed)]
        row = [one_line(one.trainer), _PRIVACY_WORDS[one.privacy], *counts, _some(one.not_run)]
        row.append(byte_size(one.mean_peak_bytes))
        table.add_row(
            *(Text(cell) for cell in row), *([Text(byte_size(one.shared_mean_peak_bytes))] if has_shared else [])
        )
    shared = max((trainer.shared_peaks for trainer in trainers), default=0)
    shared_words = "the one configuration" if shared == 1 else f"the {shared:,} configurations"
    note = (
        f"¹ mean peak over {shared_words} that every trainer ran: compare trainers by this column" if has_shared else ""
    )
    return Renderables(table, Text(note, style="dim"))


def matrix_table(group: Group, metric: contents.Metric) -> RenderableType:
    rows = contents.matrix_rows(group)
    shown = contents.evenly(rows, MOST_ROWS)
    table = _table("seq:r", "batch:r")
    for trainer in group.trainers:
        table.add_column(_heading(trainer), justify="right", overflow="fold")
    before = None
    for row in shown:
        best = contents.best_trials(row.cells, metric)
        cells = [_matrix_cell(cell, metric, is_best=cell is not None and cell.trial in best) for cell in row.cells]
        table.add_row(str(row.seq_len) if row.seq_len != before else "", str(row.batch_size), *cells)
        before = row.seq_len
    return _with_words(metric.title, table, len(rows), len(shown))


def factors_table(group: Group) -> RenderableType:
    by_place, trainers = contents.factors_by_place(group)
    places = contents.evenly(list(by_place), MOST_ROWS)
    table = _table("seq:r", "batch:r")
    for trainer in trainers:
        table.add_column(_heading(trainer), justify="right", overflow="fold")
    before = None
    for place in places:
        cells = [_factor_text(by_place[place].get(name)) for name in trainers]
        table.add_row(str(place[0]) if place[0] != before else "", str(place[1]), *cells)
        before = place[0]
    return _with_words("Cost relative to standard: time, memory, FLOPs", table, len(by_place), len(places))


def frontier_table(group: Group) -> RenderableType:
    by_place = {(point.trainer, point.seq_len): point for point in group.frontier}
    table = _table("seq:r")
    for trainer in group.trainers:
        table.add_column(_heading(trainer), justify="right", overflow="fold")
    shown = contents.evenly(group.seq_lens, MOST_ROWS)
    for seq_len in shown:
        points = [by_place.get((trainer, seq_len)) for trainer in group.trainers]
        table.add_row(str(seq_len), *(contents.frontier_words(point) if point else "" for point in points))
    return _with_words("Largest batch that ran (smallest out of memory)", table, len(group.seq_lens), len(shown))


def privacy_table(group: Group) -> RenderableType:
    table = _table(*(f"{name}:r" for name in contents.HEADINGS[:-1]), contents.HEADINGS[-1])
    shown = contents.evenly(group.privacy_spent, MOST_ROWS)
    for row in shown:
        table.add_row(*(Text(one_line(cell)) for cell in contents.privacy_cells(row)))
    return _with_words("Privacy", table, len(group.privacy_spent), len(shown))


def preflight_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(*contents.PREFLIGHT_HEADINGS)
    for row in contents.evenly(rows, MOST_ROWS):
        table.add_row(*(Text(one_line(cell)) for cell in contents.preflight_cells(row)))
    return table


def environments_table(environments: Sequence[Environment]) -> RenderableType:
    table = _table("trials:r", "environment")
    for environment in environments[:MOST_ROWS]:
        settings = ", ".join(f"{name} {value}" for name, value in environment.settings.items())
        table.add_row(f"{environment.trials:,}", Text(one_line(settings)))
    return _with_words("", table, len(environments), min(len(environments), MOST_ROWS))


def _choice_cells(choice: Choice) -> list[Text]:
    fastest, lightest = choice.fastest, choice.lightest
    is_same = lightest is not None and lightest.trial == fastest.trial
    return [
        Text(str(choice.seq_len)),
        Text(_PRIVACY_WORDS[choice.privacy]),
        Text(("≈ " if choice.tied else "") + _short(fastest), style="dim" if choice.tied else "bold"),
        Text(contents.throughput(fastest)),
        Text(byte_size(fastest.peak_bytes)),
        Text("the same" if is_same else _short(lightest) if lightest else UNKNOWN, style="dim" if is_same else ""),
        Text("" if is_same else byte_size(lightest.peak_bytes) if lightest else UNKNOWN),
    ]


def _matrix_cell(cell: Cell | None, metric: contents.Metric, *, is_best: bool) -> Text:
    style = "bold" if is_best else contents.outcome_style(cell.outcome) if cell and cell.outcome != "ok" else ""
    return Text(contents.cell_text(cell, metric), style=style)


def _factor_text(one: CostFactor | None) -> Text:
    if one is None:
        return Text(UNKNOWN, style="dim")
    return Text(
        "  ".join(f"{text:>{width}}" for text, width in zip(contents.factor_texts(one), (6, 5, 5), strict=True))
    )


def _short(cell: Cell) -> str:
    return one_line(f"{cell.trainer} b{cell.batch_size}")


def _heading(trainer: str) -> Text:
    name = one_line(trainer)
    return Text(name if len(name) <= _LONGEST_HEADING else name[: _LONGEST_HEADING - 1] + "…")


def _some(number: int) -> str:
    return f"{number:,}" if number else "·"


def _with_words(title: str, table: Table, total: int = 0, shown: int = 0) -> RenderableType:
    """Put the title and the note about hidden rows outside the table, which would wrap them to its own width."""
    left_out = (
        f"{shown} of {total:,} rows are shown, evenly spaced; --html and --json have all" if total > shown else ""
    )
    parts = ([Text(title, style="bold")] if title else []) + [table]
    return Renderables(*parts, Text(left_out, style="dim"))


def _table(*columns: str) -> Table:
    """Make a table with columns of these names. A name that ends with `:r` means that the column is aligned right."""
    table = Table(box=SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        name, _, side = column.partition(":")
        table.add_column(name, justify="right" if side == "r" else "left", no_wrap=side == "r")
    return table


MOST_GROUPS = 3
MOST_CROSSOVERS = 8
MOST_FAILURES = 8
MOST_LINES = 15
_CELL_WIDTH, _FACTORS_WIDTH, _LEFT_WIDTH = 15, 21, 14


def draw_report(summary: SweepSummary, metrics: Sequence[str] = (), width: int = 80) -> RenderableType:
    """Return the report for a rich console that is `width` characters wide."""
    return Renderables(*_parts(summary, [contents.METRICS[name] for name in metrics], width))


def _parts(summary: SweepSummary, metrics: Sequence[contents.Metric], width: int) -> Iterator[RenderableType]:
    yield from _head(summary)
    if not summary.totals.trials:
        yield _indented(Text("The plan of this sweep has no trials."))
        return
    shown = summary.groups[:MOST_GROUPS]
    yield from _what_to_run(shown)
    yield _section_heading("Trainers")
    yield _indented(trainers_table(summary.trainers))
    for group in shown:
        yield from _group(contents.narrowed(group), metrics, width)
    if hidden := len(summary.groups) - len(shown):
        names = "; ".join(one_line(group.title) for group in summary.groups[MOST_GROUPS : MOST_GROUPS + 4])
        yield _note(f"\n{hidden} more groups ({names}{'; ...' if hidden > 4 else ''}): see --html or --json")
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
    yield Text(contents.totals_sentence(summary) + spent)
    for warning in contents.shown_warnings(summary):
        yield Text.assemble(("! ", "bold yellow"), (one_line(warning), "yellow"))


def _what_to_run(groups: Sequence[Group]) -> Iterator[RenderableType]:
    yield _section_heading("What to run")
    if not any(group.choices for group in groups):
        yield _indented(Text(contents.NOTHING_TO_CHOOSE))
        return
    for group in groups:
        if group.choices:
            yield _indented(Text(one_line(group.title), style="italic"))
            yield _indented(choices_table(group))
            yield from (_note(sentence) for sentence in verdict_lines(group))
    yield _note(contents.CLASSES_APART)


def _group(group: Group, metrics: Sequence[contents.Metric], width: int) -> Iterator[RenderableType]:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    yield _section_heading(f"{one_line(group.title)}{parameters}")
    chosen = list(metrics) or contents.known_metrics(group)
    pieces = contents.column_chunks(group, max((width - _LEFT_WIDTH) // _CELL_WIDTH, 1))
    for metric in chosen:
        yield from (_indented(matrix_table(piece, metric)) for piece in pieces)
    if chosen:
        yield from (_note(note) for note in _notes_that_apply(group))
        yield Text()
    if group.cost_factors:
        for piece in contents.column_chunks(group, max((width - _LEFT_WIDTH) // _FACTORS_WIDTH + 1, 1)):
            if piece.cost_factors:
                yield _indented(factors_table(piece))
        if any(one.memory_above_start is not None for one in group.cost_factors):
            yield _note(contents.WHOLE_PROCESS)
            yield Text()
    yield from (_indented(frontier_table(piece)) for piece in pieces)
    capacity = contents.device_capacity(group.cells)
    for sentence in (
        f"The device has {byte_size(capacity)}." if capacity else "",
        contents.limit_note(group),
        contents.denominator_sentence(group),
    ):
        if sentence:
            yield _note(one_line(sentence))
    yield from _privacy(group)
    yield from _crossovers(group)


def _privacy(group: Group) -> Iterator[RenderableType]:
    if group.privacy_spent:
        yield Text()
        yield _indented(privacy_table(group))
    yield from (_note(one_line(note)) for note in contents.privacy_notes(group))


def _notes_that_apply(group: Group) -> Iterator[str]:
    outcomes = {cell.outcome for cell in group.cells}
    bold, times, endings, bounds = contents.MATRIX_NOTES
    if any(cell.seconds for cell in group.cells):
        yield from [bold] if len(group.trainers) > 1 else []
        yield times
    if outcomes & {"oom_device", "oom_host", "oom_inferred", "unsupported"}:
        yield endings
    if any(cell.is_lower_bound for cell in group.cells):
        yield bounds


def _crossovers(group: Group) -> Iterator[RenderableType]:
    sentences = contents.crossover_digest(group.crossovers)
    uncertain = contents.uncertain_crossovers(group.crossovers)
    if not sentences and not uncertain:
        return
    yield Text("\n  Crossovers, interpolated between measured values", style="bold")
    for sentence in sentences[:MOST_CROSSOVERS]:
        yield _indented(Text(one_line(sentence)), 4)
    if len(sentences) > MOST_CROSSOVERS:
        yield _note(f"  {len(sentences) - MOST_CROSSOVERS} more: see --html or --json")
    if uncertain:
        yield _note(f"  {uncertain}")


def _failures(failures: Sequence[Failure]) -> Iterator[RenderableType]:
    if not failures:
        return
    yield _section_heading("What did not run, and why")
    for failure in failures[:MOST_FAILURES]:
        yield from _failure(failure)
    if len(failures) > MOST_FAILURES:
        yield _note(f"{len(failures) - MOST_FAILURES} more causes: see --html or --json")


def _failure(failure: Failure) -> Iterator[RenderableType]:
    style = contents.outcome_style(failure.outcome)
    title = Text.assemble((f"{failure.outcome} ", f"bold {style}"), (f"{failure.count:,}× ", "bold"))
    title.append(one_line(failure.cause))
    yield _indented(title)
    has_place = failure.outcome not in ("unsupported", "invalid")
    lines = [fact for fact in contents.failure_facts(failure).items() if has_place or fact[0] != "where"]
    lines += [("advice", line) for line in failure.advice]
    lines.append(("rerun", failure.command))
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

"""The section of the HTML page for one group of comparable trials: charts, matrices, costs, limits, crossovers."""

from collections.abc import Iterator, Mapping

from flopwatch.numbers import UNKNOWN, count, factor
from flopwatch.present.svg import esc, legend_marker
from flopwatch.report import contents
from flopwatch.report.html_page import charts
from flopwatch.report.records import CostFactor, Group

MOST_ROWS = 60
MOST_CROSSOVERS = 200
_CROSSES = "A cross above a plot is a trial that ran out of memory. Equal values stand side by side."
_INTERVALS = "Vertical bars are 95 % intervals. A hollow marker means that the step time is unstable."
_FRONT = (
    "Filled markers, with their batch sizes, are the Pareto front: no trial of the same privacy class is faster and "
    "needs less memory. The line is solid for private trainers, dashed for others."
)
_MAP = "Peak memory in GiB; darker means more. A trial that is not ok shows its outcome instead."
_UTILISATION = (
    "The solid bar is MFU (useful FLOPs), the pale bar is HFU (all executed FLOPs), at the largest batch that all "
    "trainers ran."
)


def group_section(group: Group, colours: Mapping[str, int], *, is_open: bool, is_only: bool) -> Iterator[str]:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    title = f"{esc(group.title)}<small>{parameters}, {len(group.cells):,} trials</small>"
    if is_only:
        yield f'<section class="group"><h2>Measurements <small>{title}</small></h2>'
    else:
        yield f'<details class="group"{" open" if is_open else ""}><summary>{title}</summary>'
    yield from _charts(group, colours)
    tables = (_matrices(group), _frontier(group), _factors(group))
    drawn = ["".join(parts) for parts in tables]
    yield '<div class="blocks">' + "".join(f'<div class="fitting">{part}</div>' for part in drawn if part) + "</div>"
    yield from _privacy(group)
    yield from _crossovers(group)
    yield "</section>" if is_only else "</details>"


def _charts(group: Group, colours: Mapping[str, int]) -> Iterator[str]:
    legend = "".join(f"<span>{legend_marker(colours[name])}{esc(name)}</span>" for name in group.trainers)
    layout = charts.layout_of(group)
    shown, in_all = len(layout.panels), layout.panels_in_all
    some = f" {shown} of {in_all} panels are shown, evenly spaced." if in_all > shown else ""
    memory, rate = contents.METRICS["memory"], contents.throughput_metric(group)
    shown_charts = (
        (f"Peak memory by {layout.x_name}", _CROSSES + some, charts.curve_panels(group, memory, colours)),
        (f"{rate.title} by {layout.x_name}", _INTERVALS + some, charts.curve_panels(group, rate, colours)),
        ("Throughput over memory", _FRONT, charts.pareto_panels(group, colours)),
        ("MFU and HFU", _UTILISATION, charts.utilisation_panels(group, colours)),
        ("Which sizes fit", _MAP, charts.frontier_maps(group)),
        (
            "Memory by phase",
            "The peak in each phase of a step. Peaks of different phases do not add up.",
            charts.phase_panels(group, colours),
        ),
    )
    yield f'<div class="legend">{legend}</div><div class="blocks">'
    yield from (_block(*chart) for chart in shown_charts if chart[2])
    yield "</div>"


def _block(title: str, remark: str, figures: list[str]) -> str:
    """Charts of one kind, as wide as they are many, so that few of them leave room for the next kind."""
    head = f'<h3>{esc(title)}</h3><p class="soft small">{esc(remark)}</p>'
    style = f"--n:{min(len(figures), 4)}"
    return f'<div class="block" style="{style}">{head}<div class="panels">{"".join(figures)}</div></div>'


def _matrices(group: Group) -> Iterator[str]:
    metrics = contents.known_metrics(group)
    if not metrics:
        return
    rows = contents.matrix_rows(group)
    shown = contents.evenly(rows, MOST_ROWS)
    buttons = "".join(f'<button data-metric="{m.key}" aria-pressed="false">{esc(m.title)}</button>' for m in metrics)
    yield f'<div class="tabs" hidden>{buttons}</div>'
    for metric in metrics:
        yield f'<div class="matrix" data-metric="{metric.key}"><h3>{esc(metric.title)}</h3>'
        yield _matrix(group, metric, shown) + "</div>"
    some = f"{len(shown)} of {len(rows):,} rows are shown, evenly spaced. " if len(shown) < len(rows) else ""
    notes = " ".join([*contents.MATRIX_NOTES, contents.denominator_sentence(group)])
    yield f'<p class="soft small">{some}{esc(notes)}</p>'


def _matrix(group: Group, metric: contents.Metric, rows: list[contents.MatrixRow]) -> str:
    heads = "".join(f'<th class="n">{esc(name)}</th>' for name in group.trainers)
    body = []
    before = None
    for row in rows:
        best = contents.best_trials(row.cells, metric)
        cells = []
        for cell in row.cells:
            kind = "" if cell is None or cell.outcome == "ok" else f" f-{contents.outcome_class(cell.outcome)}"
            kind = " best" if cell is not None and cell.trial in best else kind
            cells.append(f'<td class="n{kind}">{esc(contents.cell_text(cell, metric))}</td>')
        new = ' class="new"' if row.seq_len != before else ""
        seq = row.seq_len if row.seq_len != before else ""
        body.append(f'<tr{new}><td class="n">{seq}</td><td class="n">{row.batch_size}</td>{"".join(cells)}</tr>')
        before = row.seq_len
    head = f'<tr><th class="n">sequence</th><th class="n">batch</th>{heads}</tr>'
    return _table(head, "".join(body))


def _factors(group: Group) -> Iterator[str]:
    if not group.cost_factors:
        return
    by_place, trainers = contents.factors_by_place(group)
    first = "".join(f'<th class="g" colspan="3">{esc(name)}</th>' for name in trainers)
    second = '<th class="n g">time</th><th class="n">memory</th><th class="n">FLOPs</th>' * len(trainers)
    head = f'<tr><th></th><th></th>{first}</tr><tr><th class="n">sequence</th><th class="n">batch</th>{second}</tr>'
    shown = contents.evenly(list(by_place), MOST_ROWS)
    starts = {place for before, place in zip([(0, 0), *shown], shown, strict=False) if place[0] != before[0]}
    body = "".join(_factor_row(place, by_place[place], trainers, is_new=place in starts) for place in shown)
    yield "<h3>Cost relative to standard</h3>"
    has_start = any(one.memory_above_start is not None for one in group.cost_factors)
    start = f" {contents.WHOLE_PROCESS}" if has_start else ""
    words = f"2× means twice as much as the standard trainer at the same batch size and sequence length.{start}"
    yield f'<p class="soft small">{words}</p>'
    yield _table(head, body)


def _factor_row(place: tuple[int, int], found: Mapping[str, CostFactor], trainers: list[str], *, is_new: bool) -> str:
    cells = []
    for name in trainers:
        one = found.get(name)
        if one is None:
            cells.append(f'<td class="n soft g">{UNKNOWN}</td>' + f'<td class="n soft">{UNKNOWN}</td>' * 2)
            continue
        between = f"95 % intervals: {factor(one.low_time)} to {factor(one.high_time)}"
        time, memory, flops = contents.factor_texts(one)
        cells.append(f'<td class="n g" data-t="{esc(between)}">{time}</td>')
        cells.append(f'<td class="n">{memory}</td><td class="n">{flops}</td>')
    start = f'<tr class="new"><td class="n">{place[0]}</td>' if is_new else '<tr><td class="n"></td>'
    return f'{start}<td class="n">{place[1]}</td>{"".join(cells)}</tr>'


def _frontier(group: Group) -> Iterator[str]:
    points = {(point.trainer, point.seq_len): point for point in group.frontier}
    heads = "".join(f'<th class="n">{esc(name)}</th>' for name in group.trainers)
    body = []
    for seq_len in contents.evenly(group.seq_lens, MOST_ROWS):
        found = [points.get((name, seq_len)) for name in group.trainers]
        cells = "".join(f'<td class="n">{esc(contents.frontier_words(point)) if point else ""}</td>' for point in found)
        body.append(f'<tr><td class="n">{seq_len}</td>{cells}</tr>')
    yield "<h3>Largest batch that ran <small>(smallest out of memory)</small></h3>"
    yield _table(f'<tr><th class="n">sequence</th>{heads}</tr>', "".join(body))
    if note := contents.limit_note(group):
        yield f'<p class="soft small">{note}</p>'


def _privacy(group: Group) -> Iterator[str]:
    if group.privacy_spent:
        heads = (
            "".join(f'<th class="n">{esc(name)}</th>' for name in contents.HEADINGS[:-1])
            + f"<th>{contents.HEADINGS[-1]}</th>"
        )
        body = []
        for row in contents.evenly(group.privacy_spent, MOST_ROWS):
            *numbers, trainers = contents.privacy_cells(row)
            cells = "".join(f'<td class="n">{esc(text)}</td>' for text in numbers)
            body.append(f"<tr>{cells}<td>{esc(trainers)}</td></tr>")
        yield "<h3>Privacy</h3>"
        yield _table(f"<tr>{heads}</tr>", "".join(body))
    yield from (f'<p class="soft small">{esc(note)}</p>' for note in contents.privacy_notes(group))


def _crossovers(group: Group) -> Iterator[str]:
    if not group.crossovers:
        return
    claimed = [crossover for crossover in group.crossovers if crossover.is_claimed]
    undecided = [contents.crossover_sentence(c) for c in group.crossovers if not c.is_claimed]
    yield "<h3>Crossovers</h3>"
    yield '<p class="soft small">Values are interpolated between two measured ones, in logarithms.</p>'
    digest = contents.crossover_digest(claimed)
    yield _list(digest)
    if len(digest) < len(claimed):
        every = _list([contents.crossover_sentence(crossover) for crossover in claimed])
        yield f"<details><summary>All {len(claimed):,} crossovers, one by one</summary>{every}</details>"
    if undecided:
        words = contents.uncertain_crossovers(group.crossovers)
        yield f"<details><summary>{words}</summary>{_list(undecided)}</details>"


def _list(sentences: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences[:MOST_CROSSOVERS]) + "</ul>"


def _table(head: str, body: str) -> str:
    return f'<div class="scroll fit"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'

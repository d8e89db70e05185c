"""The page's section on one group: charts, matrices, cost against standard, memory limits, crossovers."""

from collections.abc import Iterator, Mapping

from flopwatch.number_format import UNKNOWN, count, factor
from flopwatch.report.contents import (
    HEADINGS,
    MATRIX_NOTES,
    METRICS,
    WHOLE_PROCESS,
    MatrixRow,
    Metric,
    best_trials,
    cell_text,
    crossover_digest,
    crossover_sentence,
    denominator_sentence,
    evenly,
    frontier_words,
    known_metrics,
    matrix_rows,
    outcome_class,
    privacy_cells,
    privacy_notes,
)
from flopwatch.report.html_page.charts import (
    curve_panels,
    frontier_maps,
    layout_of,
    pareto_panels,
    phase_panels,
    utilisation_panels,
)
from flopwatch.report.html_page.svg import esc, legend_marker
from flopwatch.report.records import CostFactor, Group

MOST_ROWS = 60
MOST_CROSSOVERS = 200
_CROSSES = "Crosses above a plot ran out of memory."
_INTERVALS = "Bars are 95 % intervals; hollow markers are unstable."
_FRONT = (
    "Filled markers: no trial of the class is faster with less memory. Numbers are batch sizes. "
    "Dashed: the front of trainers that are not private."
)
_MAP = "Peak memory in GiB, darker is more; a trial that did not run shows its outcome."
_UTILISATION = "Solid: MFU, useful FLOPs. Pale: HFU, all executed FLOPs. At the largest batch that all trainers ran."


def group_section(group: Group, colours: Mapping[str, int], *, is_open: bool, is_only: bool) -> Iterator[str]:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    title = f"{esc(group.title)}<small>{parameters}, {len(group.cells):,} trials</small>"
    if is_only:
        yield f'<section class="group"><h2>Measurements <small>{title}</small></h2>'
    else:
        yield f'<details class="group"{" open" if is_open else ""}><summary>{title}</summary>'
    yield from _charts(group, colours)
    yield from _matrices(group)
    yield from _factors(group)
    yield from _frontier(group)
    yield from _privacy(group)
    yield from _crossovers(group)
    yield "</section>" if is_only else "</details>"


def _charts(group: Group, colours: Mapping[str, int]) -> Iterator[str]:
    legend = "".join(f"<span>{legend_marker(colours[name])}{esc(name)}</span>" for name in group.trainers)
    layout = layout_of(group)
    shown, in_all = len(layout.panels), layout.panels_in_all
    some = f" {shown} of {in_all} panels, evenly spaced." if in_all > shown else ""
    rate = METRICS["tokens" if any(cell.tokens_per_s for cell in group.cells) else "samples"]
    charts = (
        (f"Peak memory by {layout.x_name}", _CROSSES + some, curve_panels(group, METRICS["memory"], colours)),
        (f"{rate.title} by {layout.x_name}", _INTERVALS + some, curve_panels(group, rate, colours)),
        ("Memory against throughput", _FRONT, pareto_panels(group, colours)),
    )
    yield f'<div class="legend">{legend}</div>'
    yield from (_block(*chart, "panels") for chart in charts if chart[2])
    wide = (
        ("How far each trainer gets", _MAP, frontier_maps(group)),
        ("MFU and HFU", _UTILISATION, utilisation_panels(group, colours)),
        ("Memory by phase", "The peak in each phase; peaks do not add up.", phase_panels(group, colours)),
    )
    yield from (_block(*chart, "panels wide") for chart in wide if chart[2])


def _block(title: str, remark: str, figures: list[str], style: str) -> str:
    return f'<h3>{esc(title)}</h3><p class="soft small">{esc(remark)}</p><div class="{style}">{"".join(figures)}</div>'


def _matrices(group: Group) -> Iterator[str]:
    metrics = known_metrics(group)
    if not metrics:
        return
    rows = matrix_rows(group)
    shown = evenly(rows, MOST_ROWS)
    buttons = "".join(f'<button data-metric="{m.key}" aria-pressed="false">{esc(m.title)}</button>' for m in metrics)
    yield f'<div><div class="tabs" hidden>{buttons}</div>'
    for metric in metrics:
        yield f'<div class="matrix" data-metric="{metric.key}"><h3>{esc(metric.title)}</h3>'
        yield _matrix(group, metric, shown) + "</div>"
    some = f"{len(shown)} of {len(rows):,} rows, evenly spaced. " if len(shown) < len(rows) else ""
    notes = " ".join([*MATRIX_NOTES, denominator_sentence(group)])
    yield f'<p class="soft small">{some}{esc(notes)}</p></div>'


def _matrix(group: Group, metric: Metric, rows: list[MatrixRow]) -> str:
    heads = "".join(f'<th class="n">{esc(name)}</th>' for name in group.trainers)
    body = []
    before = None
    for row in rows:
        best = best_trials(row.cells, metric)
        cells = []
        for cell in row.cells:
            kind = "" if cell is None or cell.outcome == "ok" else f" f-{outcome_class(cell.outcome)}"
            kind = " best" if cell is not None and cell.trial in best else kind
            cells.append(f'<td class="n{kind}">{esc(cell_text(cell, metric))}</td>')
        new = ' class="new"' if row.seq_len != before else ""
        seq = row.seq_len if row.seq_len != before else ""
        body.append(f'<tr{new}><td class="n">{seq}</td><td class="n">{row.batch_size}</td>{"".join(cells)}</tr>')
        before = row.seq_len
    head = f'<tr><th class="n">sequence</th><th class="n">batch</th>{heads}</tr>'
    return _table(head, "".join(body))


def _factors(group: Group) -> Iterator[str]:
    if not group.cost_factors:
        return
    by_place: dict[tuple[int, int], dict[str, CostFactor]] = {}
    for one in group.cost_factors:
        by_place.setdefault((one.seq_len, one.batch_size), {})[one.trainer] = one
    trainers = [name for name in group.trainers if any(name in found for found in by_place.values())]
    first = "".join(f'<th class="g" colspan="3">{esc(name)}</th>' for name in trainers)
    second = '<th class="n g">time</th><th class="n">memory</th><th class="n">FLOPs</th>' * len(trainers)
    head = f'<tr><th></th><th></th>{first}</tr><tr><th class="n">sequence</th><th class="n">batch</th>{second}</tr>'
    shown = evenly(list(by_place), MOST_ROWS)
    starts = {place for before, place in zip([(0, 0), *shown], shown, strict=False) if place[0] != before[0]}
    body = "".join(_factor_row(place, by_place[place], trainers, is_new=place in starts) for place in shown)
    yield "<h3>Cost against standard</h3>"
    has_start = any(one.memory_above_start is not None for one in group.cost_factors)
    start = f" {WHOLE_PROCESS}" if has_start else ""
    words = f"2× is twice as much as the standard trainer at the same batch size and sequence length.{start}"
    yield f'<p class="soft small">{words}</p>'
    yield _table(head, body)


def _factor_row(place: tuple[int, int], found: Mapping[str, CostFactor], trainers: list[str], *, is_new: bool) -> str:
    cells = []
    for name in trainers:
        one = found.get(name)
        if one is None:
            cells.append(f'<td class="n soft g">{UNKNOWN}</td>' + f'<td class="n soft">{UNKNOWN}</td>' * 2)
            continue
        between = f"{factor(one.low_time)} to {factor(one.high_time)} by the intervals"
        cells.append(f'<td class="n g" data-t="{esc(between)}">{factor(one.time)}</td>')
        cells.append(f'<td class="n">{factor(one.memory)}</td><td class="n">{factor(one.flops)}</td>')
    start = f'<tr class="new"><td class="n">{place[0]}</td>' if is_new else '<tr><td class="n"></td>'
    return f'{start}<td class="n">{place[1]}</td>{"".join(cells)}</tr>'


def _frontier(group: Group) -> Iterator[str]:
    points = {(point.trainer, point.seq_len): point for point in group.frontier}
    heads = "".join(f'<th class="n">{esc(name)}</th>' for name in group.trainers)
    body = []
    for seq_len in evenly(group.seq_lens, MOST_ROWS):
        found = [points.get((name, seq_len)) for name in group.trainers]
        cells = "".join(f'<td class="n">{esc(frontier_words(point)) if point else ""}</td>' for point in found)
        body.append(f'<tr><td class="n">{seq_len}</td>{cells}</tr>')
    yield "<h3>Largest batch that ran <small>(smallest out of memory)</small></h3>"
    yield _table(f'<tr><th class="n">sequence</th>{heads}</tr>', "".join(body))
    if not all(point.is_monotone for point in group.frontier):
        yield '<p class="soft small">! A larger batch ran than one that ran out of memory: the limit is not sharp.</p>'


def _privacy(group: Group) -> Iterator[str]:
    if group.privacy_spent:
        heads = "".join(f'<th class="n">{esc(name)}</th>' for name in HEADINGS[:-1]) + f"<th>{HEADINGS[-1]}</th>"
        body = []
        for row in evenly(group.privacy_spent, MOST_ROWS):
            *numbers, trainers = privacy_cells(row)
            cells = "".join(f'<td class="n">{esc(text)}</td>' for text in numbers)
            body.append(f"<tr>{cells}<td>{esc(trainers)}</td></tr>")
        yield "<h3>Privacy</h3>"
        yield _table(f"<tr>{heads}</tr>", "".join(body))
    yield from (f'<p class="soft small">{esc(note)}</p>' for note in privacy_notes(group))


def _crossovers(group: Group) -> Iterator[str]:
    if not group.crossovers:
        return
    claimed = [crossover for crossover in group.crossovers if crossover.is_claimed]
    undecided = [crossover_sentence(c) for c in group.crossovers if not c.is_claimed]
    yield "<h3>Crossovers</h3>"
    yield '<p class="soft small">Interpolated between measured neighbours, linear in logarithms.</p>'
    digest = crossover_digest(claimed)
    yield _list(digest)
    if len(digest) < len(claimed):
        every = _list([crossover_sentence(crossover) for crossover in claimed])
        yield f"<details><summary>All {len(claimed):,}, one by one</summary>{every}</details>"
    if undecided:
        words = f"{len(undecided):,} not decided: medians cross, but intervals overlap"
        yield f"<details><summary>{words}</summary>{_list(undecided)}</details>"


def _list(sentences: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences[:MOST_CROSSOVERS]) + "</ul>"


def _table(head: str, body: str) -> str:
    return f'<div class="scroll fit"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'

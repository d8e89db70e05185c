"""The report of a sweep as a document: what to run, trainers, measurements, failures, environment, all trials.

Each section is one function here. `present` shows them in a terminal, as Markdown and as a page.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from flopwatch.numbers import UNKNOWN, byte_size, count, duration, factor, percent
from flopwatch.present.document import (
    Beside,
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Field,
    Items,
    Lazy,
    Legend,
    Most,
    Only,
    Part,
    Records,
    Section,
    Several,
    Share,
    Strip,
    Table,
    Tabs,
    Text,
    Tiles,
    numbers,
    spaced,
)
from flopwatch.records.trial import FAILED, LABELS, OUT_OF_MEMORY
from flopwatch.report import contents
from flopwatch.report import records as data
from flopwatch.report.records import Choice, CostFactor, Environment, Failure, Group, SweepSummary, TrainerTotals
from flopwatch.report.sweep import charts
from flopwatch.text import plural

_PRIVACY_SHORT = {"not private": "no DP", "private": "DP", "unknown": "unknown"}
_MATRIX_ROWS = Most(24, 60, 60)
_MOST_TIES = 4


def sweep_document(summary: SweepSummary, metrics: Sequence[str] = ()) -> Document:
    """Return the report. `metrics` are the matrices to show; without any, all that were measured."""
    made = f", {datetime.fromtimestamp(summary.created, timezone.utc):%Y-%m-%d %H:%M} UTC" if summary.created else ""
    engine = f", engine {summary.engine}" if summary.engine else ""
    spent = f"; {duration(summary.totals.trial_seconds)} of trials" if summary.totals.trial_seconds else ""
    return Document(
        summary.name,
        list(_parts(summary, [contents.METRICS[name] for name in metrics])),
        kind="Sweep",
        about=f"{engine}{made}",
        lead=[f"{contents.totals_sentence(summary)}{spent}."],
        source=summary.folder,
    )


def _parts(summary: SweepSummary, metrics: Sequence[contents.Metric]) -> Iterator[Part]:
    yield Only(("html",), [Tiles(list(_tiles(summary))), Strip(_shares(summary.totals.by_outcome))])
    yield from (Text(warning, "warn") for warning in contents.shown_warnings(summary))
    if not summary.totals.trials:
        yield Text("The plan of this sweep has no trials.")
        return
    colours = trainer_colours(summary)
    yield _what_to_run(summary, colours)
    yield _trainers(summary, colours)
    yield _measurements(summary, metrics, colours)
    if summary.failures:
        yield _failures(summary)
    if summary.preflight:
        rows = [contents.preflight_cells(row) for row in summary.preflight]
        table = Table(contents.PREFLIGHT_HEADINGS, rows)
        yield Section("Preflight: which trainer supports which model", [table], "preflight", "Preflight")
    yield _environments(summary.environments)
    yield Only(("html",), [_all_trials(summary)])


def trainer_colours(summary: SweepSummary) -> dict[str, int]:
    """Assign a colour and marker to each trainer. Built-in trainers have the same ones in every report."""
    fixed = {trainer: place for place, trainer in enumerate(LABELS)}
    names = dict.fromkeys(name for group in summary.groups for name in group.trainers)
    others = [name for name in names if name not in fixed]
    is_free = not any(name in fixed for name in names)
    return fixed | {name: place if is_free else place + len(fixed) for place, name in enumerate(others)}


def _tiles(summary: SweepSummary) -> Iterator[tuple[str, str]]:
    ok, missing = contents.trials_with(summary, "ok"), contents.trials_with(summary, "missing")
    tried = sum(one.tried for one in summary.trainers)
    inferred = contents.trials_with(summary, "oom_inferred")
    not_run = contents.trials_with(summary, "unsupported", "skipped", "cancelled") + missing
    yield f"{summary.totals.trials:,}", "planned trials"
    yield percent(ok / tried) if tried else UNKNOWN, f"success: {ok:,} of {tried:,} trials that ran"
    yield f"{contents.trials_with(summary, *OUT_OF_MEMORY):,}", f"out of memory, {inferred:,} of them inferred"
    yield f"{contents.trials_with(summary, *FAILED):,}", "failed"
    yield f"{not_run:,}", f"not run, {missing:,} of them without a result yet"
    yield duration(summary.totals.trial_seconds), f"of trials in {duration(summary.totals.wall_seconds)} wall time"


def _shares(by_outcome: Mapping[str, int]) -> tuple[Share, ...]:
    shares = [Share(name, amount, contents.outcome_class(name)) for name, amount in by_outcome.items()]
    order = ("ok", "oom", "failed", "not-run")
    return tuple(sorted(shares, key=lambda share: (order.index(share.tone), -share.amount)))


def _what_to_run(summary: SweepSummary, colours: Mapping[str, int]) -> Section:
    groups = [group for group in summary.groups if group.choices]
    if not groups:
        return Section("What to run", [Text(contents.NOTHING_TO_CHOOSE)], "run")
    numbered = list(enumerate(groups))
    sections = Lazy(numbered, lambda one: _choices(one[1], colours, None if one[0] < 3 else False))
    return Section(
        "What to run",
        [
            Text(
                "For each sequence length: the fastest trial, and the trial with the least memory among those with at "
                f"least 90 % of its throughput. {contents.CLASSES_APART}",
                "soft",
            ),
            Several(sections, Most(3, 6, 40), "more groups", [group.title for group in groups]),
        ],
        "run",
    )


def _choices(group: Group, colours: Mapping[str, int], is_open: bool | None) -> Section:
    columns: tuple[Column | str, ...] = (
        Column("sequence", is_number=True, short="seq"),
        "class",
        "fastest that ran",
        *numbers("throughput"),
        Column("", only=("html",)),
        *numbers("peak"),
        "least memory within 10 %",
        *numbers("peak"),
        Column("verdict", only=("markdown", "html")),
    )
    longest = max(_rate(choice) for choice in group.choices)
    rows = Lazy(group.choices, lambda choice: _choice_cells(choice, longest, colours))
    lengths = [choice.seq_len for choice in group.choices]
    table = Table(columns, rows, most=Most(24, 60, 16), pick=lambda _, most: contents.some_places(lengths, most))
    return Section(group.title, [table, Only(("terminal",), _verdict_notes(group))], is_open=is_open)


def _rate(choice: Choice) -> float:
    return (choice.fastest.samples_per_s or 0) * choice.seq_len


def _choice_cells(choice: Choice, longest: float, colours: Mapping[str, int]) -> tuple[Cell | str, ...]:
    fastest, lightest = choice.fastest, choice.lightest
    is_same = lightest is not None and lightest.trial == fastest.trial
    tied, kind = "≈ " if choice.tied else "", colours[fastest.trainer]
    if is_same:
        lighter, peak = Cell("the same", "soft"), ""
    else:
        lighter = _named(lightest, colours) if lightest else Cell(UNKNOWN)
        peak = byte_size(lightest.peak_bytes if lightest else None)
    caveats = "; ".join(choice.caveats)
    return (
        str(choice.seq_len),
        Cell(choice.privacy, "chip", short=_PRIVACY_SHORT[choice.privacy]),
        _named(fastest, colours, tied, "" if choice.tied else "best"),
        contents.throughput(fastest),
        Cell("", bar=_rate(choice) / longest if longest else 0, colour=kind),
        byte_size(fastest.peak_bytes),
        lighter,
        peak,
        Cell(f"{choice.verdict};" if caveats else choice.verdict, detail=caveats),
    )


def _named(cell: data.Cell, colours: Mapping[str, int], mark: str = "", tone: str = "") -> Cell:
    name, size = f"{mark}{cell.trainer}", cell.batch_size
    return Cell(name, tone, f"batch {size}", f"{name} b{size}", colour=colours[cell.trainer])  # type: ignore[arg-type]


def _verdict_notes(group: Group) -> list[Text]:
    """Say what the rows of a narrow table do not: ties, and each caveat once, with the rows it is about."""
    tied = [choice for choice in group.choices if choice.tied]
    lines = [f"≈ {_place(choice)}: {choice.verdict}" for choice in tied[:_MOST_TIES]]
    lines += [plural(len(tied) - _MOST_TIES, "more note")] if len(tied) > _MOST_TIES else []
    places: dict[str, list[str]] = {}
    for choice in group.choices:
        name = f"{choice.fastest.trainer} b{choice.fastest.batch_size}"
        for caveat in choice.caveats:
            places.setdefault(caveat, []).append(f"{_place(choice)}, {name}")
    for caveat, found in places.items():
        more = f"; and {len(found) - _MOST_TIES} more rows" if len(found) > _MOST_TIES else ""
        lines.append(f"! {'; '.join(found[:_MOST_TIES])}{more}: {caveat}")
    return [Text(line, "note") for line in lines]


def _place(choice: Choice) -> str:
    return f"seq {choice.seq_len}, {_PRIVACY_SHORT[choice.privacy]}"


def _trainers(summary: SweepSummary, colours: Mapping[str, int]) -> Section:
    shared = max((one.shared_peaks for one in summary.trainers), default=0)
    columns: tuple[Column | str, ...] = (
        "trainer",
        "class",
        Column("outcomes", only=("html",)),
        Column("ok / run", is_number=True, short="ok/run"),
        *numbers("success"),
        Column("out of memory", is_number=True, short="OOM"),
        *numbers("failed", "not run", "mean peak"),
        *([Column("mean peak, shared", is_number=True, short="shared")] if shared else []),
    )
    rows = [_trainer_cells(one, colours)[: len(columns)] for one in summary.trainers]
    of_all = "the one configuration" if shared == 1 else f"the {shared:,} configurations"
    fair = f" To compare trainers, use the last column: it is the mean over {of_all} that every trainer ran."
    note = (
        "Success is the share of ok trials among those that ran. A trainer that ran only small configurations has a "
        f"small mean peak.{fair if shared else ''}"
    )
    return Section("Trainers", [Table(columns, rows, note=note)], "trainers")


def _trainer_cells(one: TrainerTotals, colours: Mapping[str, int]) -> list[Cell | str]:
    return [
        Cell(one.trainer, colour=colours.get(one.trainer, 0)),
        Cell(one.privacy, "chip", short=_PRIVACY_SHORT[one.privacy]),
        Cell("", shares=_shares(one.by_outcome)),
        Cell(f"{one.ok:,} / {one.tried:,}", short=f"{one.ok:,}/{one.tried:,}"),
        percent(one.success_rate),
        *(Cell(f"{some:,}", short=None if some else "·") for some in (one.out_of_memory, one.failed, one.not_run)),
        byte_size(one.mean_peak_bytes),
        byte_size(one.shared_mean_peak_bytes),
    ]


def _measurements(summary: SweepSummary, metrics: Sequence[contents.Metric], colours: Mapping[str, int]) -> Section:
    groups = summary.groups
    if len(groups) == 1:
        remark = f": {groups[0].title}{_size(groups[0])}"
        return Section("Measurements", _group(groups[0], metrics, colours), "groups", remark=remark)
    sections = Lazy(
        list(enumerate(groups)),
        lambda one: Section(one[1].title, _group(one[1], metrics, colours), remark=_size(one[1]), is_open=one[0] == 0),
    )
    return Section(
        "Measurements", [Several(sections, Most(3, 6, 12), "more groups", [one.title for one in groups])], "groups"
    )


def _size(group: Group) -> str:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    return f"{parameters}, {len(group.cells):,} trials"


def _group(group: Group, metrics: Sequence[contents.Metric], colours: Mapping[str, int]) -> list[Part]:
    group = contents.narrowed(group)
    return [
        Legend([(name, colours[name]) for name in group.trainers]),
        Only(("html",), Lazy([group], lambda one: Beside(charts.charts_of(one, colours)))),
        Beside([_matrices(group, metrics), _frontier(group), *_factors(group)]),
        *_privacy(group),
        *_crossovers(group),
    ]


def _matrices(group: Group, metrics: Sequence[contents.Metric]) -> Tabs:
    chosen = list(metrics) or contents.known_metrics(group)
    rows = contents.matrix_rows(group)
    notes = [*contents.matrix_notes(group), contents.denominator_sentence(group)]
    return Tabs([_matrix(group, metric, rows) for metric in chosen], " ".join(filter(None, notes)) if chosen else "")


def _matrix(group: Group, metric: contents.Metric, rows: Sequence[contents.MatrixRow]) -> Table:
    def cells(row: contents.MatrixRow) -> list[Cell | str]:
        best = contents.best_trials(row.cells, metric)
        return [str(row.seq_len), str(row.batch_size), *(_matrix_cell(cell, metric, best) for cell in row.cells)]

    return _matrix_table([*_SIZES, *numbers(*group.trainers)], Lazy(rows, cells), metric.title)


_SIZES = (Column("sequence", is_number=True, short="seq"), *numbers("batch"))


def _matrix_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], title: str, note: str = "") -> Table:
    return Table(columns, rows, title, note, _MATRIX_ROWS, spaced, fixed=len(_SIZES), merges=True, fits=True)


def _matrix_cell(cell: data.Cell | None, metric: contents.Metric, best: set[str]) -> Cell | str:
    if cell is None:
        return ""
    tone = "best" if cell.trial in best else "" if cell.outcome == "ok" else contents.outcome_class(cell.outcome)
    return Cell(contents.cell_text(cell, metric), tone)


def _frontier(group: Group) -> Table:
    points = {(point.trainer, point.seq_len): point for point in group.frontier}

    def cells(seq_len: int) -> list[str]:
        found = [points.get((name, seq_len)) for name in group.trainers]
        return [str(seq_len), *(contents.frontier_words(point) if point else "" for point in found)]

    title = "Largest batch that ran (smallest out of memory)"
    capacity = contents.device_capacity(group.cells)
    notes = [f"The device has {byte_size(capacity)}." if capacity else "", contents.limit_note(group)]
    columns, rows = [_SIZES[0], *numbers(*group.trainers)], Lazy(group.seq_lens, cells)
    return Table(columns, rows, title, " ".join(filter(None, notes)), _MATRIX_ROWS, spaced, fits=True)


def _factors(group: Group) -> Iterator[Table]:
    if not group.cost_factors:
        return
    by_place, trainers = contents.factors_by_place(group)

    def cells(place: tuple[int, int]) -> list[Cell | str]:
        found = (by_place[place].get(name) for name in trainers)
        return [*map(str, place), *(cell for one in found for cell in _factor_cells(one))]

    columns = [Column(word, is_number=True, group=name) for name in trainers for word in ("time", "memory", "FLOPs")]
    has_start = any(one.memory_above_start is not None for one in group.cost_factors)
    note = "2× means twice as much as the standard trainer at the same batch size and sequence length."
    note += f" {contents.WHOLE_PROCESS}" if has_start else ""
    rows = Lazy(list(by_place), cells)
    yield _matrix_table([*_SIZES, *columns], rows, "Cost relative to standard: time, memory, FLOPs", note)


def _factor_cells(one: CostFactor | None) -> list[Cell]:
    if one is None:
        return [Cell(UNKNOWN, "soft")] * 3
    between = f"95 % intervals: {factor(one.low_time)} to {factor(one.high_time)}"
    time, memory, flops = contents.factor_texts(one)
    return [Cell(time, tip=between), Cell(memory), Cell(flops)]


def _privacy(group: Group) -> Iterator[Part]:
    if group.privacy_spent:
        columns: tuple[Column | str, ...] = (*numbers(*contents.HEADINGS[:-1]), contents.HEADINGS[-1])
        rows = Lazy(group.privacy_spent, contents.privacy_cells)
        yield Table(columns, rows, "Privacy", most=_MATRIX_ROWS, pick=spaced, fits=True)
    yield from (Text(note, "note") for note in contents.privacy_notes(group))


def _crossovers(group: Group) -> Iterator[Part]:
    if not group.crossovers:
        return
    claimed = [crossover for crossover in group.crossovers if crossover.is_claimed]
    digest = contents.crossover_digest(claimed)
    uncertain = contents.uncertain_crossovers(group.crossovers)
    undecided = [contents.crossover_sentence(one) for one in group.crossovers if not one.is_claimed]
    parts: list[Part] = [Text("Values are interpolated between two measured ones, in logarithms.", "note")]
    parts += [Items(digest)] if digest else []
    if len(digest) < len(claimed):
        every = Items(Lazy(claimed, contents.crossover_sentence))
        parts.append(Only(("html",), [Section(f"All {len(claimed):,} crossovers, one by one", [every], is_open=False)]))
    if uncertain:
        parts.append(Only(("terminal", "markdown"), [Text(uncertain, "note")]))
        parts.append(Only(("html",), [Section(uncertain, [Items(undecided)], is_open=False)]))
    yield Section("Crossovers", parts)


def _failures(summary: SweepSummary) -> Section:
    sections = Lazy(list(enumerate(summary.failures)), lambda one: _failure(one[1], is_open=one[0] < 2))
    return Section(
        "What did not run, and why",
        [
            Text("Trials are grouped by cause. Numbers and paths in messages are replaced by N and PATH.", "soft"),
            Several(sections, Most(8, 20, 60), "more causes"),
        ],
        "failures",
        "What did not run",
    )


def _failure(failure: Failure, *, is_open: bool) -> Section:
    kind = contents.outcome_class(failure.outcome)
    facts: list[tuple[str, Cell | str]] = list(contents.failure_facts(failure).items())
    facts += [("advice", Cell(line, "strong")) for line in failure.advice]
    blocks = {
        "command to run the example again": failure.command,
        "last lines of its log": failure.log_tail,
        "stack traces": failure.stacks,
    }
    return Section(
        failure.cause,
        [Facts(facts), *(Block(text, title) for title, text in blocks.items() if text)],
        lead=[Cell(failure.outcome, kind), Cell(f"{failure.count:,}×", "chip")],
        is_open=is_open,
        tone=kind,
    )


def _environments(environments: Sequence[Environment]) -> Section:
    if not environments:
        return Section("Environment", [Text("No trial recorded its environment.")], "environment")
    names = list(dict.fromkeys(name for one in environments for name in one.settings))

    def cells(one: Environment) -> list[str]:
        joined = ", ".join(f"{name} {value}" for name, value in one.settings.items())
        return [f"{one.trials:,}", joined, *(one.settings.get(name, UNKNOWN) for name in names)]

    columns: tuple[Column | str, ...] = (
        *numbers("trials"),
        Column("environment", only=("terminal", "markdown")),
        *(Column(name, only=("html",)) for name in names),
    )
    return Section("Environment", [Table(columns, Lazy(environments, cells))], "environment")


_FIELDS = (
    Field("name", "trial", "text"),
    Field("trainer", "trainer", "words"),
    Field("model", "model", "words"),
    Field("dtype", "dtype", "words"),
    Field("batch_size", "batch", "count"),
    Field("seq_len", "sequence", "count"),
    Field("outcome", "outcome", "words"),
    Field("step_seconds", "step", "seconds", mark="is_unstable"),
    Field("tokens_per_s", "tokens/s", "rate"),
    Field("peak_bytes", "peak", "bytes"),
    Field("mfu", "MFU", "share"),
    Field("hfu", "HFU", "share"),
    Field("reason", "reason", "words", is_shown=False),
    Field("trace", "trace", "text", is_shown=False),
    Field("command", "command", "text", is_shown=False),
    Field("is_unstable", "unstable", "flag", is_shown=False),
)
MOST_WITH_COMMANDS = 2000
"""A page with more trials has no commands and traces: they would be half of its size."""


def _all_trials(summary: SweepSummary) -> Section:
    left_out = ("trace", "command") if len(summary.rows) > MOST_WITH_COMMANDS else ()
    rows = [["" if one.name in left_out else getattr(row, one.name) for one in _FIELDS] for row in summary.rows]
    tones = {name: contents.outcome_class(name) for name in summary.totals.by_outcome}
    hint = "Click a heading to sort, or a row to see its reason and command."
    return Section("All trials", [Records(_FIELDS, rows, "outcome", tones, hint)], "all-trials")

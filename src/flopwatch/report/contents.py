"""Texts and table cells that the terminal, HTML and Markdown reports have in common."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from typing import Any, Literal, NamedTuple, TypeAlias

from flopwatch.numbers import UNKNOWN, byte_size, count, factor, number, percent, step_time
from flopwatch.present.document import evenly
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY
from flopwatch.report.records import (
    Cell,
    CostFactor,
    Crossover,
    Failure,
    FrontierPoint,
    Group,
    PrivacyRow,
    Quantity,
    SweepSummary,
)
from flopwatch.report.summary import MOST_COLUMNS
from flopwatch.report.verdicts import configuration as configuration
from flopwatch.report.verdicts import differ_measurably
from flopwatch.text import plural

MATRIX_NOTES = (
    "Bold marks the best value in each privacy class (private, not private, unknown) if it is measurably better.",
    "± is half the width of the median's 95 % interval. ~ marks an unstable step time: ignore small differences.",
    "OOM: out of memory. OOM*: not run, because a smaller trial ran out of memory. n/a: the trainer does not support "
    "the model.",
    "> marks a lower bound: some ops have no FLOPs formula.",
)
PREFLIGHT_HEADINGS = ("trainer", "model", "supported", "parameters", "layers", "why not")
NOTHING_TO_CHOOSE = "No trial ran to its end with a measured time, so there is nothing to choose from."
CLASSES_APART = "Private trainers are never compared with trainers that are not private."
UNCLEAR_LIMIT = "! A batch ran although a smaller one ran out of memory: the limit is unclear."
WHOLE_PROCESS = "Memory includes Python and torch themselves, so its factor is smaller than that of the model alone."

OutcomeClass: TypeAlias = Literal["ok", "oom", "failed", "not-run"]
_OUTCOME_WORDS = {
    "oom_device": "OOM",
    "oom_host": "OOM host",
    "oom_inferred": "OOM*",
    "unsupported": "n/a",
}


def outcome_word(outcome: str) -> str:
    """Return the short name of an outcome for table cells.

    `OOM*` means that the trial was not run, because a smaller trial ran out of memory.

    >>> outcome_word("oom_inferred"), outcome_word("hang")
    ('OOM*', 'hang')
    """
    return _OUTCOME_WORDS.get(outcome, outcome)


def outcome_class(outcome: str) -> OutcomeClass:
    """Return the class of an outcome, which decides its colour.

    >>> outcome_class("oom_host"), outcome_class("lost"), outcome_class("missing")
    ('oom', 'failed', 'not-run')
    """
    if outcome in OUT_OF_MEMORY:
        return "oom"
    return "failed" if outcome in FAILED else "ok" if outcome == "ok" else "not-run"


def trials_with(summary: SweepSummary, *outcomes: str) -> int:
    return sum(summary.totals.by_outcome.get(outcome, 0) for outcome in outcomes)


def totals_sentence(summary: SweepSummary) -> str:
    """Return a sentence such as `48 trials: 36 ok, 8 out of memory (3 of them inferred), 2 failed`."""
    inferred = trials_with(summary, "oom_inferred")
    others = ("unsupported", "skipped", "cancelled", "missing")
    amounts = {
        "out of memory" + (f" ({inferred:,} of them inferred)" if inferred else ""): trials_with(
            summary, *OUT_OF_MEMORY
        ),
        "failed": trials_with(summary, *FAILED),
        **{outcome: trials_with(summary, outcome) for outcome in others},
    }
    parts = [f"{trials_with(summary, 'ok'):,} ok", *(f"{n:,} {word}" for word, n in amounts.items() if n)]
    trials = summary.totals.trials
    return f"{plural(trials, 'trial')}: {', '.join(parts)}" if trials else "No trials"


MOST_WARNINGS = 20


def shown_warnings(summary: SweepSummary) -> list[str]:
    """Return the warnings above the report. If there are very many, the last line says how many are left out."""
    more = len(summary.warnings) - MOST_WARNINGS
    left_out = [f"{plural(more, 'more warning')}: see the JSON report"] if more > 0 else []
    return [*summary.warnings[:MOST_WARNINGS], *left_out]


def preflight_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row of `preflight.json`, in the order of `PREFLIGHT_HEADINGS`."""
    parameters = row.get("parameters")
    return (
        str(row["trainer"]),
        str(row["model"]),
        ("yes" if row.get("tried", True) else "not known") if row["supported"] else "no",
        count(parameters) if isinstance(parameters, int | float) else UNKNOWN,
        layer_words(row),
        str(row.get("reason") or ""),
    )


def failure_facts(failure: Failure) -> dict[str, str]:
    """Return what is known about a failure: a text for each label, which may be empty."""
    has_place = failure.outcome not in ("unsupported", "invalid")
    where = f"phase {failure.phase}" + (f", step {failure.step}" if failure.step is not None else "")
    return {
        "trainers": ", ".join(f"{name} {number:,}" for name, number in failure.by_trainer.items()),
        "example": failure.example,
        "reason": failure.reason,
        "where": where if has_place else "",
        "evidence": ", ".join(f"{name} {value}" for name, value in failure.evidence.items() if name != "exception"),
    }


def throughput(cell: Cell) -> str:
    """Write the throughput; `~` marks that of an unstable step time, as in the matrix of step times."""
    mark = "~" if cell.is_unstable else ""
    if cell.tokens_per_s is not None:
        return f"{mark}{number(cell.tokens_per_s)} tokens/s"
    return f"{mark}{number(cell.samples_per_s)} samples/s"


def crossover_sentence(crossover: Crossover) -> str:
    """Return a text such as `ghost beats dpsgd below sequence 480 at batch 8 (between 256 and 512 measured; time)`."""
    other = "batch" if crossover.axis == "sequence" else "sequence"
    where = f"at {other} {crossover.fixed}"
    measured = f"between {crossover.low} and {crossover.high} measured; {crossover.quantity}"
    beats = f"{crossover.below} beats {crossover.above}"
    if not crossover.is_claimed:
        return f"perhaps {beats} below some {crossover.axis} {where}, but the intervals overlap ({measured})"
    if crossover.at is None:
        equal = ", ".join(str(value) for value in crossover.equal_at)
        return (
            f"{beats} up to {crossover.axis} {crossover.low} {where}, no measurable difference at {equal} ({measured})"
        )
    return f"{beats} {_limit(crossover)} {where} ({measured})"


def _limit(crossover: Crossover) -> str:
    """Return `below batch 12`, or `up to batch 8` if rounding moved the crossover out of the measured interval."""
    at = rounded(crossover.at or 0)
    is_between = crossover.low < at <= crossover.high
    return f"below {crossover.axis} {at}" if is_between else f"up to {crossover.axis} {crossover.low}"


def crossover_digest(crossovers: Iterable[Crossover]) -> list[str]:
    """Write crossovers (sizes above which another trainer is better) as sentences, one for each pair of trainers."""
    alike: dict[tuple[str, ...], list[Crossover]] = defaultdict(list)
    for crossover in crossovers:
        if crossover.is_claimed:
            key = (crossover.quantity, crossover.axis, crossover.below, crossover.above)
            alike[key].append(crossover)
    return [crossover_sentence(same[0]) if len(same) == 1 else _many(same) for same in alike.values()]


def frontier_words(point: FrontierPoint) -> str:
    """Return a memory limit such as `32 (64 OOM)`: batch 32 ran, and batch 64 ran out of memory."""
    ran = "none ran" if point.largest_ok is None else str(point.largest_ok)
    if point.smallest_oom is None:
        return f"≥ {ran}" if point.largest_ok else ran
    word = outcome_word("oom_inferred" if point.is_inferred else "oom_device")
    return f"{ran} ({point.smallest_oom} {word})" + ("" if point.is_monotone else " !")


def layer_words(row: Mapping[str, Any]) -> str:
    """Return the share of the parameters that each implementation of per-sample gradients handles.

    The shares come from a row of `preflight.json`; the text is empty if the row has none.

    >>> layer_words({"layers": {"ghost": {"Linear": 0.7, "Embedding": 0.2}, "hook": {"LayerNorm": 0.1}}})
    'ghost 90.0 %, hook 10.0 %'
    """
    layers = row.get("layers")
    if not isinstance(layers, Mapping):
        return ""
    paths = {str(path): found.values() for path, found in layers.items() if isinstance(found, Mapping)}
    known = {path: sum(s for s in shares if isinstance(s, int | float)) for path, shares in paths.items()}
    return ", ".join(f"{path} {percent(total)}" for path, total in known.items())


def device_capacity(cells: Sequence[Cell]) -> int | None:
    """Return the memory size of the accelerator; None if it is unknown or differs between trials."""
    sizes = {cell.device_bytes for cell in cells if cell.device_bytes}
    return sizes.pop() if len(sizes) == 1 else None


def limit_note(group: Group) -> str:
    """Return the caveat of the table of largest batches; empty if it needs none."""
    return "" if all(point.is_monotone for point in group.frontier) else UNCLEAR_LIMIT


def uncertain_crossovers(crossovers: Iterable[Crossover]) -> str:
    """Say how many crossovers may be none; empty if all are clearly measured."""
    undecided = sum(not crossover.is_claimed for crossover in crossovers)
    return f"{undecided:,} more are uncertain: medians cross, but their intervals overlap" if undecided else ""


def denominator_sentence(group: Group) -> str:
    return f"MFU and HFU are shares of {', '.join(group.denominators)}." if group.denominators else ""


def rounded(value: float) -> int:
    """Round to two digits, because an interpolated crossover is not more precise than that.

    >>> rounded(376.7), rounded(7.61), rounded(12345.0)
    (380, 8, 12000)
    """
    unit = int("1" + "0" * max(len(str(int(value))) - 2, 0))
    return round(value / unit) * unit


def _many(same: Sequence[Crossover]) -> str:
    first = same[0]
    other = "batch" if first.axis == "sequence" else "sequence"
    low = min(max(rounded(c.at), c.low) if c.at is not None else c.low for c in same)
    high = max(min(rounded(c.at), c.high) if c.at is not None else c.high for c in same)
    fixed = sorted(c.fixed for c in same)
    values = ", ".join(map(str, fixed)) if len(fixed) <= 4 else f"{fixed[0]} to {fixed[-1]}, {len(fixed)} of them"
    span = str(low) if low == high else f"{low} to {high}"
    return f"{first.below} beats {first.above} below {first.axis} {span} ({other} {values}; {first.quantity})"


HEADINGS = ("batch", "noise", "sampling rate", "steps", "delta", "accountant", "epsilon", "trainers")

ASSUMED = (
    "Epsilon is for a whole training with these settings, computed by Opacus's accountant and rounded up. It holds if "
    "each logical batch is drawn by Poisson sampling. The trials themselves train on random data, so they spend no "
    "privacy."
)
NOT_ASKED = "To see the epsilon that a training would spend, add `privacy: {dataset_size: N, epochs: M}` to the matrix."


def privacy_cells(row: PrivacyRow) -> tuple[str, ...]:
    spent = row.spent
    return (
        str(row.batch_size),
        UNKNOWN if spent.noise_multiplier is None else f"{spent.noise_multiplier:.4g}",
        f"{spent.sample_rate:.4g}",
        f"{spent.steps:,}",
        f"{spent.delta:.3g}",
        spent.accountant,
        epsilon_text(spent.epsilon),
        ", ".join(row.trainers),
    )


def epsilon_text(epsilon: float | None) -> str:
    """Write epsilon with four digits. It is rounded up, because it is an upper bound.

    >>> epsilon_text(1.83831), epsilon_text(None)
    ('1.839', '–')
    """
    if epsilon is None:
        return UNKNOWN
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(epsilon)):.4g}"


def privacy_notes(group: Group) -> list[str]:
    """Return the notes below the privacy table. If private trainers have no table, the note says how to get one."""
    if group.privacy_spent:
        return [ASSUMED, *_own_notes(group.privacy_spent)]
    has_private = any(cell.privacy == "private" and cell.outcome == "ok" for cell in group.cells)
    return [NOT_ASKED] if has_private else []


def _own_notes(rows: Sequence[PrivacyRow]) -> list[str]:
    batches: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.spent.note:
            batches.setdefault((row.spent.note, ", ".join(row.trainers)), []).append(row.batch_size)
    return [
        f"Batch {', '.join(map(str, dict.fromkeys(sizes)))} of {trainers}: {note}."
        for (note, trainers), sizes in batches.items()
    ]


def matrix_notes(group: Group) -> Iterator[str]:
    """The notes below the matrices that apply to this group."""
    outcomes = {cell.outcome for cell in group.cells}
    bold, times, endings, bounds = MATRIX_NOTES
    if any(cell.seconds for cell in group.cells):
        yield from [bold] if len(group.trainers) > 1 else []
        yield times
    if outcomes & {"oom_device", "oom_host", "oom_inferred", "unsupported"}:
        yield endings
    if any(cell.is_lower_bound for cell in group.cells):
        yield bounds


class Metric(NamedTuple):
    """A quantity that is shown as a matrix: one row per sequence length and batch size, one column per trainer.

    Attributes:
        key: Name of the metric for `--metric`.
        value: Reads the value from a cell; None if it is unknown.
        text: Writes the value for display.
        better: `min` or `max` selects the best value; None for HFU, because recomputation raises HFU but not the speed.
        quantity: `time` or `memory`: the measurement that decides whether two cells differ measurably.
    """

    key: str
    title: str
    value: Callable[[Cell], float | None]
    text: Callable[[Cell], str]
    better: Callable[..., Any] | None
    quantity: Quantity = "time"


def _time_text(cell: Cell) -> str:
    if cell.seconds is None:
        return UNKNOWN
    unstable = "~" if cell.is_unstable else ""
    if cell.low_seconds is None or cell.high_seconds is None:
        return f"{unstable}{step_time(cell.seconds)}"
    half_width = (cell.high_seconds - cell.low_seconds) / 2 / cell.seconds
    return f"{unstable}{step_time(cell.seconds)} ±{_narrow_percent(100 * half_width)}"


def _narrow_percent(value: float) -> str:
    # There is no space before the percent sign, because a column of the matrix has only 15 characters.
    return f"{value:.0f}%" if value >= 2 else f"{value:.1f}%"


def _flops_share(cell: Cell, value: float | None) -> str:
    return (">" if cell.is_lower_bound and value is not None else "") + percent(value)


METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("memory", "Peak memory", lambda c: c.peak_bytes, lambda c: byte_size(c.peak_bytes), min, "memory"),
        Metric("time", "Median step time", lambda c: c.seconds, _time_text, min),
        Metric("tokens", "Tokens per second", lambda c: c.tokens_per_s, lambda c: number(c.tokens_per_s), max),
        Metric("samples", "Samples per second", lambda c: c.samples_per_s, lambda c: number(c.samples_per_s), max),
        Metric("mfu", "MFU", lambda c: c.mfu, lambda c: _flops_share(c, c.mfu), max),
        Metric("hfu", "HFU", lambda c: c.hfu, lambda c: _flops_share(c, c.hfu), None),
    )
}


class MatrixRow(NamedTuple):
    """A row of a matrix. The cells are in the order of the trainers; a cell is None if no such trial was planned."""

    seq_len: int
    batch_size: int
    cells: tuple[Cell | None, ...]


def throughput_metric(group: Group) -> Metric:
    return METRICS["tokens" if any(cell.tokens_per_s is not None for cell in group.cells) else "samples"]


def factors_by_place(group: Group) -> tuple[dict[tuple[int, int], dict[str, CostFactor]], list[str]]:
    """Return the cost factors by (sequence length, batch size) and trainer, and the trainers that have any."""
    by_place: dict[tuple[int, int], dict[str, CostFactor]] = {}
    for one in group.cost_factors:
        by_place.setdefault((one.seq_len, one.batch_size), {})[one.trainer] = one
    return by_place, [name for name in group.trainers if any(name in found for found in by_place.values())]


def factor_texts(one: CostFactor) -> tuple[str, str, str]:
    """Return the factors of time, memory and FLOPs; `~` marks the factor of an unstable step time."""
    mark = "~" if one.is_unstable and one.time is not None else ""
    return mark + factor(one.time), factor(one.memory), factor(one.flops)


def matrix_rows(group: Group) -> list[MatrixRow]:
    by_place = {(cell.seq_len, cell.batch_size, cell.trainer): cell for cell in group.cells}
    places = sorted({(cell.seq_len, cell.batch_size) for cell in group.cells})
    return [MatrixRow(*place, tuple(by_place.get((*place, name)) for name in group.trainers)) for place in places]


def known_metrics(group: Group) -> list[Metric]:
    """Return the metrics that at least one cell has. Samples per second are left out if tokens per second are known."""
    known = [m for m in METRICS.values() if any(m.value(cell) is not None for cell in group.cells)]
    has_tokens = any(metric.key == "tokens" for metric in known)
    return [metric for metric in known if not (metric.key == "samples" and has_tokens)]


def cell_text(cell: Cell | None, metric: Metric) -> str:
    """Write the value of a metric, or the outcome of a trial that is not `ok`."""
    if cell is None:
        return ""
    return metric.text(cell) if cell.outcome == "ok" else outcome_word(cell.outcome)


def best_trials(cells: Sequence[Cell | None], metric: Metric) -> set[str]:
    """Return the names of trials that are measurably better than all others in `cells` with equal `Cell.privacy`."""
    best: set[str] = set()
    known = [cell for cell in cells if cell is not None and metric.value(cell) is not None]
    for privacy in {cell.privacy for cell in known}:
        rivals = [cell for cell in known if cell.privacy == privacy]
        if len(rivals) < 2 or metric.better is None:
            continue
        first: Cell = metric.better(rivals, key=metric.value)
        if all(differ_measurably(first, other, metric.quantity) for other in rivals if other is not first):
            best.add(first.trial)
    return best


def some_places(seq_lens: Sequence[int], at_most: int) -> list[int]:
    """Select the rows of evenly spaced sequence lengths, about `at_most` in total; `seq_lens` are those of all rows."""
    lengths = sorted(set(seq_lens))
    per_length = max(Counter(seq_lens).values(), default=1)
    kept = set(evenly(lengths, max(at_most // per_length, 2)))
    return [place for place, length in enumerate(seq_lens) if length in kept]


def narrowed(group: Group, at_most: int = MOST_COLUMNS) -> Group:
    if len(group.trainers) <= at_most:
        return group
    kept = set(group.trainers[:at_most])
    return replace(
        group,
        trainers=group.trainers[:at_most],
        cells=tuple(cell for cell in group.cells if cell.trainer in kept),
        cost_factors=tuple(one for one in group.cost_factors if one.trainer in kept),
        frontier=tuple(point for point in group.frontier if point.trainer in kept),
    )

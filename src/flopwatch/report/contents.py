"""The words for outcomes, and the metrics of trials as texts."""

from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any, Literal, NamedTuple, TypeAlias

from flopwatch.numbers import UNKNOWN, byte_size, number, percent, step_time
from flopwatch.present import document as doc
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY
from flopwatch.report.records import Cell, Group, Quantity
from flopwatch.report.verdicts import differ_measurably

OutcomeClass: TypeAlias = Literal["ok", "oom", "failed", "not-run"]
_OUTCOME_WORDS = {"oom_device": "OOM", "oom_host": "OOM host", "oom_inferred": "OOM*", "unsupported": "n/a"}


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


def table_of(
    items: Sequence[Any], columns: Sequence[tuple[doc.Column | str, Callable[[Any], doc.Cell | str]]], **how: Any
) -> doc.Table:
    """Make a table with a row for each item, of columns with what makes their cells."""
    rows = doc.Lazy(items, lambda item: [make(item) for _, make in columns])
    return doc.Table([column for column, _ in columns], rows, **how)


def epsilon_text(epsilon: float | None) -> str:
    """Write epsilon with four digits. It is rounded up, because it is an upper bound.

    >>> epsilon_text(1.83831), epsilon_text(None)
    ('1.839', '–')
    """
    if epsilon is None:
        return UNKNOWN
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(epsilon)):.4g}"


def throughput(cell: Cell) -> str:
    """Write the throughput; `~` marks that of an unstable step time, as in the matrix of step times."""
    mark = "~" if cell.is_unstable else ""
    if cell.tokens_per_s is not None:
        return f"{mark}{number(cell.tokens_per_s)} tokens/s"
    return f"{mark}{number(cell.samples_per_s)} samples/s"


def device_capacity(cells: Sequence[Cell]) -> int | None:
    """Return the memory size of the accelerator; None if it is unknown or differs between trials."""
    sizes = {cell.device_bytes for cell in cells if cell.device_bytes}
    return sizes.pop() if len(sizes) == 1 else None


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
    text = ("~" if cell.is_unstable and cell.seconds else "") + step_time(cell.seconds)
    if not (cell.seconds and cell.low_seconds and cell.high_seconds):
        return text
    half_width = 50 * (cell.high_seconds - cell.low_seconds) / cell.seconds
    # There is no space before the percent sign, because a column of the matrix has only 15 characters.
    return f"{text} ±{half_width:.{0 if half_width >= 2 else 1}f}%"


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


def throughput_metric(group: Group) -> Metric:
    return METRICS["tokens" if any(cell.tokens_per_s is not None for cell in group.cells) else "samples"]


def known_metrics(group: Group) -> list[Metric]:
    """Return the metrics that at least one cell has. Samples per second are left out if tokens per second are known."""
    known = [m for m in METRICS.values() if any(m.value(cell) is not None for cell in group.cells)]
    return [metric for metric in known if metric.key != "samples" or METRICS["tokens"] not in known]


def cell_text(cell: Cell, metric: Metric) -> str:
    """Write the value of a metric, or the outcome of a trial that is not `ok`."""
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

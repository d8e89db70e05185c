"""Decide which trials of a sweep can be compared, name their columns, collect their measurements, and write these."""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from statistics import geometric_mean
from typing import Any, Literal, NamedTuple

from flopwatch.language import Said, commas
from flopwatch.numbers import UNKNOWN, byte_size, number, percent, step_time
from flopwatch.present import document as doc
from flopwatch.records.settings import REPORTED, SETTINGS
from flopwatch.records.trial import (
    FAILED,
    FEWEST_STEPS,
    LABELS,
    OUT_OF_MEMORY,
    UNSTABLE_WIDTH,
    StepCost,
    TrialResult,
    TrialSpec,
    is_private,
)
from flopwatch.report.records import Group, PrivacyClass, Quantity, TrialCell, TrialRow
from flopwatch.report.verdicts import differ_measurably
from flopwatch.stats import interval_of_runs


def privacy_of(spec: TrialSpec, *results: TrialResult | None) -> PrivacyClass:
    """Return whether the trainer is differentially private: `unknown` for a trainer of the user that does not say so.

    A trainer of the user is private if it declared that in one of its `results`.
    """
    known = is_private(spec.trainer)
    if known is None and not any(result and result.measured.declared_privacy for result in results):
        return "unknown"
    return "not private" if known is False else "private"


def trainer_name(spec: TrialSpec) -> str:
    """Return the trainer's name for tables, which is short for built-in trainers.

    >>> trainer_name(TrialSpec("ghost", "tiny", 4, 512, label="DPGhostClippingTrainer"))
    'ghost'
    >>> trainer_name(TrialSpec("my.trainers:Lion", "tiny", 4, 512))
    'my.trainers:Lion'
    """
    is_builtin = spec.trainer in LABELS and spec.label in LABELS.values()
    return spec.trainer if is_builtin or not spec.label else spec.label


def group_settings(spec: TrialSpec) -> dict[str, Any]:
    """Return the settings that must be equal in two trials for a comparison to make sense."""
    apart = {name: getattr(spec, name) for name, setting in SETTINGS.items() if setting.compared == "apart"}
    return {**apart, "memory_bytes": spec.limits.memory_bytes}


def group_key(spec: TrialSpec) -> tuple[Any, ...]:
    return tuple(group_settings(spec).values())


def place_key(spec: TrialSpec) -> tuple[Any, ...]:
    """Return a key that is equal for two trials if they differ only in their batch size."""
    return (*group_key(spec), trainer_name(spec), spec.seq_len, *sorted(_variant_settings(spec).items()))


def column_names(specs: Mapping[str, TrialSpec]) -> dict[str, str]:
    """Return the column name of each trial: its trainer, and the settings that vary for this trainer."""
    variants: dict[tuple[Any, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for name, spec in specs.items():
        variants[(*group_key(spec), trainer_name(spec))][name] = _variant_settings(spec)
    columns = {}
    for key, members in variants.items():
        names = dict.fromkeys(name for settings in members.values() for name in settings)
        varying = [name for name in names if name in _NAMED or len({found.get(name) for found in members.values()}) > 1]
        for name, settings in members.items():
            more = " ".join(f"{setting}={settings[setting]}" for setting in varying if setting in settings)
            columns[name] = f"{key[-1]} {more}".rstrip()
    return columns


def trainer_order(names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Sort column names, given (column, trainer) pairs: built-in trainers first, trainers of the user last."""
    rank = {trainer: place for place, trainer in enumerate(LABELS)}
    found = {column: (rank.get(trainer, len(rank)), column) for column, trainer in names}
    return tuple(sorted(found, key=lambda column: found[column]))


def takes_setting(spec: TrialSpec, name: str) -> bool:
    """Whether the trial depends on a setting such as `model`. A shell command does only if its text contains it.

    >>> takes_setting(TrialSpec("command", "tiny", 4, 512, command="train.sh {batch_size}"), "model")
    False
    """
    return spec.command is None or f"{{{name}}}" in spec.command


_IN_TITLES = ("model", "dtype", "device", "checkpointing")


def group_title(settings: Mapping[str, Any], varying: Iterable[str]) -> str:
    """Return the heading of a group. Resources such as `gpus` are named only if they vary between groups.

    A setting that is an empty text does not matter for the group and is left out.

    >>> group_title({"model": "small", "dtype": "bf16", "checkpointing": True, "device": "cuda"}, ["dtype"])
    'small, bf16, cuda, checkpointing'
    """
    parts = [str(settings[name]) for name in ("model", "dtype", "device") if settings.get(name) not in ("", "auto")]
    if settings["checkpointing"]:
        parts.append(Said("checkpointing"))
    elif "checkpointing" in varying:
        parts.append(Said("no checkpointing"))
    parts += [f"{name} {value}" for name, value in settings.items() if name in varying and name not in _IN_TITLES]
    return commas(parts) or Said("shell command")


_BESIDE = {name: each.heading or name for name, each in REPORTED.items() if each.compared in ("beside", "named")}
_NAMED = {heading for name, heading in _BESIDE.items() if REPORTED[name].compared == "named"}


def _variant_settings(spec: TrialSpec) -> dict[str, str]:
    beside = ((heading, getattr(spec, name)) for name, heading in _BESIDE.items())
    known = {heading: value for heading, value in beside if value is not None}
    return {name: str(value) for name, value in {**known, **spec.options}.items()}


MOST_FINITE = sys.float_info.max
"""The largest float. JSON may contain larger integers, which Python cannot convert to float."""


def make_cell(name: str, spec: TrialSpec, result: TrialResult | None, column: str) -> TrialCell:
    """Collect the measurements of a trial; none if it is not `ok`, because it may have ended before its memory peak."""
    outcome = str(result.outcome) if result else "missing"
    place = (name, column, privacy_of(spec, result), spec.batch_size, spec.seq_len, outcome)
    if result is None or outcome != "ok":
        return TrialCell(*place, device_bytes=result.measured.memory.device_bytes if result else None)
    measured = result.measured
    steps, cost, memory = measured.steps, measured.cost or StepCost(), measured.memory
    interval = steps if steps and steps.count >= FEWEST_STEPS else None
    is_on_cpu = memory.reserved_bytes is None
    # A peak of host memory says nothing about a trial that ran on an accelerator.
    knows_peak = not is_on_cpu or str(result.environment.get("device", "cpu")).startswith("cpu")
    return TrialCell(
        *place,
        seconds=positive(steps and steps.median),
        low_seconds=positive(interval and interval.low),
        high_seconds=positive(interval and interval.high),
        is_unstable=bool(steps and steps.unstable),
        peak_bytes=positive(memory.peak_bytes) if knows_peak else None,
        device_bytes=positive(memory.device_bytes),
        alloc_retries=memory.alloc_retries,
        samples_per_s=positive(measured.samples_per_s),
        tokens_per_s=positive(measured.tokens_per_s),
        mfu=positive(cost.mfu),
        hfu=positive(cost.hfu),
        is_lower_bound=cost.is_lower_bound,
        why_no_epsilon=_why_no_epsilon(result),
        epsilon=positive(measured.privacy.epsilon) if measured.privacy else None,
    )


FEWEST_RUNS = 3
"""Two runs may agree by chance, so an interval needs three."""


def over_seeds(cells: Sequence[TrialCell]) -> TrialCell:
    """Combine the trials of one configuration, which differ only in their seeds: the mean time, the largest memory.

    With three seeds, the interval is that of a repeated trial; two of them span both intervals.
    """
    ran = [cell for cell in cells if cell.outcome == "ok"]
    if len(ran) < 2:
        too_large = [cell for cell in cells if cell.outcome in OUT_OF_MEMORY]
        return replace([*ran, *too_large, *cells][0], seeds=len(cells))

    def known(name: str) -> list[Any]:
        """The values of all trials; empty if one is unknown."""
        values = [getattr(cell, name) for cell in ran]
        return [] if None in values else values

    rates = ("seconds", "samples_per_s", "tokens_per_s", "mfu", "hfu")
    means: dict[str, Any] = {name: geometric_mean(values) if (values := known(name)) else None for name in rates}
    held = ("peak_bytes", "alloc_retries")
    largest: dict[str, Any] = {name: max(known(name), default=None) for name in held}
    low, high = min(known("low_seconds"), default=None), max(known("high_seconds"), default=None)
    if len(ran) >= FEWEST_RUNS and (medians := known("seconds")):
        with contextlib.suppress(OverflowError):  # a damaged file may have any number
            low, high = interval_of_runs(medians)
    mean = means["seconds"]
    return replace(
        ran[0],
        **means,
        **largest,
        low_seconds=low,
        high_seconds=high,
        is_unstable=high - low > UNSTABLE_WIDTH * mean if mean and low and high else any(c.is_unstable for c in ran),
        is_lower_bound=any(cell.is_lower_bound for cell in ran),
        seeds=len(cells),
    )


def _why_no_epsilon(result: TrialResult) -> str:
    measured = result.measured
    declared, spent = measured.declared_privacy, measured.privacy
    if privacy_of(result.spec, result) != "private" or (spent and positive(spent.epsilon)):
        return ""
    if spent:
        why = spent.note
    elif result.spec.privacy:
        why = measured.not_measured.get("privacy", Said("it was not computed"))
    elif declared and declared.noise_multiplier == 0:
        why = Said("epsilon is infinite, because the noise multiplier is 0")
    else:
        return declared.why_unknown() if declared else ""
    return why if why.startswith("epsilon is ") else Said("epsilon is unknown: {why}", why=why)


def make_row(cell: TrialCell, spec: TrialSpec, group: int, result: TrialResult | None) -> TrialRow:
    return TrialRow(
        name=cell.trial,
        group=group,
        model=spec.model if takes_setting(spec, "model") else "",
        dtype=spec.dtype if takes_setting(spec, "dtype") else "",
        checkpointing=spec.checkpointing,
        reason=result.reason if result else Said("planned, but has no result yet"),
        total_seconds=positive(result.seconds) if result else None,
        command=result.command if result else "",
        trace=result.measured.trace if result else None,
        measured=cell,
    )


def positive(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MOST_FINITE else None


_OUTCOME_WORDS = {"oom_device": "OOM", "oom_host": "OOM host", "oom_inferred": "OOM*", "unsupported": "n/a"}


def outcome_word(outcome: str) -> str:
    """Return the short name of an outcome for table cells.

    `OOM*` means that the trial was not run, because a smaller trial ran out of memory.

    >>> outcome_word("oom_inferred"), outcome_word("hang")
    ('OOM*', 'hang')
    """
    return _OUTCOME_WORDS.get(outcome, outcome)


def outcome_class(outcome: str) -> Literal["ok", "oom", "failed", "not-run"]:
    """Return the class of an outcome, which decides its colour.

    >>> outcome_class("oom_host"), outcome_class("lost"), outcome_class("missing")
    ('oom', 'failed', 'not-run')
    """
    if outcome in OUT_OF_MEMORY:
        return "oom"
    return "failed" if outcome in FAILED else "ok" if outcome == "ok" else "not-run"


def table_of(
    items: Sequence[Any], columns: Sequence[tuple[doc.Head | str, Callable[[Any], doc.Cell | str]]], **how: Any
) -> doc.Grid:
    rows = [[make(item) for _, make in columns] for item in items]
    return doc.Grid([column for column, _ in columns], rows, **how)


def epsilon_text(epsilon: float | None) -> str:
    """Write epsilon with four digits. It is rounded up, because it is an upper bound.

    >>> epsilon_text(1.83831), epsilon_text(None)
    ('1.839', '–')
    """
    if epsilon is None:
        return UNKNOWN
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(epsilon)):.4g}"


def device_capacity(cells: Sequence[TrialCell]) -> int | None:
    sizes = {cell.device_bytes for cell in cells if cell.device_bytes}
    return sizes.pop() if len(sizes) == 1 else None


class ShownMetric(NamedTuple):
    """A quantity that is shown as a matrix: one row per sequence length and batch size, one column per trainer.

    Attributes:
        key: Name of the metric for `--metric`.
        better: `min` or `max` selects the best value; None for HFU, because recomputation raises HFU but not the speed.
        quantity: `time` or `memory`: the measurement that decides whether two cells differ measurably.
    """

    key: str
    title: str
    value: Callable[[TrialCell], float | None]
    text: Callable[[TrialCell], str]
    better: Callable[..., Any] | None
    quantity: Quantity = "time"


def _time_text(cell: TrialCell) -> str:
    text = ("~" if cell.is_unstable and cell.seconds else "") + step_time(cell.seconds)
    if not (cell.seconds and cell.low_seconds and cell.high_seconds):
        return text
    half_width = 50 * (cell.high_seconds - cell.low_seconds) / cell.seconds
    # There is no space before the percent sign, because a column of the matrix has only 15 characters.
    return f"{text} ±{half_width:.{0 if half_width >= 2 else 1}f}%"


def _flops_share(cell: TrialCell, value: float | None) -> str:
    return (">" if cell.is_lower_bound and value is not None else "") + percent(value)


METRICS: Mapping[str, ShownMetric] = {
    metric.key: metric
    for metric in (
        ShownMetric(
            "memory", Said("Peak memory"), lambda c: c.peak_bytes, lambda c: byte_size(c.peak_bytes), min, "memory"
        ),
        ShownMetric("time", Said("Median step time"), lambda c: c.seconds, _time_text, min),
        ShownMetric(
            "tokens", Said("Tokens per second"), lambda c: c.tokens_per_s, lambda c: number(c.tokens_per_s), max
        ),
        ShownMetric(
            "samples", Said("Samples per second"), lambda c: c.samples_per_s, lambda c: number(c.samples_per_s), max
        ),
        ShownMetric("mfu", "MFU", lambda c: c.mfu, lambda c: _flops_share(c, c.mfu), max),
        ShownMetric("hfu", "HFU", lambda c: c.hfu, lambda c: _flops_share(c, c.hfu), None),
    )
}


def throughput_metric(group: Group) -> ShownMetric:
    return METRICS["tokens" if any(cell.tokens_per_s is not None for cell in group.cells) else "samples"]


def known_metrics(group: Group) -> list[ShownMetric]:
    known = [m for m in METRICS.values() if any(m.value(cell) is not None for cell in group.cells)]
    return [metric for metric in known if metric.key != "samples" or METRICS["tokens"] not in known]


def cell_text(cell: TrialCell, metric: ShownMetric) -> str:
    return metric.text(cell) if cell.outcome == "ok" else outcome_word(cell.outcome)


def best_trials(cells: Sequence[TrialCell | None], metric: ShownMetric) -> set[str]:
    """Return the names of trials that are measurably better than all others in `cells` with equal `privacy`."""
    best: set[str] = set()
    known = [cell for cell in cells if cell is not None and metric.value(cell) is not None]
    for privacy in {cell.privacy for cell in known}:
        rivals = [cell for cell in known if cell.privacy == privacy]
        if len(rivals) < 2 or metric.better is None:
            continue
        first: TrialCell = metric.better(rivals, key=metric.value)
        if all(differ_measurably(first, other, metric.quantity) for other in rivals if other is not first):
            best.add(first.trial)
    return best

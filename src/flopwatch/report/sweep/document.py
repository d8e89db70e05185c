"""The report of a sweep as a document: what to run, trainers, measurements, failures, environment, all trials.

Each section is one function here. `present` shows them in a terminal, as Markdown and as a page.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from flopwatch.language import Said, Templates, commas, counted, semicolons
from flopwatch.numbers import byte_size, count, duration, percent
from flopwatch.present import document as doc
from flopwatch.present.json_form import record_fields, to_json
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY
from flopwatch.report.cells import METRICS, ShownMetric, epsilon_text, outcome_class, table_of, throughput_metric
from flopwatch.report.records import (
    Choice,
    Environment,
    Failure,
    Group,
    PrivacyClass,
    SweepSummary,
    TrainerTotals,
    TrialRow,
)
from flopwatch.report.sweep.measurements import group_parts
from flopwatch.text import listed

_PRIVACY: Templates = {"not private": "not private", "private": "private", "unknown": "unknown"}
_PRIVACY_SHORT: Templates = {"not private": "no DP", "private": "DP", "unknown": "unknown"}
_AMOUNTS: Templates = {
    "unsupported": "{n:,} unsupported",
    "skipped": "{n:,} skipped",
    "cancelled": "{n:,} cancelled",
    "missing": "{n:,} missing",
}
_MOST_WARNINGS = 20
_MOST_PLACES = 4


def sweep_document(summary: SweepSummary, metrics: Sequence[str] = ()) -> doc.Document:
    """Return the report. `metrics` are the matrices to show; without any, all that were measured."""
    made = f"{datetime.fromtimestamp(summary.created, timezone.utc):%Y-%m-%d %H:%M} UTC" if summary.created else ""
    engine = Said("engine {engine}", engine=summary.engine) if summary.engine else ""
    totals, lead = summary.totals, [Said("{sentence}.", sentence=totals_sentence(summary))]
    if totals.trial_seconds:
        took = Said("The trials took {time}, in {wall} of wall time.")
        lead.append(took.filled(time=duration(totals.trial_seconds), wall=duration(totals.wall_seconds)))
    return doc.Document(
        summary.name,
        list(_parts(summary, [METRICS[name] for name in metrics])),
        kind=Said("Sweep"),
        about=commas([Said("flopwatch sweep"), engine, made]),
        lead=lead,
        source=summary.folder,
    )


def sweep_json(summary: SweepSummary) -> str:
    content = record_fields(summary)
    content["trials"] = content.pop("rows")
    return to_json(content)


def _parts(summary: SweepSummary, metrics: Sequence[ShownMetric]) -> Iterator[doc.Part]:
    yield from (doc.Text(warning, "warn") for warning in summary.warnings[:_MOST_WARNINGS])
    if (more := len(summary.warnings) - _MOST_WARNINGS) > 0:
        hidden = counted(more, "{n} more warning: see the JSON report", "{n} more warnings: see the JSON report")
        yield doc.Text(hidden, "warn")
    if not summary.totals.trials:
        yield doc.Text(Said("The plan of this sweep has no trials."))
        return
    yield _what_to_run(summary)
    yield _trainers(summary)
    yield _measurements(summary, metrics)
    if summary.failures:
        said = doc.Text(
            Said("Trials are grouped by cause. Numbers and paths in messages are replaced by N and PATH."), "soft"
        )
        sections = [_failure(one, is_open=place < 2) for place, one in enumerate(summary.failures)]
        causes = doc.Several(sections, doc.Most(8, 20, 60), Said("more causes"))
        title = Said("What did not run, and why")
        yield doc.Section(title, [said, causes], "failures", Said("What did not run"))
    yield _environments(summary.environments)
    yield doc.Only(("html",), [_all_trials(summary)])


def _counted(summary: SweepSummary, outcomes: Iterable[str]) -> int:
    return sum(summary.totals.by_outcome.get(outcome, 0) for outcome in outcomes)


def totals_sentence(summary: SweepSummary) -> str:
    """Return a sentence such as `48 trials: 36 ok, 8 out of memory (3 of them inferred), 2 failed`."""
    by_outcome, trials = summary.totals.by_outcome, summary.totals.trials
    inferred = by_outcome.get("oom_inferred", 0)
    of_memory = Said("{n:,} out of memory")
    if inferred:
        of_memory = Said("{n:,} out of memory ({inferred:,} of them inferred)")
    amounts = [
        (of_memory, _counted(summary, OUT_OF_MEMORY)),
        (Said("{n:,} failed"), _counted(summary, FAILED)),
        *((Said(_AMOUNTS[outcome]), by_outcome.get(outcome, 0)) for outcome in _AMOUNTS),
    ]
    parts = [f"{by_outcome.get('ok', 0):,} ok", *(said.filled(n=n, inferred=inferred) for said, n in amounts if n)]
    if not trials:
        return Said("No trials")
    return Said("{what}: {facts}", what=counted(trials, "{n} trial", "{n} trials"), facts=commas(parts))


def _what_to_run(summary: SweepSummary) -> doc.Section:
    groups = [group for group in summary.groups if group.choices]
    if not groups:
        none = Said("No trial ran to its end with a measured time, so there is nothing to choose from.")
        return doc.Section(Said("What to run"), [doc.Text(none)], "run")
    said = doc.Text(
        Said(
            "For each sequence length: the fastest trial, and a trial with less memory if it has at least 90 % of the "
            "throughput. Private trainers and others are chosen apart: a faster trainer does not replace a private "
            "one."
        ),
        "soft",
    )
    sections = [_choices(one, None if one in groups[:3] else False) for one in groups]
    several = doc.Several(sections, doc.Most(3, 6, 40), Said("more groups"), [group.title for group in groups])
    return doc.Section(Said("What to run"), [said, several], "run")


def _choices(group: Group, is_open: bool | None) -> doc.Section:
    rate = throughput_metric(group)

    def fastest(choice: Choice) -> doc.Cell:
        cell, mark = choice.fastest, "≈ " if choice.tied else ""
        tone: doc.Tone = "" if choice.tied else "best"
        short = f"{mark}{cell.trainer} b{cell.batch_size}"
        return doc.Cell(f"{mark}{cell.trainer}", tone, Said("batch {size}", size=cell.batch_size), short)

    def rate_of(choice: Choice) -> str:
        return f"{'~' if choice.fastest.is_unstable else ''}{rate.text(choice.fastest)}"

    def lightest(choice: Choice) -> doc.Cell:
        if (cell := choice.lightest) is None:
            return doc.Cell("")
        spent = "" if cell.epsilon is None else f"epsilon {epsilon_text(cell.epsilon)}"
        said = commas([byte_size(cell.peak_bytes), spent])
        short = f"{cell.trainer} b{cell.batch_size} {said}"
        return doc.Cell(cell.trainer, detail=commas([Said("batch {size}", size=cell.batch_size), said]), short=short)

    def verdict(choice: Choice) -> doc.Cell:
        caveats = semicolons(choice.caveats)
        return doc.Cell(Said("{verdict};", verdict=choice.verdict) if caveats else choice.verdict, detail=caveats)

    has_epsilon = any(choice.fastest.epsilon is not None for choice in group.choices)
    has_lightest = any(choice.lightest for choice in group.choices)
    columns: list[tuple[doc.Head | str, Callable[[Choice], doc.Cell | str]]] = [
        (_number("sequence", "seq"), lambda one: str(one.seq_len)),
        (Said("class"), lambda one: _class(one.privacy)),
        (Said("fastest that ran"), fastest),
        (_number("tokens/s") if rate.key == "tokens" else _number("samples/s"), rate_of),
        (_number("peak"), lambda one: byte_size(one.fastest.peak_bytes)),
        *([(_number("epsilon", "ε"), lambda one: epsilon_text(one.fastest.epsilon))] if has_epsilon else []),
        *([(Said("less memory, within 10 %"), lightest)] if has_lightest else []),
        (doc.Head(Said("verdict"), only=("markdown", "html")), verdict),
    ]
    table = table_of(group.choices, columns, most=doc.Most(24, 60, 16), is_spaced=True)
    return doc.Section(group.title, [table, doc.Only(("terminal",), [_remarks(group.choices)])], is_open=is_open)


def _class(privacy: PrivacyClass) -> doc.Cell:
    return doc.Cell(Said(_PRIVACY[privacy]), "chip", short=Said(_PRIVACY_SHORT[privacy]))


def _remarks(choices: Sequence[Choice]) -> doc.Items:
    """What a terminal says below the table instead of the column of verdicts: each sentence once, with its rows."""
    rows: dict[str, list[str]] = defaultdict(list)
    for choice in choices:
        for sentence in (*([choice.verdict] if choice.tied else []), *choice.caveats):
            short = Said(_PRIVACY_SHORT[choice.privacy])
            rows[sentence].append(Said("{length} {privacy}", length=choice.seq_len, privacy=short))
    remark = Said("{what}: {facts}")
    remarks = [remark.filled(what=listed(places, _MOST_PLACES), facts=sentence) for sentence, places in rows.items()]
    return doc.Items(remarks, most=doc.Most(12, 0, 0), more=Said("more remarks"))


def _trainers(summary: SweepSummary) -> doc.Section:
    def amount(trials: int) -> doc.Cell:
        return doc.Cell(f"{trials:,}", short=None if trials else "·")

    def ran(one: TrainerTotals) -> doc.Cell:
        return doc.Cell(f"{one.ok:,} / {one.tried:,}", short=f"{one.ok:,}/{one.tried:,}")

    columns: list[tuple[doc.Head | str, Callable[[TrainerTotals], doc.Cell | str]]] = [
        (Said("trainer"), lambda one: one.trainer),
        (Said("class"), lambda one: _class(one.privacy)),
        (_number("ok / run", "ok/run"), ran),
        (doc.Head(Said("success"), is_number=True, is_extra=True), lambda one: percent(one.success_rate)),
        (_number("out of memory", "OOM"), lambda one: amount(one.out_of_memory)),
        (_number("failed"), lambda one: amount(one.failed)),
        (_number("not run"), lambda one: amount(one.not_run)),
        (_number("mean peak"), lambda one: byte_size(one.mean_peak_bytes)),
    ]
    note = Said(
        "Success is the share of ok trials among those that ran. A trainer that ran only small configurations has a "
        "small mean peak: to compare trainers, use the tables of peak memory."
    )
    return doc.Section(Said("Trainers"), [table_of(summary.trainers, columns, note=note)], "trainers")


def _number(head: str, short: str | None = None) -> doc.Head:
    """A column of numbers with a heading of ours, which is translated."""
    return doc.Head(Said(head), is_number=True, short=short if short is None else Said(short))


def _measurements(summary: SweepSummary, metrics: Sequence[ShownMetric]) -> doc.Section:
    groups = summary.groups
    if len(groups) == 1:
        parts = group_parts(groups[0], metrics)
        remark = Said(": {group}", group=commas([groups[0].title, _size(groups[0])]))
        return doc.Section(Said("Measurements"), parts, "groups", remark=remark)

    def section(one: Group) -> doc.Section:
        parts = group_parts(one, metrics)
        return doc.Section(one.title, parts, remark=Said(", {size}", size=_size(one)), is_open=one is groups[0])

    several = doc.Several(
        list(map(section, groups)), doc.Most(3, 6, 12), Said("more groups"), [one.title for one in groups]
    )
    return doc.Section(Said("Measurements"), [several], "groups")


def _size(group: Group) -> str:
    trials = Said("{trials:,} trials", trials=sum(cell.seeds for cell in group.cells))
    return commas([Said("{n} parameters", n=count(group.parameters)) if group.parameters else "", trials])


def _failure(failure: Failure, *, is_open: bool) -> doc.Section:
    kind = outcome_class(failure.outcome)
    step = "" if failure.step is None else Said("step {step}", step=failure.step)
    where = commas([Said("phase {phase}", phase=failure.phase), step])
    facts: list[tuple[str, doc.Cell | str]] = [
        (Said("trainers"), ", ".join(f"{name} {number:,}" for name, number in failure.by_trainer.items())),
        (Said("example"), doc.Cell(failure.example)),
        (Said("reason"), failure.reason),
        (Said("where"), "" if failure.outcome in ("unsupported", "invalid") else where),
        (Said("evidence"), _evidence({name: value for name, value in failure.evidence.items() if name != "exception"})),
        *((Said("advice"), doc.Cell(line, "strong")) for line in failure.advice),
    ]
    blocks = {
        Said("command to run the example again"): failure.command,
        Said("last lines of its log"): failure.log_tail,
        Said("stack traces"): failure.stacks,
    }
    return doc.Section(
        failure.cause,
        [doc.Facts(facts), *(doc.Verbatim(text, title) for title, text in blocks.items() if text)],
        lead=[doc.Cell(failure.outcome, kind), doc.Cell(f"{failure.count:,}×", "chip")],
        is_open=is_open,
        tone=kind,
    )


def _evidence(facts: Mapping[str, Any]) -> str:
    """Facts in one line.

    >>> _evidence({"exit_code": 137, "memory_limit": {"by": "cgroup", "limit_bytes": 2**30}})
    'exit_code 137, memory_limit by cgroup, limit 1.00 GiB'
    """
    said = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            said.append(f"{name} {_evidence(value)}")
        elif name.endswith("_bytes") and isinstance(value, int):
            said.append(f"{name.removesuffix('_bytes')} {byte_size(value)}")
        else:
            said.append(f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join(said)


def _environments(environments: Sequence[Environment]) -> doc.Section:
    if not environments:
        return doc.Section(Said("Environment"), [doc.Text(Said("No trial recorded its environment."))], "environment")

    def cells(one: Environment) -> list[str]:
        return [f"{one.trials:,}", ", ".join(f"{name} {value}" for name, value in one.settings.items())]

    table = doc.Grid((*doc.numbers("trials"), Said("environment")), list(map(cells, environments)))
    return doc.Section(Said("Environment"), [table], "environment")


def _measured(metric: ShownMetric, row: TrialRow) -> str:
    return metric.text(row.measured) if row.measured.outcome == "ok" else ""


_ALL_TRIALS: Sequence[tuple[doc.Head | str, Callable[[TrialRow], doc.Cell | str]]] = (
    (Said("trial"), lambda row: row.name),
    (Said("model"), lambda row: row.model),
    ("dtype", lambda row: row.dtype),
    (_number("batch"), lambda row: str(row.measured.batch_size)),
    (_number("sequence"), lambda row: str(row.measured.seq_len)),
    (Said("outcome"), lambda row: doc.Cell(row.measured.outcome, outcome_class(row.measured.outcome))),
    *((doc.Head(one.title, is_number=True), partial(_measured, one)) for one in METRICS.values()),
    (Said("reason"), lambda row: row.reason),
)


def _all_trials(summary: SweepSummary) -> doc.Section:
    note = Said("`--csv` and `--json` have every trial, with the command that runs it again.")
    return doc.Section(Said("All trials"), [table_of(summary.rows, _ALL_TRIALS, note=note)], "all-trials")

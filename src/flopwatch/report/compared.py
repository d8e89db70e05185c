"""The comparisons of two runs and of two sweeps as documents."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from flopwatch.numbers import UNKNOWN, count, duration, energy, factor, flops, number, percent, step_time
from flopwatch.present import document as doc
from flopwatch.report.comparison import QUANTITIES, Quantity, Side, SweepComparison, TrialPair
from flopwatch.runs.comparison import Comparison, RunSteps
from flopwatch.runs.per_step import LEAST_SHARE, PerStep
from flopwatch.runs.reading import earlier_run_note
from flopwatch.runs.waterfall import WaterfallChange
from flopwatch.stats import NO_DIFFERENCE, TOO_FEW
from flopwatch.text import listed, plural

# Two runs

_SHORT = {NO_DIFFERENCE: "no clear difference", TOO_FEW: TOO_FEW}  # for a terminal of 80 columns
_TONES: dict[str, doc.Tone] = {
    **dict.fromkeys(("faster", "steadier"), "better"),
    **dict.fromkeys(("slower", "less steady"), "worse"),
    **dict.fromkeys(_SHORT, "soft"),
}
_LONGEST_FACT = 30
_ALL_ROWS = doc.Most(100, 100, 100)
_FORMATS: dict[str, Callable[[float], str]] = {
    "s": lambda value: step_time(value, digits=4),
    "%": lambda value: percent(value / 100),
    "% of peak": lambda value: percent(value / 100, decimals=2),
    "x": lambda value: f"{value:.3f}",
    "per step": lambda value: number(value) if value >= 1000 else f"{value:g}",
    "steps": lambda value: f"{value:,.0f}",
    "tokens": count,
    "FLOP": flops,
    "duration": duration,
    "J": energy,
}
_FOUR_DIGITS = partial(number, digits=4)
_POINTS = (
    "Points are shares of the peak, as in `flopwatch why`: recomputation and padding count there at the peak, and in "
    "milliseconds at the speed of the passes."
)
_DIFFERS = "The runs differ in these settings, so a difference in speed may have several causes:"
_DIFFERS_NOT = "Nothing differs in device, peak, dtype, attention, mode, method, world size or versions."
_SAME_SIZE_PERCENT = 1.0
_LEAST_MS = 0.05
"""A part that is shorter in both runs would be printed as 0.0 ms."""


def runs_compared(comparison: Comparison) -> doc.Document:
    runs = [pair for name, run in (("A", comparison.a), ("B", comparison.b)) for pair in _run(name, run)]
    differing = [(one.what, _fact(one.a), _fact(one.b), f"affects {one.touches}") for one in comparison.differences]
    settings: list[doc.Part] = [doc.Text(_DIFFERS, "warn"), doc.Grid(("", "A", "B", ""), differing)]
    parts: list[doc.Part] = [doc.Facts(runs), *_other_work(comparison)]
    parts.append(doc.Section("", settings if differing else [doc.Text(_DIFFERS_NOT)]))
    interval = doc.Head("99 % interval", is_number=True, is_extra=True)
    columns: list[doc.Head | str] = ["", *doc.numbers("A", "B", "change"), interval, ""]
    rows: list[Sequence[doc.Cell | str]] = [
        (
            line.label,
            *(UNKNOWN if value is None else _FORMATS.get(line.unit, _FOUR_DIGITS)(value) for value in (line.a, line.b)),
            UNKNOWN if line.change is None else f"{_signed(line.change)} {'pt' if line.unit == '%' else '%'}",
            "" if line.low is None or line.high is None else f"{_signed(line.low)} to {_signed(line.high)}",
            doc.Cell(_SHORT.get(line.verdict or "", line.verdict or ""), _TONES.get(line.verdict or "", "")),
        )
        for line in comparison.lines
    ]
    parts.append(doc.Section("", [doc.Grid(columns, rows, most=_ALL_ROWS)]))
    if comparison.per_step is not None:
        parts += _per_step(comparison.per_step, comparison.waterfall)
    parts += [doc.Text(remark, "soft") for remark in _remarks(comparison)]
    return doc.Document("Two runs", parts)


def _run(name: str, run: RunSteps) -> Iterator[tuple[str, str]]:
    left_out = f", {run.left_out:,} left out (warm-up, or no time)" if run.left_out else ""
    yield name, run.log
    yield "", f"{run.compared:,} steps compared{left_out}{'' if run.has_ended else ', the run has not ended'}"
    if note := earlier_run_note(run.earlier_step):
        yield "", note


def _other_work(comparison: Comparison) -> Iterator[doc.Part]:
    """A warning before all figures if the steps of the two runs do not do the same work."""
    line, tokens = comparison.line("model_flops_per_step"), comparison.line("tokens_per_step")
    if line.a is None or line.b is None or line.change is None or abs(line.change) <= _SAME_SIZE_PERCENT:
        return
    has_same_tokens = tokens.change is not None and abs(tokens.change - line.change) <= _SAME_SIZE_PERCENT
    what = (
        "MFU and rates, not step times" if has_same_tokens else "MFU; step times and rates are those of different work"
    )
    said = f"These runs do not do the same work: a step has {flops(line.a)} in A and {flops(line.b)} in B"
    yield doc.Section("", [doc.Text(f"{said} ({_signed(line.change)} %). Compare {what}.", "warn")])


def _fact(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:,.6g}" if isinstance(value, float) else str(value)
    return textwrap.shorten(text, _LONGEST_FACT, placeholder=" ...") if len(text) > _LONGEST_FACT else text


def _per_step(per_step: PerStep, mfu: WaterfallChange | None) -> Iterator[doc.Part]:
    rows = []
    for part in per_step.parts:
        if max(part.a_ms, part.b_ms) >= _LEAST_MS:
            is_told = abs(part.change_ms) >= LEAST_SHARE * per_step.a_ms
            tone: doc.Tone = "" if not is_told else "better" if part.change_ms < 0 else "worse"
            rows.append(_part(part.name, part.a_ms, part.b_ms, part.a_points, part.b_points, tone))
    together = (None, None) if mfu is None else (mfu.mfu_a, mfu.mfu_b)
    name = "together" if mfu is None else "together, and MFU"
    rows.append([doc.Cell(str(cell), "best") for cell in _part(name, per_step.a_ms, per_step.b_ms, *together)])
    heads = ("A", "B", "change", *(() if mfu is None else ("points A", "points B")))
    columns: list[doc.Head | str] = ["ms per step, whole run", *doc.numbers(*heads)]
    yield doc.Text(per_step.sentence)
    yield doc.Section("", [doc.Grid(columns, [row[: len(columns)] for row in rows], most=_ALL_ROWS)])


def _part(
    name: str, a_ms: float, b_ms: float, a_points: float | None, b_points: float | None, tone: doc.Tone = ""
) -> list[doc.Cell | str]:
    points = ("" if each is None else f"{each:.1f}" for each in (a_points, b_points))
    return [name, f"{a_ms:,.1f}", f"{b_ms:,.1f}", doc.Cell(_signed(b_ms - a_ms), tone), *points]


def _signed(change: float) -> str:
    """The change with its sign and one decimal; a change that rounds to zero has no sign.

    >>> _signed(-4.56), _signed(0.01)
    ('-4.6', '0.0')
    """
    text = f"{change:+.1f}"
    return "0.0" if float(text) == 0 else text


def _remarks(comparison: Comparison) -> Iterator[str]:
    if max(comparison.a.world_size, comparison.b.world_size) > 1:
        yield "With several ranks, rates and shares are those of the rank that writes the log."
    wait, goodput = comparison.line("input_wait_percent"), comparison.line("perf/goodput_percent")
    if None in (wait.a, wait.b) and (goodput.a, goodput.b) != (None, None):
        yield (
            "Goodput leaves out the time between passes. Where passes were not timed, unknown input wait (–) counts as "
            "productive."
        )
    if comparison.waterfall is not None:
        if any(entry.what == "peak FLOP/s" for entry in comparison.differences):
            yield "The runs have different peaks: below a higher peak, the same steps lose more points."
        yield f"{comparison.waterfall.sentence} {_POINTS}"
    if comparison.per_step is not None:
        yield from comparison.per_step.notes
    per_step = comparison.line("tokens_per_step")
    knows_flops = comparison.line("model_flops_per_step").change is not None  # and has said so before all figures
    if per_step.change is not None and abs(per_step.change) > _SAME_SIZE_PERCENT and not knows_flops:
        yield "The steps of the two runs differ in size: compare rates and MFU, not step times."
    yield (
        "The verdicts compare the difference with the spread of step times within each run, in blocks of consecutive "
        "steps; about one verdict in twenty is wrong by chance. They do not cover slow drift or differences between "
        "runs, such as another node, other clock rates or other jobs on the machine: repeat both runs before you rely "
        "on a small difference."
    )


# Two sweeps

TITLES: dict[Quantity, str] = {"time": "time", "samples_per_s": "samples/s", "memory": "memory", "mfu": "MFU"}
_BETTER: dict[Quantity, str] = {"time": "faster", "samples_per_s": "faster", "memory": "less", "mfu": "higher"}
_WORSE: dict[Quantity, str] = {"time": "slower", "samples_per_s": "slower", "memory": "more", "mfu": "lower"}
_MARKS = {NO_DIFFERENCE: "≈", TOO_FEW: "?"}
_MOST_PAIRS = doc.Most(30, 100, 1000)
_MOST_NAMES = 10
HOW_DECIDED = (
    "Ratios are B / A. B is called faster or slower only if the 95 % intervals of the median step times do not overlap "
    "after each was widened by 2 %, because two processes that run the same trial differ by that much. Memory is "
    "called more or less if it differs by more than 1 %. ≈ means no measurable difference. ? means that there "
    "are fewer than 6 steps, or fewer than 3 runs of a repeated trial, which is too few for an interval. Among many "
    "pairs, a few differ by chance: repeat the sweep before you rely on a single pair."
)


def sweeps_compared(comparison: SweepComparison) -> doc.Document:
    have_all = dict.fromkeys(doc.EVERYWHERE, "--json has all")
    return doc.Document("Two sweeps compared", list(_parts(comparison)), have_all=have_all)


def _parts(comparison: SweepComparison) -> Iterator[doc.Part]:
    sides = (("A", comparison.a), ("B", comparison.b))
    yield doc.Facts([(name, f"{side_text(side)}, in {side.folder}") for name, side in sides])
    yield from (doc.Text(f"{note[:1].upper()}{note[1:]}.", "warn") for note in comparison.notes)
    if differing := (*comparison.settings, *comparison.environment):
        warning = doc.Text("The compared trials differ in these, so compare with care.")
        table = doc.Grid(("", "A", "B"), [(one.what, one.a or UNKNOWN, one.b or UNKNOWN) for one in differing])
        yield doc.Section("Differences between the sweeps", [warning, table])
    elif comparison.pairs and not any(pair.differences for pair in comparison.pairs):
        yield doc.Text("The compared trials have the same settings, versions, devices and hosts.")
    if comparison.overall:
        yield _overall(comparison)
        yield _pairs(comparison)
    if changes := list(_changes(comparison.pairs)):
        yield doc.Section("Changed outcomes", changes)
    for name, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            yield doc.Text(f"Only in {name}, {len(names):,}: {listed(list(names), _MOST_NAMES)}")
    if comparison.overall:
        yield doc.Text(HOW_DECIDED, "note")


def side_text(side: Side) -> str:
    """Write the number of trials by outcome.

    >>> side_text(Side("x", 3, {"ok": 2, "oom_device": 1}))
    '3 trials: 2 ok, 1 oom_device'
    """
    counts = sorted(side.by_outcome.items(), key=lambda one: (one[0] != "ok", -one[1], one[0]))
    by_outcome = ", ".join(f"{amount:,} {word}" for word, amount in counts)
    return plural(side.trials, "trial") + (f": {by_outcome}" if counts else "")


def shown_quantities(comparison: SweepComparison) -> list[Quantity]:
    """Return the quantities to show. If all pairs have step times, samples per second are left out as redundant."""
    known = [quantity for quantity in QUANTITIES if quantity in comparison.overall]
    has_rate_alone = any("samples_per_s" in pair.ratios and "time" not in pair.ratios for pair in comparison.pairs)
    return [quantity for quantity in known if quantity != "samples_per_s" or has_rate_alone]


def _overall(comparison: SweepComparison) -> doc.Section:
    ran = sum(bool(pair.ratios) for pair in comparison.pairs)
    rows = [("all", comparison.overall)]
    rows += comparison.by_trainer.items() if len(comparison.by_trainer) > 1 else []
    cells = []
    for (trainer, overall), quantity in product(rows, shown_quantities(comparison)):
        if found := overall.get(quantity):
            told = f"{found.better:,} {_BETTER[quantity]}, {found.worse:,} {_WORSE[quantity]}"
            told += f", {found.undecided:,} without a measurable difference"
            cells.append((trainer, TITLES[quantity], factor(found.mean_ratio, digits=4), told))
    mean = doc.Head("geometric mean", is_number=True, short="mean")
    said = doc.Text(f"{ran:,} of {len(comparison.pairs):,} pairs ran to their end in both sweeps.")
    return doc.Section("B / A", [said, doc.Grid(["trainer", "", mean, "pairs"], cells, most=doc.Most(40, 60, 200))])


def _pairs(comparison: SweepComparison) -> doc.Section:
    """The trials: all in their order, or those with the largest differences if a medium cannot show all."""
    known = [pair for pair in comparison.pairs if pair.ratios]
    shown, places = shown_quantities(comparison), range(len(known))
    telling = sorted(places, key=lambda place: _telling(known[place]), reverse=True)
    own = ["; ".join(f"{d.what} {d.a or UNKNOWN} → {d.b or UNKNOWN}" for d in pair.differences) for pair in known]
    columns: list[doc.Head | str] = ["trial"]
    for quantity in shown:
        columns += [doc.Head(word, is_number=True, group=TITLES[quantity]) for word in ("B / A", "verdict")]
    columns += ["differs in"] if any(own) else []
    rows = [
        [doc.Cell(pair.trial, is_name=True), *_ratio_cells(pair, shown), said][: len(columns)]
        for pair, said in zip(known, own, strict=True)
    ]
    table = doc.Grid(
        columns, rows, most=_MOST_PAIRS, pick=lambda _, most: telling[:most], picked="the largest differences"
    )
    return doc.Section("Trials", [table])


def _telling(pair: TrialPair) -> tuple[bool, float]:
    ratio = pair.ratios.get("time") or next(iter(pair.ratios.values()))
    is_decided = any(one.verdict in ("better", "worse") for one in pair.ratios.values())
    return is_decided, max(ratio.ratio, 1 / ratio.ratio)


def _ratio_cells(pair: TrialPair, shown: Sequence[Quantity]) -> Iterator[doc.Cell | str]:
    for quantity in shown:
        ratio = pair.ratios.get(quantity)
        if ratio is None:
            yield from (UNKNOWN, "")
            continue
        value, between = factor(ratio.ratio, digits=4), ""
        if ratio.low is not None and ratio.high is not None:
            between = f"{number(ratio.low, digits=4)} to {number(ratio.high, digits=4)}"
        # A terminal has room for one interval; those of samples/s and MFU follow from that of the time.
        short = f"{value} {between}" if quantity == shown[0] else value
        yield doc.Cell(f"{value} ({between})" if between else value, short=short)
        unstable = "~" if pair.is_unstable and quantity != "memory" else ""
        said = {"better": _BETTER[quantity], "worse": _WORSE[quantity]}.get(ratio.verdict, ratio.verdict)
        mark = _MARKS.get(ratio.verdict, said)
        tone: doc.Tone = "better" if ratio.verdict == "better" else "worse" if ratio.verdict == "worse" else ""
        yield doc.Cell(said, tone, unstable, short=f"{mark} {unstable}")


def _changes(all_pairs: Sequence[TrialPair]) -> Iterator[doc.Section]:
    found: dict[tuple[str, str], list[TrialPair]] = {}
    for pair in all_pairs:
        if pair.outcome_a != pair.outcome_b:
            found.setdefault((pair.outcome_a, pair.outcome_b), []).append(pair)
    ordered = sorted(found.items(), key=lambda one: (one[0][0] != "ok", one[0][1] != "ok", -len(one[1])))
    for (before, after), pairs in ordered:
        tone: doc.Tone = "worse" if before == "ok" else "better" if after == "ok" else ""
        said = [": ".join(filter(None, (pair.trial, pair.reason_b or pair.reason_a))) for pair in pairs]
        lead = [doc.Cell(f"{before} → {after}", tone, is_name=True)]
        yield doc.Section(plural(len(pairs), "trial"), [doc.Items(said, most=doc.Most(5, 10, 50))], lead=lead)

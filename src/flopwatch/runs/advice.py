"""What a log says: the verdict or why there is none, what to try next and, without an MFU, where the time went."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from flopwatch.language import Said, Templates, ands, counted, sentences
from flopwatch.numbers import duration, percent, step_time
from flopwatch.present.document import Bar, Bars, Grid, Head, numbers
from flopwatch.records.metrics import goodput_of
from flopwatch.records.time_uses import MAY_HAVE_WAITS, USES
from flopwatch.runs.comparison import total
from flopwatch.runs.reading import RunLog, earlier_run_note, provenance_at
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.waterfall import (
    Loss,
    Waterfall,
    divided_wall_time,
    exactness_of,
    how_to_trace,
    in_shell,
    named,
    seconds_of,
    undivided_note,
    use_of_cores,
    waterfall_of,
)

LEAST_STEPS = 20
"""The first steps are warm-up, and the median that tells stalled steps from others needs some more."""
LEAST_STEP_SECONDS = 60.0
"""In a shorter run, start-up and the first evaluation decide every share of the time, whatever the training is like."""
_LEAST_POINTS = 5.0
"""A smaller loss is not worth a verdict: shares of the time differ by some points from one run to the next."""
_LEAST_POINTS_TOGETHER = 15.0
"""Losses below `_LEAST_POINTS` that add up to this are worth saying, although none of them stands out."""
_NEARLY_EQUAL = 0.8
"""A loss of at least this share of the largest one is named too, because another run could rank them the other way."""
_GOOD_SHARE_OF_DATASHEET = 0.5
"""Share of a datasheet's peak that well-tuned forward and backward passes reach. MFU of 40 to 55 % is published for
large models on A100 and H100, with optimizer and communication; passes that are as fast are not called slow."""
_GOOD_SHARE_OF_MEASURED = 0.7
"""The same of the fastest matrix product measured on the device, which is about 0.7 of the datasheet on these."""
_LEAST_EXCESS_POINTS = 1.0
"""If the executed FLOPs exceed what the peak allows by more than this, the peak is too low."""
LEAST_DRAWN_POINTS = 0.05
"""A smaller loss would be printed as 0.0 points; all of them share one line of `flopwatch why`."""
_LARGEST = 3
_WHOLE_MFU = Said("MFU of the whole run")
_SLOW = ("achievable", "below_peak", "slow_matmuls", "other_kernels")
"""Losses of which even a good run has some. What is usual is taken off in this order."""

_IF_PASSES_ARE_NOT_TIMED: Templates = {
    "below_peak": "Slow passes or waiting for input cost {points}: the input wait between the passes of a step was not "
    "measured, and is part of this.",
    "idle": "Idle time costs {points}: the device waits for Python or for input. The input wait between the passes of "
    "a step was not measured, and is part of this.",
}


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """What costs a run most.

    Attributes:
        key: Its stable name: the key of a loss such as `input_wait`, or `two_losses`, `many_losses`, `healthy` or
            `peak_too_low`.
        sentence: The verdict: a sentence about each loss that it names, and how they compare with the others.
        losses: Keys of the losses that the sentence names, largest first.
        reservation: A sentence about what limits the verdict; empty if nothing does.
    """

    key: str
    sentence: str
    losses: tuple[str, ...] = ()
    reservation: str = ""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a run's log says in words.

    Attributes:
        sentence: The verdict, or why the log supports none.
        verdict: None if the log supports none.
        next_step: What to try first; empty if there is nothing to advise.
        losses: The losses that cost most, largest first.
        notes: What limits these figures, without what the losses have said.
    """

    sentence: str
    verdict: RunVerdict | None = None
    next_step: str = ""
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reservation(self) -> str:
        return self.verdict.reservation if self.verdict else ""


def conclusion_of(log: RunLog, waterfall: Waterfall | None) -> Conclusion:
    if waterfall is None:
        missing = what_is_missing(log)
        return Conclusion(missing)
    verdict = verdict_of(log, waterfall)
    losses = tuple(loss for loss in waterfall.largest() if abs(loss.points) >= LEAST_DRAWN_POINTS)
    # The advice of this loss says the same.
    said = undivided_note(how_to_trace(log)) if any(loss.key == "below_peak" for loss in losses) else None
    notes = tuple(note for note in waterfall.notes if note != said)
    if isinstance(verdict, str):
        return Conclusion(verdict, losses=losses, notes=notes)
    notes = tuple(note for note in notes if note not in verdict.sentence)
    named = [loss for key in verdict.losses for loss in waterfall.losses if loss.key == key]
    if verdict.key == "peak_too_low":
        named = [loss for loss in waterfall.losses if loss.points < 0]
    advice = sentences(loss.advice for loss in named)
    return Conclusion(verdict.sentence, verdict, advice, losses, notes)


def what_is_missing(log: RunLog) -> str:
    place, provenance = in_shell(str(log.path.parent)), log.provenances[-1] if log.provenances else None
    if not log.rows:
        config = log.starts[-1].config if log.starts else {}
        steps, seconds = config.get("log_every", "log_every"), config.get("log_seconds", "log_seconds")
        text = Said("The log has no row of metrics yet; the run ended before its first one.")
        if log.summary is None:
            text = Said(
                "The log has no row of metrics yet; the first one is written after {steps} steps or {seconds} s, and "
                "after 6 steps at the earliest."
            )
        return sentences([text.filled(steps=steps, seconds=seconds), earlier_run_note(log.earlier_step)])
    if not total(log, "total/model_flops"):
        unknown = Said(
            "The FLOPs of this run are unknown, so there is no MFU to explain; `flopwatch explain {path}` says why."
        )
        return unknown.filled(path=place)
    if provenance is None or provenance.peak is None:
        dtype = f" --dtype {provenance.dtypes[0]}" if provenance is not None and provenance.dtypes else ""
        return Said(
            "The peak FLOP/s of the device is unknown, so there is no MFU; give the dense figure of the datasheet "
            "(`flopwatch why {path} --peak-tflops X`), or measure what the device reaches, on the machine of the run "
            "(`flopwatch peak --measure{dtype}`), and repeat the command.",
            path=place,
            dtype=dtype,
        )
    known, then = seconds_of(log), Said("yet; wait for the next row")
    if log.summary is not None:
        then = Said("before the run ended; run it again for more steps")
    text = Said("The log has no step that was timed and whose FLOPs are known {then}.")
    if not known.get("wall") or "model_at_peak" not in known:
        text = Said(
            "The log does not have the times that show where the peak went (time/wall_seconds and "
            "time/model_at_peak_seconds); they were not logged {then}."
        )
    return text.filled(then=then)


def steps_of(log: RunLog) -> int:
    steps = total(log, "total/steps")
    return int(steps) if steps is not None and isfinite(steps) else 0


def _good_share(log: RunLog) -> float:
    provenance = provenance_at(log, log.rows[-1].step) if log.rows else None
    peak = {} if provenance is None or provenance.peak is None else provenance.peak
    if peak.get("kind") == "measured":
        return _GOOD_SHARE_OF_MEASURED
    rate, achievable = peak.get("flops_per_s"), None if provenance is None else provenance.achievable_flops_per_s
    if not rate or not achievable:
        return _GOOD_SHARE_OF_DATASHEET
    return _GOOD_SHARE_OF_MEASURED * min(float(achievable) / float(rate), 1.0)


def verdict_of(log: RunLog, waterfall: Waterfall, least_seconds: float = LEAST_STEP_SECONDS) -> RunVerdict | str:
    steps, uses = steps_of(log), seconds_of(log)
    seconds = uses.get("train") or 0.0
    if steps < LEAST_STEPS:
        few = Said("No verdict: the run has {steps}, and a verdict needs {least}.")
        return few.filled(steps=counted(steps, "{n} step", "{n} steps"), least=LEAST_STEPS)
    if seconds < least_seconds or not isfinite(seconds):
        spent = duration(seconds if isfinite(seconds) else 0.0)
        short = Said("No verdict: the run has spent {spent} in steps, and a verdict needs {least}.")
        return short.filled(spent=spent, least=duration(least_seconds))
    step_mfu = waterfall.step_mfu_percent or 0.0
    if waterfall.points("below_peak") < -_LEAST_EXCESS_POINTS or step_mfu > 100:
        said = Said(
            "The peak is too low to judge this run: its steps reach more than 100 %, with recomputation and padding, "
            "of it."
        )
        if step_mfu > 100:
            said = Said("The peak is too low to judge this run: its steps reach {share} of it.")
        return RunVerdict("peak_too_low", said.filled(share=percent(step_mfu / 100)))
    times_passes = bool(uses.get("passes_timed"))
    found = _verdict(waterfall, _gains(waterfall, _good_share(log)), _verdicts(log, times_passes))
    inexact = Said("The FLOPs are not exact, so this verdict relies on the measured times.")
    goodput = goodput_of(uses)
    has_note = (
        goodput is not None and not goodput.knows_input_wait
    )  # of `_limits`, which says how long the waits can be
    bound = "" if has_note else _bound_of_waits(found, waterfall, times_passes)
    return replace(found, reservation=sentences([inexact if exactness_of(log)[0] is False else "", bound]))


def _bound_of_waits(verdict: RunVerdict, waterfall: Waterfall, times_passes: bool) -> str:
    """How long unmeasured waits for batches can be, if the verdict names a loss that they may be part of."""
    keys = MAY_HAVE_WAITS if times_passes else (*MAY_HAVE_WAITS, *_IF_PASSES_ARE_NOT_TIMED)
    if not set(keys) & set(verdict.losses):
        return ""
    places = [loss for loss in waterfall.losses if loss.key in keys and loss.points >= LEAST_DRAWN_POINTS]
    if {loss.key for loss in places} <= set(verdict.losses):
        return ""  # the verdict has said how much it is
    return Said(
        "If batches are fetched where flopwatch does not see it, this wait is part of {losses}: after warm-up at most "
        "{points}.",
        losses=named(places),
        points=_points(sum(loss.points for loss in places)),
    )


def _gains(waterfall: Waterfall, good_share: float) -> list[tuple[float, Loss]]:
    """What could be gained from each loss, in points, largest first: all of it, or what is more than usual."""
    executed = waterfall.mfu_percent + sum(waterfall.points(key) for key in ("recompute", "padding", "extra_passes"))
    usual = executed * (1 / good_share - 1)
    gains = []
    for key in _SLOW:
        for loss in (loss for loss in waterfall.losses if loss.key == key):
            taken = min(usual, loss.points)
            usual -= taken
            gains.append((0.0 if key == "achievable" else loss.points - taken, loss))
    gains += [(loss.points, loss) for loss in waterfall.losses if loss.key not in _SLOW]
    return sorted(gains, key=lambda gain: -gain[0])


def _verdicts(log: RunLog, times_passes: bool) -> Callable[[Loss], str]:
    """The sentences about a loss."""
    cores = use_of_cores(log)

    def said(loss: Loss) -> str:
        template = USES[loss.key].verdict
        if not times_passes:
            template = _IF_PASSES_ARE_NOT_TIMED.get(loss.key, template)
        elif cores and loss.key == "below_peak":
            template = Said("Slow forward and backward passes cost {points}. {cores}")
        return Said(template, points=_points(loss.points), cores=cores)

    return said


def _verdict(waterfall: Waterfall, gains: list[tuple[float, Loss]], said: Callable[[Loss], str]) -> RunVerdict:
    together = sum(gain for gain, _ in gains)
    if not gains or (gains[0][0] < _LEAST_POINTS and together < _LEAST_POINTS_TOGETHER):
        return RunVerdict(
            "healthy",
            Said(
                "Nothing large is left to gain: MFU is {mfu}, forward and backward pass are about as fast as "
                "well-tuned ones, and no other loss costs {least:g} points or more.",
                mfu=percent(waterfall.mfu_percent / 100),
                least=_LEAST_POINTS,
            ),
        )
    (gain, first), (next_gain, second) = gains[0], (*gains, (0.0, gains[0][1]))[1]
    keys = (first.key, second.key)
    if gain < _LEAST_POINTS:
        return RunVerdict(
            "many_losses",
            Said(
                "No single loss stands out: many small ones cost {together:.0f} points together, the largest are "
                "{losses}.",
                together=together,
                losses=ands(
                    Said("{loss} ({points})", loss=loss.name, points=_points(loss.points)) for _, loss in gains[:2]
                ),
            ),
            keys[: len(gains)],
        )
    if next_gain >= max(_NEARLY_EQUAL * gain, _LEAST_POINTS):
        equal = Said("About as much could be gained from either.")
        return RunVerdict("two_losses", sentences([said(first), said(second), equal]), keys)
    is_largest = first.points >= max(other.points for other in waterfall.losses)
    rank = Said("Nothing else costs more.") if is_largest else Said("This is the most that the run could gain.")
    return RunVerdict(first.key, sentences([said(first), rank]), (first.key,))


def _points(points: float) -> Said:
    return Said("{points} points", points=f"{points:.0f}" if points >= 9.5 else f"{points:.1f}")


def waterfall_bars(waterfall: Waterfall) -> Bars:
    """The way from 100 % of the peak down to the MFU: a bar for each loss, at its place.

    Losses that would be written as 0.0 share one bar, above that of MFU.
    """
    large, mfu = waterfall.largest(_LARGEST), waterfall.mfu_percent
    small = [loss for loss in waterfall.losses if abs(loss.points) < LEAST_DRAWN_POINTS]
    shown = [loss for loss in waterfall.losses if loss not in small]
    if small:
        name = counted(len(small), "{n} smaller loss", "{n} smaller losses")
        shown.append(Loss("", name, sum(loss.points for loss in small), sum(loss.seconds for loss in small)))
    level = 100.0
    bars = [Bar(Said("peak"), 0.0, level, "100 %", "whole")]
    for loss in shown:
        above, level = level, level - loss.points
        tip = Said("{evidence}\n{advice}", evidence=loss.evidence, advice=loss.advice) if loss.advice else loss.evidence
        tone: Literal["loss", "large loss"] = "large loss" if loss in large else "loss"
        bars.append(Bar(loss.name, min(above, level), max(above, level), _signed(-loss.points), tone, tip))
    bars.append(Bar(_WHOLE_MFU, 0.0, mfu, percent(mfu / 100), "rest"))
    whole = max(bar.high for bar in bars)
    rows: list[tuple[str, ...]] = []
    for loss in waterfall.losses:
        lost = _lost(loss).removesuffix(" %")
        rows.append(
            (loss.name, Said("{points} points", points=lost), duration(loss.seconds), loss.evidence, loss.advice)
        )
    rows.append((_WHOLE_MFU, percent(mfu / 100), "", "", ""))
    columns: list[Head | str] = [
        Said("lost to"),
        *numbers("points of MFU", "time"),
        Said("evidence"),
        Said("what to try"),
    ]
    return Bars([bar._replace(low=bar.low / whole, high=bar.high / whole) for bar in bars], behind=Grid(columns, rows))


def _lost(loss: Loss) -> str:
    return f"{'−' if loss.points >= 0 else '+'}{percent(abs(loss.points) / 100)}"


def _signed(points: float) -> str:
    return f"{points:+.1f}" if abs(points) >= LEAST_DRAWN_POINTS else f"{points:+.2g}" if points else "0"


def losses_in_pairs(log: RunLog) -> list[tuple[str, str]]:
    """As a notebook shows it: each loss with its share of the peak; empty if unknown."""
    waterfall = waterfall_of(log)
    if waterfall is None:
        return []
    losses = [(loss.name, _lost(loss)) for loss in waterfall.losses]
    return [(Said("peak of the devices"), "100 %"), *losses, (_WHOLE_MFU, percent(waterfall.mfu_percent / 100))]


def uses_table(times: "Times") -> Grid:
    """Where the wall time went, if MFU is unknown."""
    rows = []
    for use in times.uses:
        per_step = "" if use.seconds_per_step is None else step_time(use.seconds_per_step)
        rows.append((use.name, duration(use.seconds), percent(use.share), per_step))
    return Grid(("", *numbers("time", "of wall time", "per step")), rows)


_LEAST_SHARE = 0.01
_ABOUT_THE_PEAK = ("The FLOPs are not exact", "Without a trace", "The peak")


@dataclass(frozen=True, slots=True)
class TimeUse:
    """One use of the wall time.

    Attributes:
        seconds_per_step: None for what is not part of ordinary steps.
        evidence: The measurement that shows it, in one sentence.
        advice: What to try next; empty if there is nothing to advise.
    """

    key: str
    name: str
    seconds: float
    share: float
    seconds_per_step: float | None
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Times:
    """All uses of a run's wall time, and its rates. Unknown values are None.

    Attributes:
        wall_seconds: Time since the start of the run's first process.
        uses: The longest first. They add up to the wall time.
        tokens_per_second: Of the training steps; `samples_per_second` and `flops_per_second` too.
        notes: What limits these figures, in whole sentences.
    """

    wall_seconds: float
    uses: tuple[TimeUse, ...]
    steps: int | None
    tokens_per_second: float | None
    samples_per_second: float | None
    flops_per_second: float | None
    notes: tuple[str, ...]

    def largest(self, count: int = 3) -> list[TimeUse]:
        """The uses that take most, without the work itself, which cannot be judged without a peak."""
        return [use for use in self.uses if not USES[use.key].without_peak and use.share >= _LEAST_SHARE][:count]


def times_of(log: RunLog, traces: Sequence[TraceSplit] = ()) -> Times | None:
    """The uses of a run's wall time; None if it is unknown. `read_around` is enough."""
    # At an infinite peak FLOPs take no time, so that every use of the devices' time is one of the parts.
    parts = divided_wall_time(log, traces, model_at_peak=0.0, hardware_at_peak=0.0, recompute_at_peak=0.0)
    if parts is None:
        return None
    steps = total(log, "total/steps")
    uses = [
        TimeUse(
            loss.key,
            USES[loss.key].without_peak or loss.name,
            loss.seconds,
            loss.seconds / parts.wall_seconds,
            loss.seconds / steps if steps and USES[loss.key].in_steps else None,
            loss.evidence,
            loss.advice,
        )
        for loss in parts.losses
    ]
    return Times(
        parts.wall_seconds,
        tuple(sorted(uses, key=lambda use: -use.seconds)),
        None if steps is None else int(steps),
        total(log, "perf/tokens_per_second"),
        total(log, "perf/samples_per_second"),
        total(log, "perf/model_flops_per_second_per_device"),
        tuple(note for note in parts.notes if not note.startswith(_ABOUT_THE_PEAK)),
    )

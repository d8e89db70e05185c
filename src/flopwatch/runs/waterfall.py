"""Where the peak went: every loss between 100 % of the devices' peak and the MFU of a run, in points that add up.

All losses are computed in seconds. The whole is the wall time of the run. A second in which the devices do nothing
for the training is lost whole. The FLOPs of the training count with the time that they would take at the peak, so the
rest of the time in steps is the time by which the devices are slower than their peak. Points are seconds in percent of
the wall time, so they add up to 100.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from flopwatch.decode import is_amount
from flopwatch.language import Said, ands, counted, semicolons, sentences
from flopwatch.numbers import duration, flop_rate, percent, step_time
from flopwatch.records.metrics import AT_PEAK, METRICS, Goodput, goodput_of
from flopwatch.records.time_uses import IN_STEPS, LOSSES, MAY_HAVE_WAITS, OF_TRACES, Use
from flopwatch.runs.reading import RunLog, earlier_run_note, provenance_at
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.traces.files import traces_of_log
from flopwatch.text import one_line


@dataclass(frozen=True, slots=True)
class Loss:
    """One step of the waterfall.

    Attributes:
        key: Its stable name, such as `input_wait`.
        name: Its name for people, such as "input wait".
        points: Percent of the peak that it costs.
        seconds: Time that it costs.
        evidence: The measurement that shows it, in one sentence.
        advice: What to try next, in one sentence; empty if there is nothing to advise.
    """

    key: str
    name: str
    points: float
    seconds: float
    evidence: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The way from 100 % of the peak down to the MFU of a whole run: `losses` and `mfu_percent` add up to 100.

    Attributes:
        wall_seconds: Time since the start of the run's first process.
        losses: In the order in which they are drawn. A loss of nothing is left out.
        mfu_percent: Model FLOPs of the whole run over what the devices could have done in the wall time.
        step_mfu_percent: MFU of the training steps alone, with their input wait; None without steps.
        traced: The traces that were used; empty without a trace.
        notes: What limits these figures, in whole sentences.
    """

    wall_seconds: float
    losses: tuple[Loss, ...]
    mfu_percent: float
    step_mfu_percent: float | None = None
    traced: tuple[TraceSplit, ...] = ()
    notes: tuple[str, ...] = ()

    def largest(self, count: int = 3) -> list[Loss]:
        return sorted(self.losses, key=lambda loss: -loss.points)[:count]

    def points(self, key: str) -> float:
        return sum(loss.points for loss in self.losses if loss.key == key)

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        return {"traces": content.pop("traced"), **content}


def waterfall_of(log: RunLog, traces: Sequence[TraceSplit] = ()) -> Waterfall | None:
    """The waterfall of a run; None if its log has no peak, no FLOPs or no wall time.

    Only the last row, one that is not exact, the last summary and the provenance of the log are used, so `read_around`
    is enough.
    """
    return divided_wall_time(log, traces) if seconds_of(log).get("model_at_peak") else None


def divided_wall_time(log: RunLog, traces: Sequence[TraceSplit] = (), **changed_seconds: float) -> Waterfall | None:
    """All of a run's wall time by loss; None if it is unknown. Some of the logged seconds can be replaced."""
    seconds, notes = _consistent({**seconds_of(log), **changed_seconds})
    goodput = goodput_of(seconds)
    if goodput is None:
        return None
    unread = list(filter(None, [earlier_run_note(log.earlier_step)]))
    if log.torn_lines:
        unread.append(
            counted(
                log.torn_lines,
                "{n} line of the log cannot be read and is left out; a process that is killed or is still writing "
                "leaves one such line.",
                "{n} lines of the log cannot be read and are left out; a process that is killed or is still writing "
                "leaves one such line.",
            )
        )
    facts = _facts(log)
    traces, older = traces_of_log(log, traces)
    useful, wall = seconds.setdefault("model_at_peak", 0.0), goodput.wall_seconds
    parts, more = _divide(seconds, goodput, traces, facts)
    known = [key for key in LOSSES if abs(parts.get(key, 0.0)) > _NOTHING * wall]
    losses = tuple(_loss(LOSSES[key], parts[key], wall, facts) for key in known)
    in_steps = goodput.productive_seconds + sum(goodput.lost_seconds.get(key, 0.0) for key in ("input_wait", "between"))
    step_mfu = 100 * useful / in_steps if in_steps > 0 else None
    found = Waterfall(wall, losses, 100 * useful / wall, step_mfu, tuple(traces))
    return replace(found, notes=(*unread, *older, *notes, *more, *_limits(found, facts, seconds)))


def time_by_part(log: RunLog, traces: Sequence[TraceSplit] = ()) -> tuple[dict[str, float], frozenset[str]] | None:
    """Seconds of every loss by key, in which FLOPs at the peak are part of `below_peak`; they add up to the wall time.

    The second value has the keys of the parts of steps that this run has measured. None if the wall time is unknown.
    """
    seconds, _ = _consistent(seconds_of(log))
    goodput = goodput_of(seconds)
    if goodput is None:
        return None
    seconds |= dict.fromkeys(AT_PEAK, 0.0)
    measured = {*_uses_of_steps(seconds, goodput.productive_seconds), *IN_STEPS.intersection(goodput.lost_seconds)}
    parts, _ = _divide(seconds, goodput, traces, _facts(log))
    return parts, frozenset(measured if goodput.knows_input_wait else measured - {"input_wait"})


def seconds_of(log: RunLog) -> Mapping[str, float]:
    """Time by use, such as `train` and `eval`, at the end of the log; empty without rows."""
    if log.summary is not None:  # it also has the time of phases after the last row
        found = logged_seconds(log.summary.values)
        if "wall" in found:
            return found
    return dict(_newest_ledger(log).get("seconds", {}))


def logged_seconds(values: Mapping[str, float]) -> dict[str, float]:
    times = {key: value for key, value in values.items() if key.startswith("time/") and key in METRICS}
    return {key.removeprefix("time/").removesuffix("_seconds"): float(value) for key, value in times.items()}


def _newest_ledger(log: RunLog) -> Mapping[str, Any]:
    """The totals of the newest record that has them: that of a session's start, if it has no row yet."""
    ledgers = [row.ledger for row in log.rows[-1:]] + [start.ledger for start in log.starts[-1:]]
    known = [ledger for ledger in ledgers if ledger.get("seconds")]
    return max(known, key=lambda ledger: ledger["seconds"].get("wall", 0.0), default={})


_NOTHING = 1e-9
"""A smaller share of the wall time is a rounding error."""
_LEAST_REPORTED_EXCESS = 0.005
"""Clocks of host and device differ by less than this share of the wall time; nobody needs to know."""


def _consistent(logged: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The seconds by use, changed where a part would be larger than its whole, so that no loss is negative.

    That happens in damaged logs, and if the clock of the machine was set back during the run.
    """
    amounts = ((name, value) for name, value in logged.items() if isinstance(value, int | float))
    seconds = {name: float(value) for name, value in amounts if isfinite(value) and value > 0}
    room = seconds.get("train", 0.0)
    for name in ("compile", "stall"):
        seconds[name] = min(seconds.get(name, 0.0), room)
        room -= seconds[name]
    goodput = goodput_of(seconds)
    if goodput is None or goodput.lost_seconds["other"] >= 0:
        return seconds, []
    excess = -goodput.lost_seconds["other"]
    seconds["wall"] += excess
    if excess < _LEAST_REPORTED_EXCESS * seconds["wall"]:
        return seconds, []
    return seconds, [
        Said(
            "The logged times add up to {excess} more than the wall time, as if the machine's clock had been set "
            "back; here their sum counts as the wall time.",
            excess=duration(excess),
        )
    ]


def _facts(log: RunLog) -> dict[str, Any]:
    """What the log says about the run besides times, for the names of losses and for their texts."""
    row = log.rows[-1] if log.rows else None
    totals = _newest_ledger(log).get("totals", {})
    goodput = goodput_of(seconds_of(log))
    provenance = None if row is None else provenance_at(log, row.step)
    peak = dict(provenance.peak) if provenance is not None and provenance.peak is not None else {}
    peaks = [each.peak["flops_per_s"] for each in log.provenances if each.peak and row and each.step <= row.step]
    return {
        "steps": _newest_ledger(log).get("steps"),
        "tokens": totals.get("tokens"),
        "real_tokens": totals.get("real_tokens"),
        "other_flops": key_of_other_flops(log),
        "peak_kind": peak.get("kind"),
        "peak_source": peak.get("source"),
        "peak_flops_per_s": peak.get("flops_per_s"),
        "peaks": tuple(dict.fromkeys(peaks)),
        "achievable_flops_per_s": None if provenance is None else provenance.achievable_flops_per_s,
        "is_cpu": bool(log.starts) and log.starts[-1].environment.get("device") == "cpu",
        "cores": use_of_cores(log),
        "exact": exactness_of(log),
        "knows_input_wait": goodput is not None and goodput.knows_input_wait,
        "times_passes": goodput is not None and "between" in goodput.lost_seconds,
        "path": str(log.path.parent),
        "trace": how_to_trace(log),
    }


_FULLY_USED = 0.7
"""Share of the processor time of its threads that a training on a CPU uses at least, if nothing else holds it up."""


def use_of_cores(log: RunLog) -> str:
    """How a training on a CPU leaves cores unused, in whole sentences; empty if it does not, or if it is not known."""
    start, seconds = log.starts[-1] if log.starts else None, seconds_of(log)
    if start is None or start.environment.get("device") != "cpu" or start.world_size > 1:
        return ""
    threads, cores = (start.environment.get(name) for name in ("threads", "device_units"))
    wall = seconds.get("wall", 0.0) - seconds.get("restart", 0.0)
    if not is_amount(threads) or not is_amount(cores) or not threads or wall <= 0:
        return ""
    said = []
    if threads < cores:
        said.append(
            counted(
                threads,
                "torch computes with {n} thread, and the peak is that of {cores} cores: with OMP_NUM_THREADS={cores} "
                "or torch.set_num_threads({cores}) it uses all of them.",
                "torch computes with {n} threads, and the peak is that of {cores} cores: with OMP_NUM_THREADS={cores} "
                "or torch.set_num_threads({cores}) it uses all of them.",
                cores=cores,
            )
        )
    used = seconds.get("processor", 0.0) / wall
    if 0 < used < _FULLY_USED * min(threads, cores):
        said.append(
            Said(
                "On average its process ran on {used:.2f} cores: other processes use this machine too, or the "
                "training waits.",
                used=used,
            )
        )
    return sentences(said)


def exactness_of(log: RunLog) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the FLOPs of all rows are exact, and why they are not. The summary is that of the last session only."""
    ends = [end for end in (log.summary, *reversed(log.rows)) if end is not None and end.exact is not None]
    inexact = next((end for end in ends if not end.exact), None)
    if inexact is not None:
        return False, inexact.notes
    return (True, ()) if ends else (None, ())


_LEAST_UNDIVIDED_POINTS = 1.0
_LONGEST_REASON = 300


def how_to_trace(log: RunLog) -> str:
    """Who traces the run; a run that has ended cannot be traced any more. Begins a sentence."""
    if log.summary is not None:
        return Said("In the next run, while it trains, `flopwatch trace RUN_DIR`")
    return Said("While the training runs, `flopwatch trace {path}`", path=in_shell(str(log.path.parent)))


def undivided_note(trace: str) -> str:
    return Said(
        'Without a trace, "{loss}" is one loss. {trace} divides it into slow matmuls, other kernels, idle time and '
        "communication.",
        loss=LOSSES["below_peak"].name,
        trace=trace,
    )


def _limits(waterfall: Waterfall, facts: Mapping[str, Any], seconds: Mapping[str, float]) -> list[str]:
    notes = []
    if not facts["knows_input_wait"]:
        places, where = [loss for loss in waterfall.losses if loss.key in MAY_HAVE_WAITS], Said("other losses")
        if facts["times_passes"] and places:
            longest = duration(sum(loss.seconds for loss in places))
            where = Said("{losses}, after warm-up at most {longest}", losses=named(places), longest=longest)
        unknown = Said("The input wait of this run was not measured, so it is part of {where}.", where=where)
        notes.append(sentences([unknown, _MEASURE_WAIT]))
    if not seconds.get("divided") and not waterfall.points("optimizer"):
        notes.append(
            Said(
                "The time of the optimizer is unknown, so it is part of other losses; this happens if its step gets a "
                "closure, runs in another thread or is no method of a torch.optim.Optimizer."
            )
        )
    is_exact, reasons = facts["exact"]
    if is_exact is False:
        why = Said("The FLOPs are not exact.")
        if reasons:
            reason = reasons[0]
            if not isinstance(reason, Said):  # it may be of any length, in a damaged log
                reason = one_line(reason, _LONGEST_REASON).rstrip(".")
            why = Said("The FLOPs are not exact: {why}.", why=reason)
        notes.append(sentences([why, Said("MFU and the losses inside steps are as uncertain as they are.")]))
    if len(facts["peaks"]) > 1:
        rates = ", ".join(flop_rate(rate) for rate in facts["peaks"])
        changed = Said("The peak has changed during this run ({rates}). Each step counts at the peak of its own time.")
        notes.append(changed.filled(rates=rates))
    if not waterfall.traced and waterfall.points("below_peak") >= _LEAST_UNDIVIDED_POINTS:
        notes.append(undivided_note(facts["trace"]))
    return [*notes, *_about_the_device(facts)]


def _about_the_device(facts: Mapping[str, Any]) -> list[str]:
    notes: list[str] = []
    if facts["peak_kind"] == "measured":
        notes.append(
            Said(
                "The peak is no datasheet's figure; it was measured on such a device: {source}. MFU compares the "
                "training with these matrix products.",
                source=facts["peak_source"],
            )
        )
    if facts["cores"]:
        notes.append(facts["cores"])
    if facts["is_cpu"] and facts["peak_kind"] == "derived":
        note = Said("The peak is that of the whole CPU: {source}. Few trainings come near it.")
        if not facts["achievable_flops_per_s"]:
            note = Said(
                "The peak is that of the whole CPU: {source}. Few trainings come near it; `flopwatch peak --measure` "
                "measures what matrix products reach on this machine."
            )
        notes.append(note.filled(source=facts["peak_source"]))
    return notes


def named(losses: Sequence[Loss]) -> str:
    return ands(Said('"{loss}"', loss=loss.name) for loss in losses)


def _divide(
    seconds: Mapping[str, float], goodput: Goodput, traces: Sequence[TraceSplit], facts: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """The seconds of every loss, by key. Together with `model_at_peak` they add up to the wall time."""
    parts = dict(goodput.lost_seconds)
    parts["restart"] = parts.get("restart", 0.0) + parts.pop("rerun", 0.0)
    executed, recomputed = seconds.get("hardware_at_peak", 0.0), seconds.get("recompute_at_peak", 0.0)
    executed = max(executed, seconds["model_at_peak"])
    parts["recompute"] = recomputed = min(recomputed, executed - seconds["model_at_peak"])
    parts[facts["other_flops"]] = executed - recomputed - seconds["model_at_peak"]
    between = parts.pop("between", 0.0)
    productive = goodput.productive_seconds + between
    room = productive - executed
    wanted = _uses_of_steps(seconds, productive) | {"between": between}
    in_steps, notes = _fitted(wanted, room)
    parts |= in_steps
    below = {"below_peak": room - sum(in_steps.values())}
    below |= _achievable(below["below_peak"], executed, facts)
    split, more = _divide_by_traces(below, parts | below, productive + parts.get("input_wait", 0.0), executed, traces)
    return parts | below | split, notes + more


def key_of_other_flops(log: RunLog) -> str:
    """Which loss executed FLOPs are that are neither the model's nor recomputed."""
    totals = _newest_ledger(log).get("totals", {})
    tokens, real = totals.get("tokens"), totals.get("real_tokens")
    return "padding" if tokens and real is not None and real < tokens else "extra_passes"


def _uses_of_steps(seconds: Mapping[str, float], productive_seconds: float) -> dict[str, float]:
    """Seconds of the losses inside steps. Those of the timed steps stand for all of them."""
    unpriced = min(seconds.get("unpriced", 0.0), productive_seconds)
    uses = {"unpriced": unpriced}
    left = divided = seconds.get("divided", 0.0)
    if divided > 0:
        for name in ("optimizer", "host"):
            timed = min(seconds.get(name, 0.0), left)
            left -= timed
            uses[name] = timed / divided * (productive_seconds - unpriced)
    return uses


_FIRST_TO_GIVE = ("between", "host", "optimizer", "unpriced")


def _fitted(wanted: Mapping[str, float], room: float) -> tuple[dict[str, float], list[str]]:
    """Shorten the losses inside steps until they fit into the time that the FLOPs leave."""
    fitted = dict(wanted)
    excess = sum(fitted.values()) - max(room, 0.0)
    for name in _FIRST_TO_GIVE:
        given = min(max(excess, 0.0), fitted.get(name, 0.0))
        if given > 0:
            fitted[name] -= given
            excess -= given
    notes: list[str] = []
    if room < 0:
        notes.append(
            Said(
                "The executed FLOPs would take longer at the peak than the steps took, so the peak is too low: check "
                "`flopwatch peak`, or pass peak_flops_per_s."
            )
        )
    return fitted, notes


def _achievable(below: float, executed: float, facts: Mapping[str, Any]) -> dict[str, float]:
    """Divide the time by which steps are slower than the peak by the fastest matrix product measured on the device."""
    peak, achievable = facts["peak_flops_per_s"], facts["achievable_flops_per_s"]
    if not peak or not achievable or achievable >= peak or below <= 0 or len(facts["peaks"]) > 1:
        return {}
    lost = min(executed * (peak / achievable - 1), below)
    return {"achievable": lost, "below_peak": below - lost}


def _divide_by_traces(
    below: Mapping[str, float],
    parts: Mapping[str, float],
    step_seconds: float,
    executed: float,
    traces: Sequence[TraceSplit],
) -> tuple[dict[str, float], list[str]]:
    """Divide the seconds of `below` as the time of the traced steps is divided.

    `parts` are the seconds of the losses that are known without a trace, `step_seconds` those in steps with their input
    wait, which is part of traced steps too, and `executed` what the executed FLOPs would take at the peak.
    """
    traced_seconds = sum(trace.seconds for trace in traces)
    if traced_seconds <= 0 or below["below_peak"] <= 0:
        return {}, []
    scale = step_seconds / traced_seconds
    found = {use.key: scale * sum(getattr(trace, name) for trace in traces) for name, use in OF_TRACES.items()}
    products = found.pop("matmul") + found.pop("attention")
    found["slow_matmuls"] = products - executed - parts.get("achievable", 0.0)
    traced = _without_measured(found, parts)
    if not any(traced.values()):
        return {}, []
    share = below["below_peak"] / sum(traced.values())
    split = {key: value * share for key, value in traced.items() if value > 0}
    split |= {"below_peak": 0.0, "optimizer": parts.get("optimizer", 0.0) + split.get("optimizer", 0.0)}
    if 0.8 < 1 / share < 1.25:
        return split, []
    doubt = Said(
        "The traced steps show {share} of the time that they divide, so the losses known from the trace are "
        "approximate; a newer trace may be better.",
        share=percent(1 / share),
    )
    notes: list[str] = [doubt]
    return split, notes


def _without_measured(traced: Mapping[str, float], parts: Mapping[str, float]) -> dict[str, float]:
    """Take out of the traced time what clocks have measured during the whole run, so that it is not counted twice."""
    left = dict(traced)
    # While a batch is awaited, between passes and after the optimizer, a device has little work. A CPU may run ops of
    # the loader.
    left["idle"] -= sum(parts.get(key, 0.0) for key in ("input_wait", "between", "host"))
    left["other_kernels"] += min(left["idle"], 0.0)
    if "optimizer" in parts:
        left["optimizer"] = 0.0
    return {key: max(value, 0.0) for key, value in left.items()}


def _loss(use: Use, seconds: float, wall_seconds: float, facts: Mapping[str, Any]) -> Loss:
    points = 100 * seconds / wall_seconds
    if seconds < 0:  # only `below_peak` can be, if the peak is too low
        more = Said(
            "At this peak, the executed FLOPs take {excess} more than the steps took.", excess=duration(-seconds)
        )
        return Loss(use.key, use.name, points, seconds, more, _TOO_LOW)
    steps, tokens, real_tokens = facts["steps"], facts["tokens"], facts["real_tokens"]
    evidence = Said("{seconds} of {wall} {measured}")
    if steps and use.in_steps:
        evidence = Said("{seconds} of {wall} ({each} per step) {measured}")
    each = step_time(seconds / steps) if steps else ""
    said: str = evidence.filled(
        seconds=duration(seconds), wall=duration(wall_seconds), each=each, measured=use.measured
    )
    if use.key == "padding" and tokens and real_tokens is not None:
        padding = Said("{share} of all tokens are padding", share=percent(1 - real_tokens / tokens))
        said = semicolons([said, padding])
    advice: str = Said(use.advice, path=in_shell(facts["path"]), trace=facts["trace"])
    if use.key in ("idle", "below_peak") and not facts["times_passes"]:
        advice = sentences([_MEASURE_WAIT, advice])
    return Loss(use.key, use.name, points, seconds, Said("{sentence}.", sentence=said), advice)


_MEASURE_WAIT = Said(
    "To measure the input wait, pass the batches of a TrainingMonitor through monitor.batches(), or fetch them in "
    "`with monitor.input_wait():`."
)
_TOO_LOW = Said("Check the peak with `flopwatch peak`, or pass peak_flops_per_s.")


def in_shell(path: str) -> str:
    """A path as it is typed in a shell, on one line.

    >>> in_shell("runs/a"), in_shell("my runs/a")
    ('runs/a', "'my runs/a'")
    """
    return shlex.quote(one_line(path))

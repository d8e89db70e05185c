"""Where the peak went: every loss between 100 % of the devices' peak and the MFU of a run, in points that add up.

All losses are computed in seconds. The whole is the wall time of the run. A second in which the devices do nothing
for the training is lost whole. The FLOPs of the training count with the time that they would take at the peak, so the
rest of the time in steps is the time by which the devices are slower than their peak. Points are seconds in percent of
the wall time, so they add up to 100.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from flopwatch.numbers import duration, flop_rate, percent
from flopwatch.records.metrics import AT_PEAK, METRICS, Goodput, goodput_of
from flopwatch.records.time_uses import IN_STEPS, LOSSES, OF_TRACES, Use
from flopwatch.records.trace_split import TraceSplit
from flopwatch.runs.reading import RunLog, provenance_at
from flopwatch.runs.traces.splits import traces_of_log
from flopwatch.runs.waterfall.texts import MEASURE_WAIT, in_shell, text_of
from flopwatch.text import one_line, plural


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
        """The losses that cost the most, largest first."""
        return sorted(self.losses, key=lambda loss: -loss.points)[:count]

    def points(self, key: str) -> float:
        """Percent of the peak that the loss with this key costs; 0 if the run does not have it."""
        return sum(loss.points for loss in self.losses if loss.key == key)

    def pairs(self) -> list[tuple[str, str]]:
        """Each loss between the peak and the MFU of the run, with its share of the peak as a text."""
        lost = [
            (loss.name, f"{'−' if loss.points >= 0 else '+'}{percent(abs(loss.points) / 100)}") for loss in self.losses
        ]
        return [("peak of the devices", "100 %"), *lost, ("MFU of the whole run", percent(self.mfu_percent / 100))]

    def to_json(self) -> dict[str, Any]:
        return {
            "wall_seconds": self.wall_seconds,
            "mfu_percent": self.mfu_percent,
            "step_mfu_percent": self.step_mfu_percent,
            "losses": [
                {name: getattr(loss, name) for name in ("key", "name", "points", "seconds", "evidence", "advice")}
                for loss in self.losses
            ],
            "traces": [split.to_json() for split in self.traced],
            "notes": list(self.notes),
        }


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
    facts = _facts(log)
    traces, older = traces_of_log(log, traces)
    useful, wall = seconds.setdefault("model_at_peak", 0.0), goodput.wall_seconds
    parts, more = _divide(seconds, goodput, traces, facts)
    known = [key for key in LOSSES if abs(parts.get(key, 0.0)) > _NOTHING * wall]
    losses = tuple(_loss(LOSSES[key], parts[key], wall, facts) for key in known)
    in_steps = goodput.productive_seconds + sum(goodput.lost_seconds.get(key, 0.0) for key in ("input_wait", "between"))
    step_mfu = 100 * useful / in_steps if in_steps > 0 else None
    found = Waterfall(wall, losses, 100 * useful / wall, step_mfu, tuple(traces))
    return replace(found, notes=(*_unread(log), *older, *notes, *more, *_limits(found, facts, seconds)))


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


def _unread(log: RunLog) -> list[str]:
    if not log.torn_lines:
        return []
    return [
        f"{plural(log.torn_lines, 'line')} of the log cannot be read and {'is' if log.torn_lines == 1 else 'are'} left "
        "out; a process that is killed or is still writing leaves one such line."
    ]


def seconds_of(log: RunLog) -> Mapping[str, float]:
    """Time by use, such as `train` and `eval`, at the end of the log; empty without rows."""
    if log.summary is not None:  # it also has the time of phases after the last row
        found = {
            key.removeprefix("time/").removesuffix("_seconds"): float(value)
            for key, value in log.summary.values.items()
            if key.startswith("time/") and key in METRICS
        }
        if "wall" in found:
            return found
    return dict(_newest_ledger(log).get("seconds", {}))


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
    seconds = {name: float(value) for name, value in logged.items() if _is_amount(value)}
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
        f"The logged times add up to {duration(excess)} more than the wall time, as if the machine's clock had been "
        "set back; here their sum counts as the wall time."
    ]


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value) and value > 0


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
        "peak_kind": peak.get("kind"),
        "peak_source": peak.get("source"),
        "peak_flops_per_s": peak.get("flops_per_s"),
        "peaks": tuple(dict.fromkeys(peaks)),
        "achievable_flops_per_s": None if provenance is None else provenance.achievable_flops_per_s,
        "is_cpu": bool(log.starts) and log.starts[-1].environment.get("device") == "cpu",
        "exact": exactness_of(log),
        "knows_input_wait": goodput is not None and goodput.knows_input_wait,
        "times_passes": goodput is not None and "between" in goodput.lost_seconds,
        "straggler": None if row is None else row.values.get("ranks/straggler"),
        "path": str(log.path.parent),
    }


def exactness_of(log: RunLog) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the FLOPs of all rows are exact, and why they are not. The summary is that of the last session only."""
    ends = [end for end in (log.summary, *reversed(log.rows)) if end is not None and end.exact is not None]
    inexact = next((end for end in ends if not end.exact), None)
    if inexact is not None:
        return False, inexact.notes
    return (True, ()) if ends else (None, ())


def _unknown(waterfall: Waterfall, facts: Mapping[str, Any], seconds: Mapping[str, float]) -> list[str]:
    """The losses that this run could not measure, so that they are part of others."""
    notes = []
    if not facts["knows_input_wait"]:
        where = f'"{LOSSES["between"].name}"' if facts["times_passes"] else "other losses"
        notes.append(f"The input wait of this run was not measured, so it is part of {where}. {MEASURE_WAIT}")
    if not seconds.get("divided") and not waterfall.points("optimizer"):
        notes.append(
            "The time of the optimizer is unknown, so it is part of other losses; this happens if its step gets a "
            "closure, runs in another thread or is no method of a torch.optim.Optimizer."
        )
    return notes


_LEAST_UNDIVIDED_POINTS = 1.0
_LONGEST_REASON = 300


def undivided_note(run_dir: str) -> str:
    """The note about the loss that only a trace can divide."""
    return (
        f'Without a trace, "{LOSSES["below_peak"].name}" is one loss. `flopwatch trace {in_shell(run_dir)}` divides it '
        "into slow matmuls, other kernels, idle time and communication, while the training runs."
    )


def _limits(waterfall: Waterfall, facts: Mapping[str, Any], seconds: Mapping[str, float]) -> list[str]:
    """What a reader has to know about the figures: FLOPs that are not exact, what is not divided, the peak."""
    notes = _unknown(waterfall, facts, seconds)
    is_exact, reasons = facts["exact"]
    if is_exact is False:
        why = f": {one_line(reasons[0], _LONGEST_REASON).rstrip('.')}" if reasons else ""
        notes.append(f"The FLOPs are not exact{why}. MFU and the losses inside steps are as uncertain as they are.")
    if len(facts["peaks"]) > 1:
        rates = ", ".join(flop_rate(rate) for rate in facts["peaks"])
        notes.append(f"The peak has changed during this run ({rates}). Each step counts at the peak of its own time.")
    if not waterfall.traced and waterfall.points("below_peak") >= _LEAST_UNDIVIDED_POINTS:
        notes.append(undivided_note(facts["path"]))
    if facts["peak_kind"] == "measured":
        notes.append(
            f"The peak is no datasheet's figure; it was measured on such a device: {facts['peak_source']}. MFU "
            "compares the training with these matrix products."
        )
    if facts["is_cpu"] and facts["peak_kind"] == "derived":
        note = f"The peak is that of the whole CPU: {facts['peak_source']}. Few trainings come near it"
        measure = "; `flopwatch peak --measure` measures what matrix products reach on this machine"
        notes.append(f"{note}{'' if facts['achievable_flops_per_s'] else measure}.")
    return notes


def _divide(
    seconds: Mapping[str, float], goodput: Goodput, traces: Sequence[TraceSplit], facts: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """The seconds of every loss, by key. Together with `model_at_peak` they add up to the wall time."""
    parts = dict(goodput.lost_seconds)
    parts["restart"] = parts.get("restart", 0.0) + parts.pop("rerun", 0.0)
    straggler, waited = seconds.get("straggler", 0.0), parts.get("input_wait", 0.0)
    of_input = min(seconds.get("straggler_input", 0.0), straggler, waited)
    parts["input_wait"] = waited - of_input
    executed, recomputed = seconds.get("hardware_at_peak", 0.0), seconds.get("recompute_at_peak", 0.0)
    executed = max(executed, seconds["model_at_peak"])
    parts["recompute"] = recomputed = min(recomputed, executed - seconds["model_at_peak"])
    parts[_name_of_the_rest(facts)] = executed - recomputed - seconds["model_at_peak"]
    between = parts.pop("between", 0.0)
    productive = goodput.productive_seconds + between
    room = productive - executed
    wanted = _uses_of_steps(seconds, productive) | {"straggler": straggler - of_input, "between": between}
    in_steps, notes = _fitted(wanted, room)
    parts |= in_steps
    below = {"below_peak": room - sum(in_steps.values())}
    below |= _achievable(below["below_peak"], executed, facts)
    split, more = _divide_by_traces(below, parts | below, productive + waited, executed, traces)
    parts["straggler"] += of_input
    return parts | below | split, notes + more


def key_of_other_flops(log: RunLog) -> str:
    """Which loss executed FLOPs are that are neither the model's nor recomputed."""
    totals = _newest_ledger(log).get("totals", {})
    return _name_of_the_rest({name: totals.get(name) for name in ("tokens", "real_tokens")})


def _name_of_the_rest(facts: Mapping[str, Any]) -> str:
    tokens, real = facts["tokens"], facts["real_tokens"]
    return "padding" if tokens and real is not None and real < tokens else "extra_passes"


def _uses_of_steps(seconds: Mapping[str, float], productive_seconds: float) -> dict[str, float]:
    """Seconds of the losses inside steps. Those of the timed steps stand for all of them."""
    unpriced = min(seconds.get("unpriced", 0.0), productive_seconds)
    uses = {"ranks_wait": seconds.get("ranks_wait", 0.0), "unpriced": unpriced}
    left = divided = seconds.get("divided", 0.0)
    if divided > 0:
        for name in ("optimizer", "host"):
            timed = min(seconds.get(name, 0.0), left)
            left -= timed
            uses[name] = timed / divided * (productive_seconds - unpriced)
    return uses


_FIRST_TO_GIVE = ("ranks_wait", "between", "host", "optimizer", "straggler", "unpriced")


def _fitted(wanted: Mapping[str, float], room: float) -> tuple[dict[str, float], list[str]]:
    """Shorten the losses inside steps until they fit into the time that the FLOPs leave.

    They can overlap, because waiting for other ranks happens inside of optimizers too, for example.
    """
    fitted = dict(wanted)
    excess = sum(fitted.values()) - max(room, 0.0)
    for name in _FIRST_TO_GIVE:
        given = min(max(excess, 0.0), fitted.get(name, 0.0))
        if given > 0:
            fitted[name] -= given
            excess -= given
    notes = []
    if room < 0:
        notes.append(
            "The executed FLOPs would take longer at the peak than the steps took, so the peak is too low: check "
            "`flopwatch peak`, or pass peak_flops_per_s."
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
    """Divide the time by which steps are slower than the peak as the time of the traced steps is divided.

    Args:
        below: The seconds to divide, as `below_peak`.
        parts: The seconds of the losses that are known without a trace.
        step_seconds: Time in steps with their input wait, which is part of traced steps too.
        executed: Time that the executed FLOPs would take at the peak.
        traces: The traces; one for each traced rank.
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
    return split, _doubt_about_traces(1 / share)


def _doubt_about_traces(share: float) -> list[str]:
    """A note if the traced steps account for far more or less time than the one that they divide."""
    if 0.8 < share < 1.25:
        return []
    return [
        f"The traced steps show {percent(share)} of the time that they divide, so the losses known from the trace are "
        "approximate; a newer trace may be better."
    ]


def _without_measured(traced: Mapping[str, float], parts: Mapping[str, float]) -> dict[str, float]:
    """Take out of the traced time what clocks have measured during the whole run, so that it is not counted twice."""
    left = dict(traced)
    left["exposed_communication"] -= parts.get("ranks_wait", 0.0) + parts.get("straggler", 0.0)
    # While a batch is awaited, between passes and after the optimizer, a device has little work. A CPU may run ops of
    # the loader.
    left["idle"] -= sum(parts.get(key, 0.0) for key in ("input_wait", "between", "host"))
    left["other_kernels"] += min(left["idle"], 0.0)
    if "optimizer" in parts:
        left["optimizer"] = 0.0
    return {key: max(value, 0.0) for key, value in left.items()}


def _loss(use: Use, seconds: float, wall_seconds: float, facts: Mapping[str, Any]) -> Loss:
    evidence, advice = text_of(use, seconds, wall_seconds, facts)
    return Loss(use.key, use.name, 100 * seconds / wall_seconds, seconds, evidence, advice)

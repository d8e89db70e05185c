"""What a run has done since its first start: totals that survive a resume. Pure arithmetic."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.records.metrics import APART, LOST, carried_seconds, goodput_of, loss_in_step, typical_seconds
from flopwatch.records.run import PARTIAL_ROW, Number
from flopwatch.runs import read_around, rows_from_end
from flopwatch.runs.lines import TornLineError, lines_from_end, parse_object

_TOTALS = ("samples", "tokens", "real_tokens", "trainable_tokens", "model_flops", "hardware_flops")


@dataclass
class Ledger:
    """Adds up steps and phases. What was never known is not in `totals`; a part unknown later keeps what was known.

    Attributes:
        steps: Optimizer steps that count.
        totals: Samples, tokens and FLOPs of them.
        seconds: By class, see `flopwatch.records.metrics`; `wall` is up to the newest row.
        first_start_unix_time: When the run's first process started; None for a log that does not tell.
    """

    steps: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_start_unix_time: float | None = None
    _not_compared: list[float] = field(default_factory=list, repr=False)
    """Work of warm-up steps from before the first typical one."""

    def add_steps(self, steps: Iterable[MeasuredStep], typical_seconds: float | None = None) -> None:
        """Count steps; beyond `typical_seconds`, the work of a warm-up or stalled step made no progress."""
        for step in steps:
            self.steps += 1
            for name in _TOTALS:
                amount = getattr(step, name)
                if amount is not None:
                    self.totals[name] = self.totals.get(name, 0) + amount
            if step.seconds is not None and step.work_seconds is not None:
                if step.is_watched:
                    self._add_watched(step.seconds, step.work_seconds, typical_seconds)
                    self._add_wait(step)
                    continue
                self.spend("train", step.seconds)
                if step.is_warm_up:
                    self.spend("warm_up", step.seconds)
                self._look_for_loss(step.work_seconds, typical_seconds, is_warm_up=step.is_warm_up)
            self._add_wait(step)

    def _add_wait(self, step: MeasuredStep) -> None:
        if step.input_wait_seconds is not None:
            self.spend("input_wait", step.input_wait_seconds)

    def _add_watched(self, seconds: float, work_seconds: float, typical: float | None) -> None:
        """A step that was counted as it ran: what it took beyond the typical one is time spent counting."""
        extra = 0.0 if typical is None else max(0.0, work_seconds - typical)
        self.spend("train", seconds - extra)
        self.spend("count", extra)

    def add_amounts(self, amounts: Mapping[str, int]) -> None:
        """Samples, tokens and FLOPs of a window, where they are not told step by step."""
        for name in _TOTALS:
            if name in amounts:
                self.totals[name] = self.totals.get(name, 0) + amounts[name]

    def _look_for_loss(self, work_seconds: float, typical: float | None, *, is_warm_up: bool) -> None:
        if is_warm_up:
            self._not_compared.append(work_seconds)
        elif (loss := loss_in_step(work_seconds, typical, is_warm_up=False)) is not None:
            self.spend(*loss)
        if typical is not None and self._not_compared:
            for waiting in self._not_compared:
                if (loss := loss_in_step(waiting, typical, is_warm_up=True)) is not None:
                    self.spend(*loss)
            self._not_compared.clear()

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Time outside steps; a phase without a metric of its own counts as pause."""
        self.spend(phase if phase in APART else "pause", seconds)

    def spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def tell_wall(self, unix_time: float) -> None:
        """Wall time is up to this moment."""
        if self.first_start_unix_time is not None:
            self.seconds["wall"] = unix_time - self.first_start_unix_time

    def values(self) -> dict[str, Number]:
        """The totals under the keys of `flopwatch.records.metrics`."""
        values: dict[str, Number] = {
            "total/steps": self.steps,
            **{f"total/{name}": total for name, total in self.totals.items()},
            **{f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()},
        }
        goodput = goodput_of(self.seconds)
        if goodput is not None:
            values["perf/goodput"] = goodput.share
            values["perf/goodput_percent"] = 100 * goodput.share
            values["time/productive_seconds"] = goodput.productive_seconds
            values["time/other_seconds"] = goodput.lost_seconds["other"]
        return values

    def to_json(self) -> dict[str, Any]:
        state = {"steps": self.steps, "totals": dict(self.totals), "seconds": dict(self.seconds)}
        return state | {"first_start_unix_time": self.first_start_unix_time}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Ledger":
        first_start = state.get("first_start_unix_time")  # logs before goodput have none
        return cls(int(state["steps"]), dict(state["totals"]), dict(state["seconds"]), first_start)


# Where an earlier session of the same run left off.


class ResumePoint(NamedTuple):
    """The last step that counts, and the totals up to it.

    `is_estimated` tells that a window of several ranks had to be cut: the log has each step of the logging rank, but of
    all ranks only the window.
    """

    step: int
    ledger: Ledger
    is_estimated: bool = False


class LastSign(NamedTuple):
    """The newest record of an earlier session: when it was, and the totals by then."""

    unix_time: float
    ledger: Ledger


def find_resume_point(log: Path, first_step: int) -> ResumePoint | None:
    """What was logged before `first_step`; None when the run starts afresh.

    A training that goes back to a checkpoint runs steps again: what was logged of them does not count twice. Where the
    checkpoint lies inside a window, its first steps are taken from the window's columns.
    """
    if first_step <= 1 or not log.is_file():
        return None
    later: Mapping[str, Any] | None = None
    for row in rows_from_end(log):
        if row["step"] < first_step and row.get("ledger"):
            ledger = Ledger.from_json(row["ledger"])
            window = _steps(later)
            rest = [step for step in window if row["step"] < step.step < first_step]
            typical = typical_seconds([s.work_seconds for s in window if s.work_seconds and not s.is_warm_up])
            of_all_ranks = later.get("all_ranks") if later is not None and rest else None
            if of_all_ranks:
                ledger.add_amounts(_share_of_window(of_all_ranks, window, rest))
                unknown: dict[str, Any] = dict.fromkeys(of_all_ranks)
                rest = [step._replace(**unknown) for step in rest]
            ledger.add_steps(rest, typical)
            return ResumePoint(rest[-1].step if rest else row["step"], ledger, bool(of_all_ranks))
        later = row
    return None


def _share_of_window(
    of_all_ranks: Mapping[str, int], window: Sequence[MeasuredStep], rest: Sequence[MeasuredStep]
) -> dict[str, int]:
    """The first steps' part of what all ranks did, as the logging rank's own steps divide it."""
    shares: dict[str, int] = {}
    for name, total in of_all_ranks.items():
        own, own_rest = (sum(getattr(step, name) or 0 for step in steps) for steps in (window, rest))
        if own:
            shares[name] = round(Fraction(total * own_rest, own))
    return shares


def find_last_sign(log: Path) -> LastSign | None:
    """What the sessions before wrote last, also of steps that are run again; None when there is nothing of use."""
    newest: dict[str, Any] | None = None
    for record in _timed_records(log):
        newest = newest or record
        if record.get("ledger"):
            return _as_sign(newest, Ledger.from_json(record["ledger"]), log)
    return None


def continue_times(ledger: Ledger, last: LastSign | None, session_start_unix_time: float) -> float:
    """Book what lies between the earlier session and this one: steps run again, and the time nobody was there.

    Args:
        ledger: The totals at the step the run resumes after; its times become those the session begins with.
        last: What the log has last. One of another run, or older than the ledger itself, is not used.
        session_start_unix_time: When this process started.

    Returns:
        When this session's time begins: not before the earlier one ended, which may have been in the same process.
    """
    sign = _later_of(_own_sign(ledger), last, ledger.first_start_unix_time)
    if sign is None:
        return session_start_unix_time
    ledger.first_start_unix_time = sign.ledger.first_start_unix_time
    ledger.seconds = carried_seconds(ledger.seconds, sign.ledger.seconds)
    begins = max(session_start_unix_time, sign.unix_time)
    ledger.spend("restart", begins - sign.unix_time)
    return begins


def is_same_job(log: Path, environment: Mapping[str, Any]) -> bool:
    """Whether torchelastic has restarted the job that wrote the log's last session.

    A job killed before its first checkpoint starts at step 0 again; only torchelastic can tell that from a new run.
    """
    now = environment.get("torchelastic")
    if not now or not now["restart_count"] or not log.is_file():
        return False
    start = next((record for record in _timed_records(log) if record["type"] == "run"), {})
    before = start.get("environment", {}).get("torchelastic")
    # The agent outlives its workers; the id alone is "none" for every job that was not given one.
    same = before and all(before[name] == now[name] for name in ("run_id", "agent_pid"))
    return bool(same and before["restart_count"] < now["restart_count"])


def _own_sign(ledger: Ledger) -> LastSign | None:
    wall, first_start = ledger.seconds.get("wall"), ledger.first_start_unix_time
    return None if wall is None or first_start is None else LastSign(first_start + wall, ledger)


def _later_of(own: LastSign | None, last: LastSign | None, first_start_unix_time: float | None) -> LastSign | None:
    is_same_run = last is not None and first_start_unix_time in (None, last.ledger.first_start_unix_time)
    if last is None or not is_same_run:
        return own
    return last if own is None or last.unix_time >= own.unix_time else own


def _as_sign(newest: Mapping[str, Any], ledger: Ledger, log: Path) -> LastSign:
    """Its moment is on the clock of its times, where it tells the wall time."""
    is_summary = newest["type"] == "summary"
    if is_summary:  # phases after the last row
        ledger.seconds |= _seconds_in(newest["values"])
    tells_wall = "time/wall_seconds" in newest["values"] if is_summary else bool(newest.get("ledger"))
    own = _own_sign(ledger) if tells_wall else None
    if ledger.first_start_unix_time is None:  # a log from before goodput: its first record is as near as it gets
        starts = read_around(log).starts
        ledger.first_start_unix_time = starts[0].unix_time if starts else None
    return own or LastSign(newest["unix_time"], ledger)


def _seconds_in(values: Mapping[str, Any]) -> dict[str, float]:
    names = ("train", "input_wait", "warm_up", "wall", *LOST)
    return {name: values[f"time/{name}_seconds"] for name in names if f"time/{name}_seconds" in values}


def _timed_records(log: Path) -> Iterator[dict[str, Any]]:
    """Sessions, rows and summaries, newest first."""
    if not log.is_file():
        return
    for line in lines_from_end(log):
        try:
            record = parse_object(line)
        except TornLineError:
            continue
        if record.get("type") in ("run", "row", PARTIAL_ROW, "summary"):
            yield record


def _steps(row: Mapping[str, Any] | None) -> list[MeasuredStep]:
    columns = dict(row["steps"]) if row is not None else {}
    columns["is_warm_up"] = columns.pop("warm_up", [False] * len(columns.get("step", ())))
    names = [name for name in columns if name in MeasuredStep._fields]
    return [
        MeasuredStep(**dict(zip(names, cells, strict=True)))
        for cells in zip(*(columns[name] for name in names), strict=True)
    ]

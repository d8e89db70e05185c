"""One start of a run: what it takes over from earlier ones, and when it began."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock
from flopwatch.errors import FlopwatchError
from flopwatch.goodput import APART
from flopwatch.monitor import notices
from flopwatch.monitor.ledger import Ledger
from flopwatch.monitor.notices import Tell
from flopwatch.monitor.resume import ResumePoint, continue_times, find_last_sign, find_resume_point, is_same_job
from flopwatch.monitor.rows import RowMaker
from flopwatch.monitor.step_clock import StepClock
from flopwatch.monitor.wall_clock import WallClock

_OF_NO_USE = (FlopwatchError, OSError, ValueError, KeyError)
"""What reading a log can raise."""


class Session:
    """Continues the ledger of a log or a checkpoint, and books the time until the first step.

    Attributes:
        resumed_after: The last step whose totals were taken over; None for a fresh start.
        unix_time: What time it is.
    """

    def __init__(self, log_path: Path, clock: Clock, rows: RowMaker, tell: Tell) -> None:
        self._log_path = log_path
        self._clock = clock
        self._rows = rows
        self._tell = tell
        self._wall_clock = WallClock(clock)
        self.unix_time: Callable[[], float] = self._wall_clock.unix_time
        rows.unix_time = self.unix_time
        self._began_unix_time = self._wall_clock.session_start_unix_time
        self._carried_seconds: dict[str, float] = {}
        self.resumed_after: int | None = None

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the totals of a checkpoint."""
        self._continue_from(Ledger.from_json(state["ledger"]))
        self.resumed_after = state.get("ledger_step", state["step"])

    def begin(self, first_step: int, environment: Mapping[str, Any], step_clock: StepClock) -> None:
        """The first step has been seen. A log that knows more than the checkpoint is preferred."""
        if self.resumed_after is None or self.resumed_after + 1 < first_step:
            self._resume_from_log(first_step, environment)
        ledger = self._rows.ledger
        if self.resumed_after is None and ledger.first_start_unix_time is None:
            ledger.first_start_unix_time = self._began_unix_time
        began = self._clock() if step_clock.first_step_began is None else step_clock.first_step_began
        seconds = self._wall_clock.at(began) - self._began_unix_time - step_clock.seconds_before_first_step
        ledger.spend("start_up", max(seconds, 0.0))
        ledger.tell_wall(self._wall_clock.at(began))

    def _continue_from(self, ledger: Ledger) -> None:
        """Take over an earlier session's totals; phases of this one that are already booked stay booked."""
        booked, before = self._rows.ledger.seconds, self._carried_seconds
        try:
            sign = find_last_sign(self._log_path)
        except _OF_NO_USE:  # the totals are worth more than the time lost since
            sign = None
        self._began_unix_time = continue_times(ledger, sign, self._wall_clock.session_start_unix_time)
        self._wall_clock.go_on_from(self._began_unix_time)
        self._carried_seconds = dict(ledger.seconds)
        for phase, seconds in booked.items():
            if phase in APART:
                ledger.add_seconds(phase, seconds - before.get(phase, 0.0))
        self._rows.ledger = ledger

    def _resume_from_log(self, first_step: int, environment: Mapping[str, Any]) -> None:
        try:
            point = find_resume_point(self._log_path, first_step)
            if point is not None and (self.resumed_after is None or point.step > self.resumed_after):
                self._continue_at(point, first_step)
            elif self.resumed_after is None and is_same_job(self._log_path, environment):
                self._continue_from(Ledger())
        except _OF_NO_USE as error:
            self._tell(*notices.log_not_resumed(self._log_path, error))
        if self.resumed_after is not None and self.resumed_after + 1 < first_step:
            self._tell(*notices.steps_lost(self.resumed_after, first_step))

    def _continue_at(self, point: ResumePoint, first_step: int) -> None:
        self._continue_from(point.ledger)
        self.resumed_after = point.step
        if point.is_estimated:
            self._tell(*notices.totals_estimated(first_step))

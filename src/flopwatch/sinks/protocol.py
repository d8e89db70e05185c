"""What a sink of a run and a tracking service for trials must be able to do.

Pass any object with the methods of `Sink` in `TrainingMonitor(sinks=[...])`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flopwatch.records.run import Record


class Sink(Protocol):
    """Takes the records of a run, in order, in its own thread.

    Every method may raise: the sink is then reported once, switched off and named in the summary. It may also be
    slow or hang: its queue is bounded, and only this sink loses rows.
    """

    name: str

    def write(self, record: Record) -> None:
        """Take one record. The first is always a `RunStart`."""

    def flush(self) -> None:
        """Write out what is buffered; called after each group of rows, on request, and at the end."""

    def close(self) -> None:
        """Called once, after the last record."""


MOST_FAILURES = 3
"""Consecutive failures after which the service counts as unreachable, and the remaining trials are not tried."""


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial of a sweep as a run of a tracking service.

    Attributes:
        id: Stable for this trial of this sweep, so that logging it again updates the same run.
        name: The trial's name.
        sweep: The sweep's name, by which its runs are grouped.
        sweep_id: Stable for the sweep, even if its folder is moved.
        config: The trial's settings, as JSON.
        figures: Measured numbers by column name; unknown is None.
        facts: Texts by column name: outcome, reason, host, device, versions.
        state: `finished`, `failed` (it could be run again) or `killed`.
        start_unix_seconds: When it began; None when it did not run.
        end_unix_seconds: When it ended.
    """

    id: str
    name: str
    sweep: str
    sweep_id: str
    config: Mapping[str, Any]
    figures: Mapping[str, float | None]
    facts: Mapping[str, str]
    state: str
    start_unix_seconds: float | None
    end_unix_seconds: float | None


class TrialLog(Protocol):
    """A service that trials are logged to."""

    name: str

    def log(self, run: TrialRun) -> None:
        """Create the run, or update it; may raise."""


@dataclass(frozen=True, slots=True)
class Logged:
    """The outcome of logging trials.

    Attributes:
        count: Trials that were logged.
        failures: One text for each trial that could not be logged.
        gave_up: True if the remaining trials were not tried after `MOST_FAILURES` failures in a row.
    """

    count: int
    failures: tuple[str, ...]
    gave_up: bool


def log_trials(runs: Iterable[TrialRun], to: TrialLog) -> Logged:
    """Log trials one after the other; a trial that cannot be logged does not affect the others."""
    count, in_a_row, failures = 0, 0, []
    for run in runs:
        try:
            to.log(run)
        except Exception as error:
            failures.append(f"{run.name}: {str(error) or type(error).__name__}")
            in_a_row += 1
            if in_a_row == MOST_FAILURES:
                return Logged(count, tuple(failures), gave_up=True)
        else:
            count, in_a_row = count + 1, 0
    return Logged(count, tuple(failures), gave_up=False)

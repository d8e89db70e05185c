"""What a sink is. Pass any object of this shape in `TrainingMonitor(sinks=[...])`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flopwatch.records.run import Record


class Sink(Protocol):
    """Takes the records of a run, in order, in a thread of its own.

    Every method may raise: the sink is then reported once, switched off, and named in the summary. It may also be
    slow or hang: its queue is bounded, and only this sink loses rows.
    """

    name: str

    def write(self, record: Record) -> None:
        """Take one record. The first is always a `RunStart`."""

    def flush(self) -> None:
        """Hand on what is buffered; called when rows have gathered for a while, when asked, and at the end."""

    def close(self) -> None:
        """Called once, after the last record."""


# A trial of a sweep as a run of a tracking service, and what such a service must be able to do.


MOST_FAILURES = 3
"""In a row; then the service is taken to be away, and the rest is not tried."""


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One trial.

    Attributes:
        id: The same whenever this trial of this sweep is logged, so that a second time updates the same run.
        name: Of the trial.
        sweep: Name of the sweep: the group of its runs.
        sweep_id: The same for all trials of the sweep, wherever its folder lies.
        config: What was asked for, as JSON.
        figures: Measured numbers by the columns' names; None is not known.
        facts: Text by the columns' names: outcome, reason, host, device, versions.
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
    """Where trials are logged to."""

    name: str

    def log(self, run: TrialRun) -> None:
        """Make the run, or bring it up to date; may raise."""


@dataclass(frozen=True, slots=True)
class Logged:
    """Attributes:
    count: Trials that were logged.
    failures: What went wrong, in the order it did.
    gave_up: So many went wrong in a row that the rest was not tried.
    """

    count: int
    failures: tuple[str, ...]
    gave_up: bool


def log_trials(runs: Iterable[TrialRun], to: TrialLog) -> Logged:
    """Log them one after the other. One that cannot be logged does not keep the others from it."""
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

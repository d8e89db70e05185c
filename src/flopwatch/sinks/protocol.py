"""The interfaces of a sink, which takes the records of a run, and of a tracking service, which takes trials.

Pass any object with the methods of `Sink` in `TrainingMonitor(sinks=[...])`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flopwatch.records.run import Record


class Sink(Protocol):
    """Takes the records of a run in order. flopwatch calls each sink in a thread of its own.

    Every method may raise: flopwatch then reports the error once, switches the sink off and names it in the summary. A
    method may also be slow or hang: the queue of the sink is bounded, so only this sink loses rows.
    """

    name: str

    def write(self, record: Record) -> None:
        """Take one record. The first is always a `RunStart`."""

    def flush(self) -> None:
        """Write buffered records; called after each group of rows, when the monitor is flushed, and at the end."""
        return  # a class that inherits this has nothing in a buffer

    def close(self) -> None:
        """Called once, after the last record."""


MOST_FAILURES = 3
"""After this many failures in a row, the remaining trials are not logged, because the service is probably down."""


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial of a sweep as a run of a tracking service.

    Attributes:
        id: The same whenever the trial is logged, so that logging it again updates its run.
        sweep: The sweep's name, which groups its runs.
        sweep_id: The same for all trials of the sweep, even if its folder is moved.
        config: The trial's settings, as JSON.
        figures: Measured numbers by column name; unknown is None.
        facts: Texts by column name: outcome, reason, host, device, versions.
        state: `finished`, `failed` or `killed`.
        start_unix_seconds: When the trial began; None if it did not run.
        end_unix_seconds: When the trial ended; None if unknown.
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
    """A tracking service for trials, such as W&B or MLflow."""

    name: str

    def log(self, run: TrialRun) -> None:
        """Create the run, or update it; may raise."""


@dataclass(frozen=True, slots=True)
class Logged:
    """The outcome of logging trials.

    Attributes:
        count: Trials that were logged.
        failures: One text for each trial that could not be logged.
        gave_up: True if the remaining trials were skipped after `MOST_FAILURES` failures in a row.
    """

    count: int
    failures: tuple[str, ...]
    gave_up: bool


def log_trials(runs: Iterable[TrialRun], to: TrialLog) -> Logged:
    """Log trials one after the other. A trial that cannot be logged does not stop the others."""
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

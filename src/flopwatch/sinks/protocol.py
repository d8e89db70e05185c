"""What a sink of a run and a tracking service for trials must be able to do.

Pass any object with the methods of `Sink` in `TrainingMonitor(sinks=[...])`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from flopwatch.errors import InputError
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


# Makes sinks from names, from `module:Class`, or takes ready-made objects.


SINK_NAMES = ("console", "tensorboard", "wandb", "mlflow", "prometheus")


def build_sinks(
    wanted: Sequence[str | Sink], output_dir: Path, options: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Sink], dict[str, str]]:
    """Make the wanted sinks. Nothing is opened yet: a sink does that at its first record, in its thread.

    >>> sinks, failures = build_sinks(["console", "prometheus"], Path("outputs"), {"console": {}})
    >>> [sink.name for sink in sinks]
    ['console']
    >>> failures
    {'prometheus': "no port was given; pass one, such as options={'prometheus': {'port': 9477}}"}

    Args:
        wanted: Names of `SINK_NAMES`, `module:Class`, or objects with the methods of `Sink`.
        output_dir: The run's folder; sinks that write files put them there.
        options: Keyword arguments of the sinks made here, by the name in `wanted`.

    Returns:
        The sinks, and for each that could not be made the reason.

    Raises:
        InputError: There is no sink with that name.
    """
    sinks: list[Sink] = []
    failures: dict[str, str] = {}
    for want in wanted:
        if not isinstance(want, str):
            sinks.append(_checked(want))
            continue
        if want not in SINK_NAMES and ":" not in want:
            raise InputError(
                f"there is no sink {want!r}; use one of {', '.join(SINK_NAMES)}, a class as 'module:Class', or an "
                "object with the methods of flopwatch.sinks.protocol.Sink"
            )
        try:
            sinks.append(_make(want, output_dir, options.get(want, {})))
        except Exception as error:
            failures[want] = str(error) or type(error).__name__
    return sinks, failures


def _make(name: str, output_dir: Path, options: Mapping[str, Any]) -> Sink:
    """Loads only the module of the wanted sink; the sink loads its tracker's package at its first record."""
    if name == "console":
        from flopwatch.sinks.console import ConsoleSink

        return ConsoleSink(**options)
    if name == "tensorboard":
        from flopwatch.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(**{"log_dir": output_dir / "tensorboard", **options})
    if name == "wandb":
        from flopwatch.sinks.wandb import WandbSink

        return WandbSink(**{"output_dir": output_dir, **options})
    if name == "mlflow":
        from flopwatch.sinks.mlflow import MlflowSink

        return MlflowSink(**{"output_dir": output_dir, **options})
    if name == "prometheus":
        from flopwatch.sinks.prometheus import PrometheusSink

        if (
            "port" not in options
        ):  # no default, because 9400 and the next ports belong to other exporters of GPU machines
            raise InputError("no port was given; pass one, such as options={'prometheus': {'port': 9477}}")
        return PrometheusSink(**options)
    module, _, class_name = name.partition(":")
    return _checked(getattr(import_module(module), class_name)(**options))


def _checked(sink: Any) -> Sink:
    missing = [method for method in ("write", "flush", "close") if not callable(getattr(sink, method, None))]
    if missing or not isinstance(getattr(sink, "name", None), str):
        raise InputError(
            f"{sink!r} is no sink: it lacks {', '.join(missing) or 'a name'}; see flopwatch.sinks.protocol.Sink"
        )
    return cast("Sink", sink)

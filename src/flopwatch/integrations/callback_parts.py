"""What the callbacks share: they own a monitor, catch errors, and replace methods on one object."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, TypeVar

from flopwatch.guard import Guard
from flopwatch.monitor.run import MonitoredRun
from flopwatch.monitor.training_monitor import TrainingMonitor, act_on_run, newest_row
from flopwatch.records.metrics import find_metric
from flopwatch.records.run import Number

_log = logging.getLogger("flopwatch")

Method = TypeVar("Method", bound=Callable[..., Any])


def harmless(method: Method) -> Method:
    """Decorate a method so that it logs its first exception and raises none; if `self.strict` is true, it raises all.

    >>> class Callback:
    ...     strict = False
    ...     @harmless
    ...     def on_step_end(self):
    ...         return 1 / 0
    >>> Callback().on_step_end() is None
    True
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        def failed(part: str, error: Exception) -> None:
            if getattr(self, "strict", False):
                raise error
            reported = vars(self).setdefault("_flopwatch_reported_parts", set())
            if part not in reported:
                reported.add(part)
                _log.error("flopwatch: %s failed, the training continues: %s: %s", part, type(error).__name__, error)
                _log.debug("flopwatch: the traceback of the error in %s", part, exc_info=error)

        with Guard(method.__name__, failed):
            return method(self, *args, **kwargs)
        return None

    return guarded  # type: ignore[return-value]


def replace_method(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method on one object, not on its class. Returns a function that restores the original method.

    `around` gets the original method and the arguments of each call. If other code has replaced the method since then,
    the method is not restored. That code still calls our replacement, which must therefore work after the training too.

    >>> class Trainer:
    ...     def training_step(self):
    ...         return 1
    >>> trainer = Trainer()
    >>> put_back = replace_method(trainer, "training_step", lambda original: original() + 1)
    >>> trainer.training_step(), Trainer().training_step()
    (2, 1)
    >>> put_back()
    >>> vars(trainer)
    {}
    """
    original, own = getattr(owner, name), {name: vars(owner)[name]} if name in vars(owner) else {}

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replacement)

    def put_back() -> None:
        if vars(owner).get(name) is replacement:
            delattr(owner, name)
            vars(owner).update(own)

    return put_back


_folders: dict[Path, list[Path]] = {}
"""Folders of the runs of this process, by the folder that was wanted."""


def _folder_of_run(wanted: Path, *, is_new: bool) -> Path:
    """A folder for each training of this process; one that continues from a checkpoint takes the newest of them."""
    here = wanted.absolute()
    runs = _folders.setdefault(here, [])
    if is_new or not runs:
        used = {folder for each in _folders.values() for folder in each}
        numbered = (here.with_name(f"{here.name}-{number}") for number in count(2))
        runs.append(next(folder for folder in chain([here], numbered) if folder not in used))
    return wanted if runs[-1] == here else runs[-1]


Selection = Literal["none", "basic", "all"]


class MonitorOwner:
    """The part of a callback that makes a monitor when a training begins, and closes it when the training ends."""

    def __init__(self, output_dir: str | Path | None, metrics: Selection, monitor_options: dict[str, Any]) -> None:
        self._output_dir, self._metrics, self._monitor_options = output_dir, metrics, monitor_options
        self._put_back: list[Callable[[], None]] = []
        self.strict = bool(monitor_options.get("strict"))
        self.monitor: TrainingMonitor | None = None
        self._given_step: int | None = None
        """Last step of the row whose values the framework was given."""

    def _begin(
        self, folder: str | Path, max_steps: int, log_every: int | None, *, is_new: bool, **own: Any
    ) -> TrainingMonitor:
        own["output_dir"] = _folder_of_run(Path(self._output_dir or Path(folder) / "flopwatch"), is_new=is_new)
        own["total_steps"] = max_steps if max_steps > 0 else None
        if log_every:
            own["log_every"] = log_every
        self.monitor, self._given_step = TrainingMonitor(**(own | self._monitor_options)), None
        self.strict = self.strict or self.monitor.config.strict
        act_on_run(self.monitor, "console", _leave_rows_to_framework)
        self.monitor.says_what_was_not_given(False)  # the callbacks have clearer words for what is missing
        return self.monitor

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method until the training ends."""
        self._put_back.append(replace_method(owner, name, around))

    def _end_window(self, *, wait: bool, **last_values: Any) -> dict[str, float]:
        """End the window where the framework logs a row. Returns the values of the newest row, each row once.

        With several ranks, the values of a window arrive after its row was logged, so these are of the window before.
        """
        if self.monitor is None:
            return {}
        self.monitor.log_now(wait=wait, **last_values)
        step, values = newest_row(self.monitor)
        if step == self._given_step:
            return {}
        self._given_step = step
        return framework_metrics(values, self._metrics)

    def _is_alone(self, callbacks: Iterable[Any], kind: type) -> bool:
        return not any(isinstance(other, kind) and other is not self for other in callbacks)

    @harmless
    def begin_wait(self) -> bool:
        """Begin to time the fetch of a batch. Returns False if the monitor does not time this fetch."""
        return self.monitor is not None and bool(self.monitor.begin_wait())

    @harmless
    def end_wait(self, *, has_batch: bool = True) -> None:
        """End a fetch for which `begin_wait` returned True; `has_batch` is False if no batch was left."""
        if self.monitor is not None:
            self.monitor.end_wait(has_batch=has_batch)

    @harmless
    def end(self) -> None:
        """Restore the trainer's methods and close the monitor."""
        while self._put_back:
            self._put_back.pop()()
        if self.monitor is not None:
            self.monitor.close()


def _leave_rows_to_framework(run: MonitoredRun) -> None:
    """Print no rows, because the framework prints our values. With several ranks, these are too late for its rows."""
    if run.rows.layout.world_size == 1:
        run.outlets.print_no_rows()


_GROUPS = ("perf", "counters", "total", "time", "ranks")
"""Groups of metrics for the framework's log; not `training`, because the framework logs loss and learning rate."""


def framework_metrics(values: Mapping[str, Number], selection: Selection) -> dict[str, float]:
    """The values to add to a log row of the framework, as floats, because FLOPs can exceed a 64-bit integer.

    >>> framework_metrics({"training/loss": 2.0, "perf/mfu": 0.4, "total/model_flops": 10**21}, "basic")
    {'perf/mfu': 0.4}
    """
    metrics = {key: find_metric(key) for key in values}
    return {
        key: float(values[key])
        for key, metric in metrics.items()
        if key.partition("/")[0] in _GROUPS and (selection == "all" or (selection == "basic" and metric.basic))
    }

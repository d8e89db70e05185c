"""Helpers of the callbacks: they catch errors, replace methods on one object, and time the fetching of batches."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

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
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if getattr(self, "strict", False):
                raise
            _report_once(self, method.__name__, error)
            return None

    return guarded  # type: ignore[return-value]


def _report_once(owner: Any, part: str, error: Exception) -> None:
    reported = vars(owner).setdefault("_flopwatch_reported_parts", set())
    if part not in reported:
        reported.add(part)
        _log.error("flopwatch: %s failed, the training continues: %s: %s", part, type(error).__name__, error)
        _log.debug("flopwatch: the traceback of the error in %s", part, exc_info=error)


_ABSENT = object()


def replace_method(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a method on one object, not on its class. Returns a function that restores the original method.

    `make` takes the original method and returns the replacement. If other code has replaced the method since then,
    the method is not restored. That code still calls our replacement, which must therefore work after the training too.

    >>> class Trainer:
    ...     def training_step(self):
    ...         return 1
    >>> trainer = Trainer()
    >>> put_back = replace_method(trainer, "training_step", lambda original: lambda: original() + 1)
    >>> trainer.training_step(), Trainer().training_step()
    (2, 1)
    >>> put_back()
    >>> vars(trainer)
    {}
    """
    original = getattr(owner, name)
    before = vars(owner).get(name, _ABSENT)
    replacement = functools.wraps(original)(make(original))
    setattr(owner, name, replacement)

    def put_back() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return put_back


class FetchTimer:
    """Measures how long the framework takes to fetch a batch. An error in the measurement does not stop the fetch."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self.strict = callback.strict

    @harmless
    def begin_wait(self) -> bool:
        """Begin to time a fetch. Returns False if the monitor does not time this fetch."""
        monitor = self._callback.monitor
        return monitor is not None and bool(monitor.begin_wait())

    @harmless
    def end_wait(self, *, has_batch: bool = True) -> None:
        """End a fetch for which `begin_wait` returned True; `has_batch` is False if no batch was left."""
        if self._callback.monitor is not None:
            self._callback.monitor.end_wait(has_batch=has_batch)


Selection = Literal["none", "basic", "all"]

_GROUPS = ("perf", "total", "time", "ranks")
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

"""Which of our numbers go into a framework's own log rows."""

from collections.abc import Mapping
from typing import Literal

from flopwatch.metrics import find_metric
from flopwatch.run_records import Number

Selection = Literal["basic", "all"]

_GROUPS = ("perf", "total", "time", "ranks")
"""The framework logs loss and learning rate itself."""


def framework_metrics(values: Mapping[str, Number], selection: Selection) -> dict[str, float]:
    """What to add to a row; floats, because totals of FLOPs outgrow the integers of most trackers.

    >>> framework_metrics({"training/loss": 2.0, "perf/mfu": 0.4, "total/model_flops": 10**21}, "basic")
    {'perf/mfu': 0.4}
    """
    metrics = {key: find_metric(key) for key in values}
    return {
        key: float(values[key])
        for key, metric in metrics.items()
        if key.partition("/")[0] in _GROUPS and (metric.basic or selection == "all")
    }

"""The evidence and the advice of a loss, in the words of `flopwatch.records.time_uses`."""

import shlex
from collections.abc import Mapping
from typing import Any

from flopwatch.numbers import duration, percent, step_time
from flopwatch.records.time_uses import Use
from flopwatch.text import one_line


def text_of(use: Use, seconds: float, wall_seconds: float, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The evidence and the advice of a loss, each as one sentence."""
    if seconds < 0:  # only `below_peak` can be, if the peak is too low
        return f"At this peak, the executed FLOPs take {duration(-seconds)} more than the steps took.", _TOO_LOW
    steps, tokens, real_tokens = facts["steps"], facts["tokens"], facts["real_tokens"]
    each = f" ({step_time(seconds / steps)} per step)" if steps and use.in_steps else ""
    evidence = f"{duration(seconds)} of {duration(wall_seconds)}{each} {use.measured}"
    if use.key == "padding" and tokens and real_tokens is not None:
        evidence += f"; {percent(1 - real_tokens / tokens)} of all tokens are padding"
    if use.key == "straggler" and facts["straggler"] is not None:
        evidence += f"; in the newest row it is rank {facts['straggler']}"
    advice = use.advice.replace("{path}", in_shell(facts["path"]))
    if use.key in ("idle", "below_peak") and not facts["times_passes"]:
        advice = f"{MEASURE_WAIT} {advice}"
    return f"{evidence}.", advice


MEASURE_WAIT = (
    "To measure the input wait, pass the batches of a TrainingMonitor through monitor.batches(), or fetch them in "
    "`with monitor.input_wait():`."
)
_TOO_LOW = "Check the peak with `flopwatch peak`, or pass peak_flops_per_s."


def in_shell(path: str) -> str:
    """A path as it is typed in a shell, on one line.

    >>> in_shell("runs/a"), in_shell("my runs/a")
    ('runs/a', "'my runs/a'")
    """
    return shlex.quote(one_line(path))

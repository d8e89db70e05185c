"""What was not the same in two runs, and which numbers that touches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flopwatch.run_log import RunLog

_ALL = "every number"
_FLOPS = "MFU and HFU"
_SPEED = "speed"


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact about the runs that is not the same.

    Attributes:
        what: The fact.
        a: In run A; None when its log does not say.
        b: In run B.
        touches: Which numbers cannot be compared, or only with care.
    """

    what: str
    a: Any
    b: Any
    touches: str


def find_differences(a: RunLog, b: RunLog) -> tuple[Difference, ...]:
    """Those that matter to the numbers, the gravest first. What neither log says is not listed."""
    found = [(what, read(a), read(b), touches) for what, read, touches in _FACTS]
    return tuple(Difference(what, in_a, in_b, touches) for what, in_a, in_b, touches in found if in_a != in_b)


def _provenance(name: str) -> Callable[[RunLog], Any]:
    """As it stood at the end: while a run begins, not everything is found yet."""
    return lambda log: getattr(log.provenances[-1], name) if log.provenances else None


def _peak(name: str) -> Callable[[RunLog], Any]:
    def read(log: RunLog) -> Any:
        peak = _provenance("peak")(log)
        return None if peak is None else peak.get(name)

    return read


def _environment(name: str) -> Callable[[RunLog], Any]:
    return lambda log: log.starts[-1].environment.get(name) if log.starts else None


def _device(log: RunLog) -> Any:
    return _peak("device")(log) or _environment("device")(log)


def _dtype(log: RunLog) -> Any:
    configured = log.starts[-1].config.get("dtype") if log.starts else None
    return _peak("dtype")(log) or configured


def _world_size(log: RunLog) -> int | None:
    return log.starts[-1].world_size if log.starts else None


def _exact(log: RunLog) -> bool | None:
    """What the last row says of its FLOPs; of a log without such rows, what was said of the count."""
    told = [row.exact for row in log.rows if row.exact is not None]
    if told:
        return told[-1]
    count: bool | None = _provenance("exact")(log)
    return count


def _law(log: RunLog) -> str | None:
    """Its terms in one line, so that two can be told apart on a screen; None where shapes are counted one by one."""
    phases = _provenance("law")(log) or {}
    terms = [f"{each} x {name}" for name, each in phases.get("forward", {}).items() if each not in ("0", "0.0")]
    return " + ".join(terms) or None


_FACTS: tuple[tuple[str, Callable[[RunLog], Any], str], ...] = (
    ("device", _device, _ALL),
    ("world size", _world_size, _ALL),
    ("devices per process", _provenance("device_count"), _ALL),
    ("dtype", _dtype, _ALL),
    ("peak FLOP/s", _peak("flops_per_s"), _FLOPS),
    ("peak is", _peak("kind"), _FLOPS),
    ("forward FLOPs", _law, _ALL),
    ("attention", _provenance("attention"), _FLOPS),
    ("mode", _provenance("mode"), _FLOPS),
    ("method", _provenance("method"), _FLOPS),
    ("exact", _exact, _FLOPS),
    ("coverage", _provenance("coverage"), _FLOPS),
    ("host", _environment("host"), _SPEED),
    ("threads", _environment("threads"), _SPEED),
    ("torch", _environment("torch"), _SPEED),
    ("flopwatch", _environment("flopwatch"), _FLOPS),
)

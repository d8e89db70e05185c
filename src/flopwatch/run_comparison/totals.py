"""What two runs add up to. No verdict: how long a run goes on says nothing about its speed."""

from typing import Literal

from flopwatch.run_log import RunLog
from flopwatch.run_records import Number

TOTALS: tuple[tuple[str, str, Literal["%", "steps", "tokens", "FLOP", "duration"]], ...] = (
    ("perf/goodput_percent", "goodput", "%"),
    ("total/steps", "steps in all", "steps"),
    ("total/tokens", "tokens in all", "tokens"),
    ("total/model_flops", "model FLOPs in all", "FLOP"),
    ("time/train_seconds", "time in steps", "duration"),
)


def total(log: RunLog, key: str) -> Number | None:
    """As the run itself has added it up, at its end or at the newest row that tells."""
    if log.summary is not None and key in log.summary.values:
        return log.summary.values[key]
    group, _, name = key.partition("/")
    for row in reversed(log.rows):
        if key in row.values:
            return row.values[key]
        in_ledger = _from_ledger(row.ledger, group, name)
        if in_ledger is not None:
            return in_ledger
    return None


def _from_ledger(ledger: object, group: str, name: str) -> Number | None:
    if not isinstance(ledger, dict) or not ledger:
        return None
    if name == "steps":
        return ledger.get("steps")
    part = ledger.get("totals" if group == "total" else "seconds", {})
    found: Number | None = part.get(name.removesuffix("_seconds"))
    return found


def recompute_percent(log: RunLog) -> float | None:
    """Over the rows that tell it (the detailed ones), each by its executed FLOPs."""
    shares = [
        (row.values["perf/recompute_percent"], sum(filter(None, row.steps.get("hardware_flops", ()))))
        for row in log.rows
        if "perf/recompute_percent" in row.values
    ]
    executed = sum(flops for _, flops in shares)
    return sum(share * flops for share, flops in shares) / executed if executed else None

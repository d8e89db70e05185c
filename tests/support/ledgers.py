"""Logs of runs whose times are given, for tests of waterfalls: one start, one provenance, one row."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from flopwatch.records.run import Provenance, Record, Row, RunStart
from flopwatch.runs import RunLog
from support.make_run_log import PEAK, write_log

CPU = {
    "flops_per_s": 3.2e11,
    "device": "Xeon",
    "dtype": "fp32",
    "source": "2 cores x 2.5 GHz",
    "kind": "derived",
    "confidence": "low",
    "fraction": 1.0,
}


def records_of(
    seconds: dict[str, float],
    *,
    steps: int = 1000,
    exact: bool | None = True,
    notes: tuple[str, ...] = (),
    peak: dict | None = PEAK,
    achievable: float | None = None,
    tokens: int | None = None,
    real_tokens: int | None = None,
    environment: Mapping[str, object] = MappingProxyType({"device": "cuda"}),
) -> list[Record]:
    totals = {"tokens": tokens, "real_tokens": real_tokens}
    ledger = {
        "steps": steps,
        "totals": {name: amount for name, amount in totals.items() if amount is not None},
        "seconds": seconds,
    }
    return [
        RunStart("one", 1.0, "runs/one", environment=dict(environment)),
        Provenance(0, "smart", "trace", exact is True, "full", 1.0, peak=peak, achievable_flops_per_s=achievable),
        Row(steps, 2.0, {}, ledger=ledger, exact=exact, notes=notes),
    ]


def log_of(seconds: dict[str, float], **more) -> RunLog:
    start, provenance, row = records_of(seconds, **more)
    return RunLog(Path("runs/one/training_log.jsonl"), (start,), (provenance,), (row,))


def write_ledger(folder: Path, seconds: dict[str, float], **more) -> str:
    """Write the log of a run with these times; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_log(folder / "training_log.jsonl", records_of(seconds, **more))
    return str(folder)

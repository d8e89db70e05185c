"""Read a log as if another peak had been known when the run wrote it: one given by the user, or one measured later."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flopwatch.records.flops import Peak
from flopwatch.records.metrics import find_metric
from flopwatch.records.run import Notice, Number, Provenance, Record, Row, RunStart, Summary
from flopwatch.runs.reading import RunLog

_PEAK_UNKNOWN = "peak_unknown"
ChoosePeak = Callable[[RunStart | None, Provenance], Peak | None]
"""Returns the peak to use for a part of a run; None leaves it as it was logged."""


def override(flops_per_s: float) -> ChoosePeak:
    """The peak of a user who gives it after the run. As in a run, it counts for products of all compute types."""

    def choose(start: RunStart | None, provenance: Provenance) -> Peak:
        logged = provenance.peak or {}
        device = logged.get("device") or (start.environment.get("device_name") if start else None) or "this device"
        dtype = logged.get("dtype") or next(iter(provenance.dtypes), "any")
        return Peak(flops_per_s, str(device), str(dtype), "given by you", kind="override", confidence="high")

    return choose


class PeakGiver:
    """Changes the records of a run, in their order, to those that it would have logged with another peak."""

    def __init__(self, choose: ChoosePeak) -> None:
        self._choose = choose
        self._start: RunStart | None = None
        self._peak: Peak | None = None
        self._is_given = False
        self._newest: Mapping[str, Any] = {}
        """The newest totals. A summary has none of its own."""

    def __call__(self, record: Record) -> Record:
        if isinstance(record, RunStart):
            self._start = record
            return replace(record, ledger=self._with_times(record.ledger))
        if isinstance(record, Provenance):
            self._peak = self._choose(self._start, record)
            if self._peak is not None:
                self._is_given = True
                return replace(record, peak=self._peak.to_json(), achievable_flops_per_s=None)
        if self._peak is None:
            return record
        if isinstance(record, Row):
            return self.row(record)
        if isinstance(record, Summary):
            times = {f"time/{name}_seconds": value for name, value in self._at_peak(self._newest).items()}
            values = _without_times_at_peak(record.values)
            return replace(record, values={**values, **_shares_of(record.values, self._peak), **times})
        return record

    def is_out_of_date(self, notice: Notice) -> bool:
        """Whether a notice says that there is no MFU, which the peak that was given afterwards has changed."""
        return self._is_given and notice.code == _PEAK_UNKNOWN

    def row(self, row: Row) -> Row:
        if (peak := self._peak) is None:
            return row
        if row.ledger.get("steps", 0) >= self._newest.get("steps", 0):
            self._newest = row.ledger
        values = {**_without_times_at_peak(row.values), **_shares_of(row.values, peak)}
        if row.detailed:
            values |= {f"time/{name}_seconds": value for name, value in self._at_peak(row.ledger).items()}
        denominator = None if row.exact is None else {"dtype": peak.dtype, "flops_per_s": peak.flops_per_s}
        known = {key: value for key, value in values.items() if row.detailed or find_metric(key).basic}
        return replace(row, values=known, ledger=self._with_times(row.ledger), peak=denominator)

    def _with_times(self, ledger: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._peak is None or not ledger:
            return ledger
        return {**ledger, "seconds": {**_without_times_at_peak(ledger.get("seconds", {})), **self._at_peak(ledger)}}

    def _at_peak(self, ledger: Mapping[str, Any]) -> dict[str, float]:
        if self._peak is None or not ledger:
            return {}
        of_all_devices = self._peak.flops_per_s * (self._start.world_size if self._start else 1)
        return {f"{name}_at_peak": flops / of_all_devices for name, flops in ledger.get("timed_flops", {}).items()}


def _without_times_at_peak(times: Mapping[str, Number]) -> dict[str, Number]:
    """Times at the logged peak say nothing about another one, also where no FLOPs were logged to compute new ones."""
    return {name: value for name, value in times.items() if not name.removesuffix("_seconds").endswith("_at_peak")}


def with_peak(log: RunLog, choose: ChoosePeak | None) -> RunLog:
    if choose is None:
        return log
    giver = giver_of(log, choose)
    changed: Any = {name: tuple(map(giver, getattr(log, name))) for name in ("starts", "provenances", "rows")}
    changed["summary"] = None if log.summary is None else giver(log.summary)
    changed["notices"] = tuple(notice for notice in log.notices if not giver.is_out_of_date(notice))
    return replace(log, **changed)


def giver_of(log: RunLog, choose: ChoosePeak) -> PeakGiver:
    """What changes the records of this run. Its last peak counts, because all totals are divided by one."""
    giver = PeakGiver(choose)
    records: list[Record] = [*log.starts, *log.provenances]
    for record in records:
        giver(record)
    return giver


def _shares_of(values: Mapping[str, Number], peak: Peak) -> dict[str, Number]:
    shares: dict[str, Number] = {}
    for flops, share in (("model", "mfu"), ("hardware", "hfu")):
        rate = values.get(f"perf/{flops}_flops_per_second_per_device")
        if rate is not None:
            shares |= {f"perf/{share}": rate / peak.flops_per_s, f"perf/{share}_percent": 100 * rate / peak.flops_per_s}
    if shares:
        shares["perf/peak_flops_per_second_per_device"] = peak.flops_per_s
    return shares

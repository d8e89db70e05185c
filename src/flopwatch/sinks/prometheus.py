"""Serves the newest value of every metric to Prometheus."""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flopwatch.errors import InputError
from flopwatch.optional import require
from flopwatch.records.metrics import METRICS, STEP_KEY, find_metric
from flopwatch.records.run import Number, Provenance, Record, Row

_OWN_NAMES = ("flopwatch", f"flopwatch_{STEP_KEY}", "flopwatch_last_row_timestamp_seconds")


@dataclass(frozen=True, slots=True)
class _Series:
    """The Prometheus name and help text of a metric, and the dataset that it belongs to."""

    name: str
    description: str
    dataset: str | None = None


class PrometheusSink:
    """Serves `http://address:port/metrics` while the run lasts.

    `perf/mfu` becomes `flopwatch_perf_mfu`. The name of a time ends in its unit (`flopwatch_perf_step_time_seconds`).
    Values of a dataset have its name as a label (`flopwatch_dataset_loss{dataset="code"}`). Metrics of other code in
    the process are not served. Only this machine can read the metrics, unless `address` is set.
    """

    name = "prometheus"
    gather_seconds = 0.0

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._port = port
        self._address = address
        self._server: Any = None
        self._thread: Any = None
        self._series: dict[str, _Series] = {}
        self._values: dict[str, Number] = {}
        self._row: Row | None = None
        self._origin: Provenance | None = None

    def write(self, record: Record) -> None:
        if self._server is None:
            self._open()
        if isinstance(record, Provenance):
            self._origin = record
        elif isinstance(record, Row):
            self._take(record)

    def flush(self) -> None:
        """Does nothing, because a scrape reads the values directly."""

    def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. prometheus_client calls this at each scrape, in a thread of its server."""
        core = require("prometheus_client.core", "prometheus")
        values, row, origin = self._values, self._row, self._origin
        if origin is not None:
            yield core.InfoMetricFamily(
                "flopwatch", "How FLOPs are counted, and the peak of the device.", value=_labels(origin)
            )
        if row is not None:
            yield core.GaugeMetricFamily(_OWN_NAMES[1], "The last step that was logged.", value=row.step)
            yield core.GaugeMetricFamily(_OWN_NAMES[2], "When the newest values were logged.", value=row.unix_time)
        families: dict[str, Any] = {}
        for key, value in values.items():
            series = self._series[key]
            labels = {} if series.dataset is None else {"dataset": series.dataset}
            if series.name not in families:
                families[series.name] = core.GaugeMetricFamily(series.name, series.description, labels=tuple(labels))
            families[series.name].add_metric(tuple(labels.values()), value)
        yield from families.values()

    def _open(self) -> None:
        client = require("prometheus_client", "prometheus")
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(self._port, self._address, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise InputError(
                f"port {self._port} of {self._address} is taken by another program, so nothing is served to "
                f"Prometheus; pass another port, such as {self._port + 1}"
            ) from error

    def _take(self, row: Row) -> None:
        for key in row.values.keys() - self._series.keys():
            self._series[key] = _name(key, {series.name for series in self._series.values()})
        kept = self._values
        if row.detailed:  # a detailed row has every known metric, so metrics that it lacks are unknown now
            kept = {key: value for key, value in kept.items() if key not in METRICS}
        # This makes a new dict, because a scrape may be reading the old one.
        self._values = {**kept, **row.values}
        self._row = row


def _name(key: str, taken: set[str]) -> _Series:
    """The Prometheus name of a key. A number is added to a user's key whose name is already taken.

    >>> _name("perf/step_time", set()).name
    'flopwatch_perf_step_time_seconds'
    >>> _name("my/loss", {"flopwatch_my_loss"}).name
    'flopwatch_my_loss_2'
    """
    metric = find_metric(key)
    dataset, _, figure = key.partition("/")[2].rpartition("/")
    if metric.key.startswith("dataset/*"):
        return _Series(f"flopwatch_dataset_{figure}", metric.description, dataset)
    name = "flopwatch_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
    if metric.unit == "s" and not name.endswith("_seconds"):
        name += "_seconds"
    if key not in METRICS:
        # The help text contains the key, because the name may be unreadable: a Chinese key becomes `flopwatch______`.
        alone, number = name, 2
        while name in taken or name in _OWN_NAMES:
            name, number = f"{alone}_{number}", number + 1
        return _Series(name, f"{key}: {metric.description}")
    return _Series(name, metric.description)


def _labels(origin: Provenance) -> dict[str, str]:
    """The labels of the metric `flopwatch_info`; unknown facts are left out."""
    peak = origin.peak or {}
    facts = {
        "mode": origin.mode,
        "method": origin.method,
        "attention": origin.attention,
        "coverage": origin.coverage,
        "device": peak.get("device"),
        "device_count": origin.device_count,
        "dtype": peak.get("dtype"),
        "peak_flops_per_s": peak.get("flops_per_s"),
        "peak_kind": peak.get("kind"),
        "peak_source": peak.get("source"),
    }
    return {label: str(fact) for label, fact in facts.items() if fact is not None}

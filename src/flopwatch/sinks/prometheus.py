"""Serves the values of the newest row to Prometheus."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.errors import InputError
from flopwatch.optional import require
from flopwatch.records.metrics import METRICS, STEP_KEY, find_metric
from flopwatch.records.run import Number, Provenance, Record, Row, RunStart
from flopwatch.sinks.protocol import Sink

DEFAULT_PORT = 9477
"""Other exporters on GPU machines use 9400 and the next ports."""
_PORTS_TRIED = 20
_STEP_NAME, _TIME_NAME = f"flopwatch_{STEP_KEY}", "flopwatch_last_row_timestamp_seconds"
_OWN_NAMES = {"flopwatch", "flopwatch_run", "flopwatch_run_info", _STEP_NAME, _TIME_NAME}


class _Series(NamedTuple):
    """The Prometheus name and help text of a metric, and the dataset that it belongs to."""

    name: str
    description: str
    dataset: str | None = None


class PrometheusSink(Sink):
    """Serves `http://address:port/metrics` while the run lasts.

    `perf/mfu` becomes `flopwatch_perf_mfu`. The name of a time ends in its unit (`flopwatch_perf_step_time_seconds`).
    Values of a dataset have its name as a label (`flopwatch_dataset_loss{dataset="code"}`). `flopwatch_run_info` has
    the run's name, host, rank and job as labels. The metrics of flopwatch are those of the newest row, all of the same
    steps; a metric of the user keeps its newest value. Metrics of other code in the process are not served. Only this
    machine can read the metrics, unless `address` is set.

    Args:
        port: Without one, the first free port from 9477 on; a notice names it if it is another.
        address: The address to listen on.
    """

    name = "prometheus"
    gather_seconds = 0.0

    def __init__(self, port: int | None = None, address: str = "127.0.0.1") -> None:
        self._ports = range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED) if port is None else range(port, port + 1)
        self._port = self._ports[0]
        self._address = address
        self.tell: Callable[[str], None] = lambda message: None
        """Set by the monitor; takes a message to the user."""
        self._server: Any = None
        self._series: dict[str, _Series] = {}
        # A scrape may read each of these at any moment, so they are replaced and never changed.
        self._infos: dict[str, tuple[str, dict[str, str]]] = {}
        """Help text and labels of each info metric, by name."""
        self._newest: tuple[Row | None, dict[str, Number]] = None, {}
        """The newest row, and the values to serve."""

    def write(self, record: Record) -> None:
        if self._server is None:
            self._open()
        if isinstance(record, Provenance):
            peak = record.peak or {}
            facts = {
                **{name: getattr(record, name) for name in ("mode", "method", "attention", "coverage", "device_count")},
                **{name: peak.get(name) for name in ("device", "dtype")},
                **{f"peak_{name}": peak.get(name) for name in ("flops_per_s", "kind", "source")},
            }
            told = "How FLOPs are counted, and the peak of the device."
            self._infos = {**self._infos, "flopwatch": (told, _known(facts))}
        elif isinstance(record, RunStart):
            self._infos = {**self._infos, "flopwatch_run": ("Which run this is.", _known(_run_facts(record)))}
        elif isinstance(record, Row):
            for key in record.values.keys() - self._series.keys():
                self._series[key] = _name(key, {series.name for series in self._series.values()})
            of_user = {key: value for key, value in self._newest[1].items() if find_metric(key).key not in METRICS}
            kept = {key: value for key, value in of_user.items() if not find_metric(key).key.startswith("dataset/")}
            self._newest = record, {**kept, **record.values}

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. prometheus_client calls this at each scrape, in a thread of its server."""
        core = require("prometheus_client.core", "prometheus")
        row, values = self._newest
        for name, (told, labels) in self._infos.items():
            yield core.InfoMetricFamily(name, told, value=labels)
        if row is not None:
            yield core.GaugeMetricFamily(_STEP_NAME, "The last step that was logged.", value=row.step)
            yield core.GaugeMetricFamily(_TIME_NAME, "When the newest values were logged.", value=row.unix_time)
        families: dict[str, Any] = {}
        for key, value in values.items():
            name, told, dataset = self._series[key]
            labels = {} if dataset is None else {"dataset": dataset}
            family = families.setdefault(name, core.GaugeMetricFamily(name, told, labels=tuple(labels)))
            family.add_metric(tuple(labels.values()), value)
        yield from families.values()

    def _open(self) -> None:
        client = require("prometheus_client", "prometheus")
        registry = client.CollectorRegistry()
        registry.register(self)
        first, last = self._ports[0], self._ports[-1]
        for port in self._ports:
            try:
                self._server, _ = client.start_http_server(port, self._address, registry)
                self._port = port
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        else:
            which = f"port {first} of {self._address} is" if first == last else f"the ports {first} to {last} are"
            raise InputError(
                f"{which} taken by another program, so nothing is served to Prometheus; pass another port, such as "
                f"prometheus:{last + 1}"
            )
        if self._port != first:
            address = f"http://{self._address}:{self._port}/metrics"
            self.tell(f"port {first} is taken by another program, so Prometheus finds the metrics at {address}")


def _name(key: str, taken: set[str]) -> _Series:
    """The Prometheus name of a key. A number is added to a user's key whose name is already taken.

    >>> _name("perf/step_time", set()).name
    'flopwatch_perf_step_time_seconds'
    >>> _name("my/loss", {"flopwatch_my_loss"}).name
    'flopwatch_my_loss_2'
    """
    metric = find_metric(key)
    if metric.key.startswith("dataset/*"):
        dataset, _, figure = key.partition("/")[2].rpartition("/")
        return _Series(f"flopwatch_dataset_{figure}", metric.description, dataset)
    name = "flopwatch_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
    if metric.unit == "s" and not name.endswith("_seconds"):
        name += "_seconds"
    if key in METRICS:
        return _Series(name, metric.description)
    alone, number = name, 2
    while name in taken or name in _OWN_NAMES:
        name, number = f"{alone}_{number}", number + 1
    # The help text contains the key, because the name may be unreadable: a Chinese key becomes `flopwatch______`.
    return _Series(name, f"{key}: {metric.description}")


_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")


def _known(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts as labels of a metric; unknown ones are left out."""
    return {label: str(fact) for label, fact in facts.items() if fact is not None}


def _run_facts(start: RunStart) -> dict[str, Any]:
    folder, jobs = Path(start.output_dir).absolute(), {name.lower(): os.environ.get(name) for name in _JOBS}
    return {
        "run": folder.name,
        "folder": str(folder),
        "session": start.session,
        "host": start.environment.get("host"),
        "rank": start.rank,
        "world_size": start.world_size,
        **{name: job for name, job in jobs.items() if job and job != "none"},
    }

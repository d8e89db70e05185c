"""MLflow: into the run that is active, or one of our own, in batches."""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.optional import require
from flopwatch.records.run import Notice, Record, Row
from flopwatch.sinks.protocol import TrialRun

# The three calls the MLflow sink makes, to a server or to MLflow's own files.


MOST_METRICS = 1000
"""Of one request, by MLflow's interface."""
LONGEST_TAG = 5000
"""Characters of a tag's value, by the same."""

_API = "/api/2.0/mlflow"


@dataclass(slots=True)
class Batch:
    """What waits to be sent: metrics as key, value, milliseconds, step; tags by name."""

    metrics: list[tuple[str, float, int, int]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def parts(self) -> Iterator["Batch"]:
        """In pieces a server takes; the tags go with the first."""
        tags = dict(self.tags)
        waiting = list(self.metrics)
        for start in range(0, max(len(waiting), 1 if tags else 0), MOST_METRICS):
            yield Batch(waiting[start : start + MOST_METRICS], {} if start else tags)


class Tracking(Protocol):
    def start_run(self, experiment: str | None) -> str:
        """The id of a new run; `experiment` None means what the environment says, else the default one."""

    def log_batch(self, run_id: str, batch: Batch) -> None: ...

    def end_run(self, run_id: str) -> None: ...


def open_tracking(uri: str, timeout_seconds: float) -> Tracking:
    """Over HTTP where the URI is a server's, through MLflow's client for all others."""
    is_server = uri.startswith(("http://", "https://"))
    return ServerTracking(uri, timeout_seconds) if is_server else ClientTracking(uri)


def uri_in_use(folder: Path) -> str:
    """What the process or its environment names, else a database in the folder."""
    mlflow = require("mlflow", "mlflow")
    if mlflow.is_tracking_uri_set():
        return str(mlflow.get_tracking_uri())
    if find_spec("sqlalchemy") is None:
        raise InputError(
            "no MLflow server is named, and mlflow-skinny cannot keep runs on this machine; set "
            "MLFLOW_TRACKING_URI, or install the whole package with: pip install mlflow"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder.resolve()}/mlflow.db"


class ServerTracking:
    """MLflow's REST interface, each request made once.

    MLflow's own client repeats a request for four minutes, and takes that from the process's environment alone: to
    change it would change it for the training's own calls. Its `http_request` takes both limits with each call.
    """

    def __init__(self, uri: str, timeout_seconds: float) -> None:
        self._rest = require("mlflow.utils.rest_utils", "mlflow")
        self._credentials = require("mlflow.utils.credentials", "mlflow").get_default_host_creds(uri)
        self._timeout_seconds = timeout_seconds

    def start_run(self, experiment: str | None) -> str:
        name = _wanted_experiment(experiment)
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "0") if name is None else self._experiment_id(name)
        request = {"experiment_id": experiment_id, "start_time": _now_milliseconds()}
        if os.environ.get("MLFLOW_RUN_NAME"):
            request["run_name"] = os.environ["MLFLOW_RUN_NAME"]
        return str(self._call("POST", "runs/create", json=request)["run"]["info"]["run_id"])

    def log_batch(self, run_id: str, batch: Batch) -> None:
        metrics = [
            {"key": key, "value": _json_number(value), "timestamp": milliseconds, "step": step}
            for key, value, milliseconds, step in batch.metrics
        ]
        tags = [{"key": key, "value": text} for key, text in batch.tags.items()]
        self._call("POST", "runs/log-batch", json={"run_id": run_id, "metrics": metrics, "tags": tags})

    def end_run(self, run_id: str) -> None:
        request = {"run_id": run_id, "status": "FINISHED", "end_time": _now_milliseconds()}
        self._call("POST", "runs/update", json=request)

    def _experiment_id(self, name: str) -> str:
        response = self._request("GET", "experiments/get-by-name", params={"experiment_name": name})
        if response.status_code == 404:
            return str(self._call("POST", "experiments/create", json={"name": name})["experiment_id"])
        return str(self._verified(response)["experiment"]["experiment_id"])

    def _call(self, method: str, path: str, **content: Any) -> Any:
        return self._verified(self._request(method, path, **content))

    def _request(self, method: str, path: str, **content: Any) -> Any:
        return self._rest.http_request(
            self._credentials,
            f"{_API}/{path}",
            method,
            max_retries=0,
            timeout=self._timeout_seconds,
            raise_on_status=False,
            **content,
        )

    def _verified(self, response: Any) -> Any:
        return self._rest.verify_rest_response(response, response.url).json()


class ClientTracking:
    """MLflow's client, for its files, a database of its own, Databricks and plugins."""

    def __init__(self, uri: str) -> None:
        self._client = require("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=uri)
        self._entities = require("mlflow.entities", "mlflow")

    def start_run(self, experiment: str | None) -> str:
        name = _wanted_experiment(experiment)
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "0") if name is None else self._experiment_id(name)
        run = self._client.create_run(experiment_id, run_name=os.environ.get("MLFLOW_RUN_NAME"))
        return str(run.info.run_id)

    def log_batch(self, run_id: str, batch: Batch) -> None:
        metrics = [self._entities.Metric(*metric) for metric in batch.metrics]
        tags = [self._entities.RunTag(key, text) for key, text in batch.tags.items()]
        self._client.log_batch(run_id, metrics, (), tags)

    def end_run(self, run_id: str) -> None:
        self._client.set_terminated(run_id)

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))


def _wanted_experiment(name: str | None) -> str | None:
    return name or os.environ.get("MLFLOW_EXPERIMENT_NAME")


def _json_number(value: float) -> float | str:
    """As protobuf's JSON has it, which MLflow reads."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _now_milliseconds() -> int:
    return int(time.time() * 1000)


_MOST_WAITING = 50_000


class MlflowSink:
    """Sends the rows of a few seconds in one request: MLflow takes 12 ms for a single metric.

    A run is looked for, or started, at the first row: by then the training has called `mlflow.start_run` if it ever
    will. A run of yours is not ended. A server that stops answering is tried again for `patience_seconds`, each time
    once and for `timeout_seconds` at most; a server that never answered is given up at once.

    Args:
        output_dir: Gets MLflow's database when neither `tracking_uri`, `MLFLOW_TRACKING_URI` nor the training's own
            `mlflow.set_tracking_uri` names a place.
        tracking_uri: As for `mlflow.set_tracking_uri`, for this sink only.
        experiment: Its name; made if it does not exist. By default what `MLFLOW_EXPERIMENT_NAME` says.
        send_seconds: How often a batch is sent.
        timeout_seconds: How long one request may take.
        patience_seconds: How long a server may be away in mid-run.
    """

    name = "mlflow"

    def __init__(
        self,
        output_dir: Path | str,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        *,
        send_seconds: float = 5.0,
        timeout_seconds: float = 5.0,
        patience_seconds: float = 60.0,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self.gather_seconds = 0.8 * send_seconds  # less, so that a burst of rows is sent once, at its end
        self._send_seconds = send_seconds
        self._output_dir = Path(output_dir)
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._batch = Batch()
        self._tracking: Tracking | None = None
        self._run_id = ""
        self._is_ours = False
        self._tried_at = self._reached_at = clock()

    def write(self, record: Record) -> None:
        if not isinstance(record, Row):
            name = f"notice.{record.code}" if isinstance(record, Notice) else record.type
            text = record.message if isinstance(record, Notice) else json.dumps(record.to_json(), default=str)
            self._batch.tags[f"flopwatch.{name}"] = text[:LONGEST_TAG]
            return
        if self._tracking is None:
            self._open()
        milliseconds = int(record.unix_time * 1000)
        for key, value in record.values.items():
            # MLflow refuses the whole batch for one sign it does not know, such as a bracket in a dataset's name.
            self._batch.metrics.append((re.sub(r"[^/\w.\- :]", "_", key), float(value), milliseconds, record.step))
        if self._clock() - self._tried_at >= self._send_seconds:
            self.flush()

    def flush(self) -> None:
        """Send what waits; a server that is away has until the end of our patience to come back."""
        if self._tracking is None:
            return
        try:
            self._send(self._tracking)
        except Exception:
            away_seconds = self._clock() - self._reached_at
            if away_seconds >= self._patience_seconds or len(self._batch.metrics) > _MOST_WAITING:
                raise

    def close(self) -> None:
        tracking, self._tracking = self._tracking, None
        if tracking is not None:
            self._send(tracking)
            if self._is_ours:
                tracking.end_run(self._run_id)

    def _send(self, tracking: Tracking) -> None:
        self._tried_at = self._clock()
        for part in self._batch.parts():
            tracking.log_batch(self._run_id, part)
            del self._batch.metrics[: len(part.metrics)]
            self._batch.tags.clear()
        self._reached_at = self._clock()

    def _open(self) -> None:
        mlflow = require("mlflow", "mlflow")
        uri = self._tracking_uri or uri_in_use(self._output_dir)
        tracking = open_tracking(uri, self._timeout_seconds)
        self._run_id = self._active_run_id(mlflow, uri) or ""
        self._is_ours = not self._run_id
        try:
            self._run_id = self._run_id or tracking.start_run(self._experiment)
        except Exception as error:
            raise FlopwatchError(
                f"no run could be started at {uri}: {error}; check that the MLflow server is up and that "
                "MLFLOW_TRACKING_URI names it"
            ) from error
        self._tracking = tracking
        self._tried_at = self._reached_at = self._clock()

    def _active_run_id(self, mlflow: Any, uri: str) -> str | None:
        if self._tracking_uri is not None and self._tracking_uri != mlflow.get_tracking_uri():
            return None
        # mlflow.active_run knows the runs of the calling thread only, and this is not the training's.
        fluent = require("mlflow.tracking.fluent", "mlflow")
        run = getattr(fluent, "_get_latest_active_run", mlflow.active_run)()
        return os.environ.get("MLFLOW_RUN_ID") if run is None else str(run.info.run_id)


# Trials of a sweep to MLflow: a run each, found again by a tag.


TRIAL_TAG, SWEEP_TAG, DIGEST_TAG = "flopwatch.trial_id", "flopwatch.sweep_id", "flopwatch.digest"
_LONGEST_KEY = 250
_LONGEST_PARAM = 6000
_MOST_PARAMS = 100
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowTrials:
    """A run per trial: its settings are params, its figures metrics, its outcome and versions tags.

    MLflow gives runs ids of its own, so a trial's run is known by the tag `flopwatch.trial_id`. One that has not
    changed since it was logged is left alone.

    Args:
        experiment: Its name; made if it does not exist.
        folder: Gets MLflow's database when no server is named.
    """

    name = "MLflow"

    def __init__(self, experiment: str, folder: Path) -> None:
        self._uri = uri_in_use(folder)
        self._client = require("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=self._uri)
        self._entities = require("mlflow.entities", "mlflow")
        try:
            self._experiment_id = self._find_experiment(experiment)
        except InputError:
            raise
        except Exception as error:
            raise FlopwatchError(
                f"MLflow at {self._uri} cannot be used: {error}; check that the server is up and that "
                "MLFLOW_TRACKING_URI names it"
            ) from error
        self._known: dict[str, dict[str, tuple[str, str]]] = {}

    def log(self, run: TrialRun) -> None:
        known = self._known_of(run.sweep_id)
        run_id, digest = known.get(run.id, ("", ""))
        if digest == _digest(run):
            return
        is_new = not run_id
        run_id = run_id or self._create(run)
        known[run.id] = (run_id, "")
        milliseconds = int(1000 * (run.end_unix_seconds or 0))
        self._client.set_terminated(run_id, _STATUS[run.state], milliseconds or None)
        # Params cannot be changed, and those of a trial with the same key are the same.
        params = [self._entities.Param(*param) for param in _params(run.config)] if is_new else []
        first = max(len(params) - _MOST_PARAMS, 0)
        for start in range(0, first, _MOST_PARAMS):
            self._client.log_batch(run_id, (), params[start : min(start + _MOST_PARAMS, first)], ())
        metrics = [self._entities.Metric(key, value, milliseconds, 0) for key, value in _metrics(run.figures)]
        # The digest goes with what is sent last: a run that has it is whole.
        tags = [self._entities.RunTag(*tag) for tag in (*_tags(run), (DIGEST_TAG, _digest(run)))]
        self._client.log_batch(run_id, metrics, params[first:], tags)
        known[run.id] = (run_id, _digest(run))

    def _find_experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name))
        if found.lifecycle_stage != "active":
            raise InputError(f"the MLflow experiment {name!r} is deleted; restore it, or name another with --mlflow")
        return str(found.experiment_id)

    def _known_of(self, sweep_id: str) -> dict[str, tuple[str, str]]:
        """Trial to run and digest, of what was logged before; asked for once."""
        if sweep_id not in self._known:
            self._known[sweep_id] = {}
            for found in self._runs(f"tags.`{SWEEP_TAG}` = '{sweep_id}'"):
                tags = found.data.tags
                self._known[sweep_id][tags.get(TRIAL_TAG, "")] = (str(found.info.run_id), tags.get(DIGEST_TAG, ""))
        return self._known[sweep_id]

    def _runs(self, condition: str) -> Iterator[Any]:
        token = None
        while True:
            page = self._client.search_runs([self._experiment_id], condition, max_results=1000, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _create(self, run: TrialRun) -> str:
        start = int(1000 * (run.start_unix_seconds or run.end_unix_seconds or 0)) or None
        tags = {TRIAL_TAG: run.id, SWEEP_TAG: run.sweep_id}
        created = self._client.create_run(
            self._experiment_id, start_time=start, tags=tags, run_name=run.name[:_LONGEST_KEY]
        )
        return str(created.info.run_id)


def _digest(run: TrialRun) -> str:
    content = json.dumps([run.name, run.sweep, run.figures, run.facts, run.state, run.end_unix_seconds], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()[:20]


def _params(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(value)[:_LONGEST_PARAM]) for key, value in _renamed(_flat(config)) if value is not None]


def _metrics(figures: Mapping[str, float | None]) -> list[tuple[str, float]]:
    return [(key, float(value)) for key, value in _renamed(figures) if value is not None]


def _tags(run: TrialRun) -> list[tuple[str, str]]:
    told = {"flopwatch.sweep": run.sweep, **{f"flopwatch.{name}": text for name, text in run.facts.items()}}
    return [(key, str(text)[:LONGEST_TAG]) for key, text in _renamed(told)]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _renamed(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """MLflow refuses the whole batch for one sign it does not know, for `//`, and for one key twice."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        short = re.sub(r"[^\w.\- :]", "_", key)[:_LONGEST_KEY] or "_"
        number = 2
        name = short
        while name in found:
            name, number = f"{short[: _LONGEST_KEY - 8]}_{number}", number + 1
        found[name] = value
    return list(found.items())

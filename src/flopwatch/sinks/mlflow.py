"""Logs rows to MLflow in batches, into the active run or a new one, and each trial of a sweep as a run."""

import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.library_internals import checked_mlflow_response, latest_mlflow_run, mlflow_request_sender
from flopwatch.optional import require
from flopwatch.records.run import Notice, Record, Row
from flopwatch.sinks.protocol import TrialRun

MOST_METRICS = 1000
"""The maximum number of metrics that MLflow's REST interface accepts in one request."""
LONGEST_TAG = 5000
"""The maximum number of characters that MLflow accepts in the value of a tag."""


MetricPoint = tuple[str, float, int, int]
"""A value that waits to be sent: key, value, Unix time in milliseconds, step."""


def open_tracking(uri: str, timeout_seconds: float) -> "ServerTracking | ClientTracking":
    """A connection without retries if the URI is that of a server, else MLflow's own client."""
    if uri.startswith(("http://", "https://")):
        send = mlflow_request_sender(uri, timeout_seconds)
        if send is not None:
            return ServerTracking(send)
    return ClientTracking(uri)


def uri_in_use(folder: Path) -> str:
    """The tracking URI that this process or `MLFLOW_TRACKING_URI` has set, else that of a database in the folder."""
    mlflow = require("mlflow", "mlflow")
    if mlflow.is_tracking_uri_set():
        return str(mlflow.get_tracking_uri())
    if find_spec("sqlalchemy") is None:
        raise InputError(
            "mlflow-skinny cannot store runs on this machine, and no MLflow server is set; set MLFLOW_TRACKING_URI, or "
            "install the full package with: pip install mlflow"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder.resolve()}/mlflow.db"


class ServerTracking:
    """Sends requests to MLflow's REST interface without retries, because MLflow's client retries for minutes."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send

    def start_run(self, experiment: str | None) -> str:
        experiment_id = _experiment_id(experiment, self._id_of)
        request = {"experiment_id": experiment_id, "start_time": _now_milliseconds()}
        if os.environ.get("MLFLOW_RUN_NAME"):
            request["run_name"] = os.environ["MLFLOW_RUN_NAME"]
        return str(self._call("POST", "runs/create", json=request)["run"]["info"]["run_id"])

    def log_batch(self, run_id: str, points: Sequence[MetricPoint], texts: Mapping[str, str]) -> None:
        metrics = [
            # json writes NaN and infinity by the same names as protobuf, which takes them as texts.
            {"key": key, "value": value if math.isfinite(value) else json.dumps(value), "timestamp": when, "step": step}
            for key, value, when, step in points
        ]
        tags = [{"key": key, "value": text} for key, text in texts.items()]
        self._call("POST", "runs/log-batch", json={"run_id": run_id, "metrics": metrics, "tags": tags})

    def end_run(self, run_id: str) -> None:
        request = {"run_id": run_id, "status": "FINISHED", "end_time": _now_milliseconds()}
        self._call("POST", "runs/update", json=request)

    def _id_of(self, name: str) -> str:
        response = self._send("GET", "experiments/get-by-name", params={"experiment_name": name})
        if response.status_code == 404:
            return str(self._call("POST", "experiments/create", json={"name": name})["experiment_id"])
        return str(checked_mlflow_response(response)["experiment"]["experiment_id"])

    def _call(self, method: str, path: str, **content: Any) -> Any:
        return checked_mlflow_response(self._send(method, path, **content))


class ClientTracking:
    """Logs through MLflow's client, to local files, databases, Databricks and plugins."""

    def __init__(self, uri: str) -> None:
        self._client = require("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=uri)
        self._entities = require("mlflow.entities", "mlflow")

    def start_run(self, experiment: str | None) -> str:
        experiment_id = _experiment_id(experiment, self._id_of)
        # Without a name, MLflow draws one from `random`, whose numbers belong to the training.
        name = os.environ.get("MLFLOW_RUN_NAME") or f"flopwatch-{secrets.token_hex(4)}"
        run = self._client.create_run(experiment_id, run_name=name)
        return str(run.info.run_id)

    def log_batch(self, run_id: str, points: Sequence[MetricPoint], texts: Mapping[str, str]) -> None:
        metrics = [self._entities.Metric(*point) for point in points]
        tags = [self._entities.RunTag(key, text) for key, text in texts.items()]
        self._client.log_batch(run_id, metrics, (), tags)

    def end_run(self, run_id: str) -> None:
        self._client.set_terminated(run_id)

    def _id_of(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))


def _experiment_id(name: str | None, id_of: Callable[[str], str]) -> str:
    name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    return os.environ.get("MLFLOW_EXPERIMENT_ID", "0") if name is None else id_of(name)


def _now_milliseconds() -> int:
    return int(time.time() * 1000)


_MOST_WAITING = 50_000
"""The sink fails if more metrics than this wait for a server that does not answer."""


class MlflowSink:
    """Sends the rows of a few seconds in one request, because MLflow takes 12 ms for a single metric.

    At the first row the sink looks for the run of the training, which has usually been started by then, or starts its
    own run. It does not end the run of the training. If a server stops answering, the sink tries again at every flush
    for `patience_seconds`. If a server does not answer the first request, the sink fails at once.

    Args:
        output_dir: The folder for MLflow's database, if neither `tracking_uri`, `MLFLOW_TRACKING_URI` nor
            `mlflow.set_tracking_uri` names a server or folder.
        tracking_uri: As for `mlflow.set_tracking_uri`, for this sink only.
        experiment: Name of the experiment; created if it does not exist. None takes `MLFLOW_EXPERIMENT_NAME`.
        send_seconds: Seconds between two requests.
        timeout_seconds: Seconds that one request may take.
        patience_seconds: Seconds without an answer after which the sink fails.
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
        # Rows queue up for this long. If it were `send_seconds`, `write` would send the first of them alone.
        self.gather_seconds = 0.8 * send_seconds
        self._send_seconds = send_seconds
        self._output_dir = Path(output_dir)
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._points: list[MetricPoint] = []
        self._tags: dict[str, str] = {}
        self._tracking: ServerTracking | ClientTracking | None = None
        self._run_id = ""
        self._is_ours = False
        self._tried_at = self._reached_at = clock()

    def write(self, record: Record) -> None:
        if not isinstance(record, Row):
            name = f"notice.{record.code}" if isinstance(record, Notice) else record.type
            text = record.message if isinstance(record, Notice) else json.dumps(record.to_json(), default=str)
            self._tags[f"flopwatch.{name}"] = text[:LONGEST_TAG]
            return
        if self._tracking is None:
            self._open()
        milliseconds = int(record.unix_time * 1000)
        for key, value in record.values.items():
            # MLflow rejects the whole batch if one key has an invalid character, such as a bracket.
            self._points.append((re.sub(r"[^/\w.\- :]", "_", key), float(value), milliseconds, record.step))
        if self._clock() - self._tried_at >= self._send_seconds:
            self.flush()

    def flush(self) -> None:
        """Send the waiting values. Raises if the server has not answered for `patience_seconds`."""
        if self._tracking is None:
            return
        try:
            self._send(self._tracking)
        except Exception:
            away_seconds = self._clock() - self._reached_at
            if away_seconds >= self._patience_seconds or len(self._points) > _MOST_WAITING:
                raise

    def close(self) -> None:
        tracking, self._tracking = self._tracking, None
        if tracking is not None:
            self._send(tracking)
            if self._is_ours:
                tracking.end_run(self._run_id)

    def _send(self, tracking: ServerTracking | ClientTracking) -> None:
        self._tried_at = self._clock()
        while self._points or self._tags:
            part = self._points[:MOST_METRICS]
            tracking.log_batch(self._run_id, part, self._tags)
            del self._points[: len(part)]
            self._tags.clear()
        self._reached_at = self._clock()

    def _open(self) -> None:
        mlflow = require("mlflow", "mlflow")
        uri = self._tracking_uri or uri_in_use(self._output_dir)
        tracking = open_tracking(uri, self._timeout_seconds)
        if self._tracking_uri is None or self._tracking_uri == mlflow.get_tracking_uri():
            run = latest_mlflow_run(mlflow)
            self._run_id = os.environ.get("MLFLOW_RUN_ID", "") if run is None else str(run.info.run_id)
        self._is_ours = not self._run_id
        try:
            self._run_id = self._run_id or tracking.start_run(self._experiment)
        except Exception as error:
            raise FlopwatchError(
                f"no run could be started at {uri}: {error}; check that the MLflow server is running and that "
                "MLFLOW_TRACKING_URI is its address"
            ) from error
        self._tracking = tracking
        self._tried_at = self._reached_at = self._clock()


TRIAL_TAG, SWEEP_TAG, DIGEST_TAG = "flopwatch.trial_id", "flopwatch.sweep_id", "flopwatch.digest"
_LONGEST_KEY = 250
_LONGEST_PARAM = 6000
_MOST_PARAMS = 100
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowTrials:
    """Logs each trial as a run: settings as params, measurements as metrics, outcome and versions as tags.

    The tag `flopwatch.trial_id` identifies the run of a trial, because MLflow chooses the ids of runs. A trial that has
    not changed since it was logged is not logged again.

    Args:
        experiment: Name of the experiment; created if it does not exist.
        folder: The folder for MLflow's database, if no server is set.
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
                f"MLflow at {self._uri} cannot be used: {error}; check that the server is running and that "
                "MLFLOW_TRACKING_URI is its address"
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
        # Params are sent only to a new run. MLflow cannot change them, and the settings of a trial never change.
        settings = _renamed(_flat(run.config)) if is_new else []
        params = [
            self._entities.Param(key, str(value)[:_LONGEST_PARAM]) for key, value in settings if value is not None
        ]
        first = max(len(params) - _MOST_PARAMS, 0)
        for start in range(0, first, _MOST_PARAMS):
            self._client.log_batch(run_id, (), params[start : min(start + _MOST_PARAMS, first)], ())
        figures = [(key, float(value)) for key, value in _renamed(run.figures) if value is not None]
        metrics = [self._entities.Metric(key, value, milliseconds, 0) for key, value in figures]
        # The digest is sent with the last request, so a run that has the digest is complete.
        tags = [self._entities.RunTag(*tag) for tag in (*_tags(run), (DIGEST_TAG, _digest(run)))]
        self._client.log_batch(run_id, metrics, params[first:], tags)
        known[run.id] = (run_id, _digest(run))

    def _find_experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name))
        if found.lifecycle_stage != "active":
            raise InputError(
                f"the MLflow experiment {name!r} was deleted; restore it, or name another one with --mlflow"
            )
        return str(found.experiment_id)

    def _known_of(self, sweep_id: str) -> dict[str, tuple[str, str]]:
        """Run id and digest of the trials that were logged before, by trial id; fetched once per sweep."""
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


def _tags(run: TrialRun) -> list[tuple[str, str]]:
    tags = {"flopwatch.sweep": run.sweep, **{f"flopwatch.{name}": text for name, text in run.facts.items()}}
    return [(key, str(text)[:LONGEST_TAG]) for key, text in _renamed(tags)]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _renamed(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Make keys valid and distinct, because MLflow rejects a batch with an invalid character or a repeated key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        short = re.sub(r"[^\w.\- :]", "_", key)[:_LONGEST_KEY] or "_"
        number = 2
        name = short
        while name in found:
            name, number = f"{short[: _LONGEST_KEY - 8]}_{number}", number + 1
        found[name] = value
    return list(found.items())

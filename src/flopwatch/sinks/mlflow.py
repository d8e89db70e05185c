"""Logs rows to MLflow in batches, into the active run or a new one, and each trial of a sweep as a run."""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.library_internals import latest_mlflow_run, mlflow_client
from flopwatch.optional import require
from flopwatch.records.run import Notice, Record, Row
from flopwatch.sinks.protocol import TrialRun

MOST_VALUES = 1000
"""The maximum number of metrics and tags together that MLflow's REST interface accepts in one request."""
LONGEST_TAG = 5000
"""The maximum number of characters that MLflow accepts in the value of a tag."""


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


class _OpenRun(NamedTuple):
    """A run, the client that logs to it, and whether the sink started it."""

    client: Any
    id: str
    is_ours: bool


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
        self.gather_seconds = send_seconds
        self._output_dir = Path(output_dir)
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._points: list[tuple[str, float, int, int]] = []
        """Values that wait to be sent: key, value, Unix time in milliseconds, step."""
        self._tags: dict[str, str] = {}
        self._run: _OpenRun | None = None
        self._reached_at = 0.0

    def write(self, record: Record) -> None:
        if not isinstance(record, Row):
            name = f"notice.{record.code}" if isinstance(record, Notice) else record.type
            text = record.message if isinstance(record, Notice) else json.dumps(record.to_json(), default=str)
            self._tags[f"flopwatch.{name}"] = text[:LONGEST_TAG]
            return
        if self._run is None:
            self._run = self._open()
            self._reached_at = self._clock()
        milliseconds = int(record.unix_time * 1000)
        for key, value in record.values.items():
            # MLflow rejects the whole batch if one key has an invalid character, such as a bracket.
            self._points.append((re.sub(r"[^/\w.\- :]", "_", key), float(value), milliseconds, record.step))

    def flush(self) -> None:
        """Send the waiting values. Raises if the server has not answered for `patience_seconds`."""
        if self._run is None:
            return
        try:
            self._send(self._run)
        except Exception:
            away_seconds = self._clock() - self._reached_at
            if away_seconds >= self._patience_seconds or len(self._points) > _MOST_WAITING:
                raise

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._send(run)
            if run.is_ours:
                run.client.set_terminated(run.id)

    def _send(self, run: _OpenRun) -> None:
        entities = require("mlflow.entities", "mlflow")
        while self._points or self._tags:
            part = self._points[: MOST_VALUES - len(self._tags)]
            tags = [entities.RunTag(key, text) for key, text in self._tags.items()]
            run.client.log_batch(run.id, [entities.Metric(*point) for point in part], [], tags)
            del self._points[: len(part)]
            self._tags.clear()
        self._reached_at = self._clock()

    def _open(self) -> _OpenRun:
        mlflow = require("mlflow", "mlflow")
        uri = self._tracking_uri or uri_in_use(self._output_dir)
        client = mlflow_client(uri, self._timeout_seconds)
        if self._tracking_uri is None or self._tracking_uri == mlflow.get_tracking_uri():
            run = latest_mlflow_run(mlflow)
            run_id = os.environ.get("MLFLOW_RUN_ID", "") if run is None else str(run.info.run_id)
            if run_id:
                return _OpenRun(client, run_id, is_ours=False)
        name = os.environ.get("MLFLOW_RUN_NAME")
        if not name and not uri.startswith("http"):
            # MLflow would draw one from `random`, whose numbers belong to the training. A server draws it elsewhere.
            name = f"flopwatch-{secrets.token_hex(4)}"
        try:
            experiment = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
            experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
            if experiment is not None:
                found = client.get_experiment_by_name(experiment)
                experiment_id = str(found.experiment_id if found else client.create_experiment(experiment))
            run = client.create_run(experiment_id, run_name=name)
        except Exception as error:
            raise _unusable(f"no run could be started at {uri}", error) from error
        return _OpenRun(client, str(run.info.run_id), is_ours=True)


def _unusable(what: str, error: Exception) -> FlopwatchError:
    return FlopwatchError(
        f"{what}: {error}; check that the MLflow server is running and that MLFLOW_TRACKING_URI is its address"
    )


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
        uri = uri_in_use(folder)
        self._client = require("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=uri)
        try:
            found = self._client.get_experiment_by_name(experiment)
            self._experiment_id = str(found.experiment_id if found else self._client.create_experiment(experiment))
        except Exception as error:
            raise _unusable(f"MLflow at {uri} cannot be used", error) from error
        if found is not None and found.lifecycle_stage != "active":
            raise InputError(
                f"the MLflow experiment {experiment!r} was deleted; restore it, or name another one with --mlflow"
            )
        self._known: dict[str, dict[str, tuple[str, str]]] = {}

    def log(self, run: TrialRun) -> None:
        if run.sweep_id not in self._known:
            self._known[run.sweep_id] = self._logged_before(run.sweep_id)
        known = self._known[run.sweep_id]
        run_id, digest = known.get(run.id, ("", ""))
        if digest == _digest(run):
            return
        entities = require("mlflow.entities", "mlflow")
        # Params are sent only to a new run. MLflow cannot change them, and the settings of a trial never change.
        settings = [] if run_id else _renamed(_flat(run.config))
        params = [entities.Param(key, str(value)[:_LONGEST_PARAM]) for key, value in settings if value is not None]
        if not run_id:
            start = int(1000 * (run.start_unix_seconds or run.end_unix_seconds or 0)) or None
            tags = {TRIAL_TAG: run.id, SWEEP_TAG: run.sweep_id}
            created = self._client.create_run(self._experiment_id, start, tags, run.name[:_LONGEST_KEY])
            run_id = str(created.info.run_id)
        known[run.id] = (run_id, "")
        milliseconds = int(1000 * (run.end_unix_seconds or 0))
        self._client.set_terminated(run_id, _STATUS[run.state], milliseconds or None)
        while len(params) > _MOST_PARAMS:
            self._client.log_batch(run_id, (), params[:_MOST_PARAMS], ())
            del params[:_MOST_PARAMS]
        figures = [(key, float(value)) for key, value in _renamed(run.figures) if value is not None]
        metrics = [entities.Metric(key, value, milliseconds, 0) for key, value in figures]
        # The digest is sent with the last request, so a run that has the digest is complete.
        facts = [*_tags(run), (DIGEST_TAG, _digest(run))]
        self._client.log_batch(run_id, metrics, params, [entities.RunTag(*fact) for fact in facts])
        known[run.id] = (run_id, _digest(run))

    def _logged_before(self, sweep_id: str) -> dict[str, tuple[str, str]]:
        """Run id and digest of each trial of the sweep that has a run, by trial id."""
        known: dict[str, tuple[str, str]] = {}
        condition, token = f"tags.`{SWEEP_TAG}` = '{sweep_id}'", None
        while True:
            page = self._client.search_runs([self._experiment_id], condition, max_results=1000, page_token=token)
            for found in page:
                tags = found.data.tags
                known[tags.get(TRIAL_TAG, "")] = (str(found.info.run_id), tags.get(DIGEST_TAG, ""))
            token = page.token
            if not token:
                return known


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

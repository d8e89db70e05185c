"""Logs rows to MLflow in batches, into the active run or a new one."""

import json
import os
import re
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.library_internals import latest_mlflow_run, mlflow_client
from flopwatch.optional import require
from flopwatch.records.run import Notice, Record, Row

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
        except (require("mlflow.exceptions", "mlflow").MlflowException, OSError, ValueError):
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
        except (require("mlflow.exceptions", "mlflow").MlflowException, OSError, ValueError) as error:
            raise unusable(f"no run could be started at {uri}", error) from error
        return _OpenRun(client, str(run.info.run_id), is_ours=True)


def unusable(what: str, error: Exception) -> FlopwatchError:
    return FlopwatchError(
        f"{what}: {error}; check that the MLflow server is running and that MLFLOW_TRACKING_URI is its address"
    )

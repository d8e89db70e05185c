"""The three calls the MLflow sink makes, to a server or to MLflow's own files."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flopwatch.errors import InputError
from flopwatch.optional import require

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

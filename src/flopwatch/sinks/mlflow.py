"""MLflow: into the run that is active, or one of our own, in batches."""

import json
import os
import re
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import FlopwatchError
from flopwatch.optional import require
from flopwatch.run_records import Notice, Record, Row
from flopwatch.sinks.mlflow_tracking import LONGEST_TAG, Batch, Tracking, open_tracking, uri_in_use

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

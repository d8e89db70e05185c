"""Trials of a sweep to MLflow: a run each, found again by a tag."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flopwatch.errors import FlopwatchError, InputError
from flopwatch.optional import require
from flopwatch.sinks.mlflow_tracking import LONGEST_TAG, uri_in_use
from flopwatch.sinks.trial_runs import TrialRun

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

"""Logs each trial of a sweep as a run of W&B or MLflow: after the sweep with `flopwatch report`, or while it runs.

`flopwatch sweep --wandb PROJECT --mlflow EXPERIMENT` starts a second process, the follower, so that neither service can
delay or end the sweep: `python -m flopwatch.cli.trials.tracking FOLDER OFFSET WANDB MLFLOW`. The follower reads the
lines that the sweep appends to results.jsonl from the byte OFFSET on. It ends when its standard input is closed, which
also happens when the sweep is killed. The last line of its output tells how many trials it logged.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from flopwatch.cli import say
from flopwatch.errors import InputError, MissingDependencyError
from flopwatch.optional import require
from flopwatch.records.sweep_results import read_trial_list
from flopwatch.records.trial import FAILED, TrialResult
from flopwatch.records.trial_files import RESULTS, SWEEP
from flopwatch.report.capture import Capture, follow_results
from flopwatch.report.cells import MOST_FINITE
from flopwatch.report.table import COLUMNS, make_table, whole_text
from flopwatch.sinks.mlflow import LONGEST_TAG, unusable, uri_in_use
from flopwatch.sinks.wandb import refuse_to_prompt, shared_id
from flopwatch.text import one_line, plural

FOLLOWER = "flopwatch.cli.trials.tracking"
_PATIENCE_SECONDS = 300.0
"""How long the end of a sweep waits for the last trials to be logged."""
_SILENT_SECONDS = 2.0
"""If logging the last trials of a sweep takes longer than this, a message tells the user what the sweep waits for."""
_LONGEST_LINE = 2000


# Trials as runs of a tracking service


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial of a sweep as a run of a tracking service.

    Attributes:
        id: The same whenever the trial is logged, so that logging it again updates its run.
        sweep: The sweep's name, which groups its runs.
        sweep_id: The same for all trials of the sweep, even if its folder is moved.
        config: The trial's settings, as JSON.
        figures: Measured numbers by column name; unknown is None.
        facts: Texts by column name: outcome, reason, host, device, versions.
        state: `finished`, `failed` or `killed`.
        start_unix_seconds: When the trial began; None if it did not run.
        end_unix_seconds: When the trial ended; None if unknown.
    """

    id: str
    name: str
    sweep: str
    sweep_id: str
    config: Mapping[str, Any]
    figures: Mapping[str, float | None]
    facts: Mapping[str, str]
    state: str
    start_unix_seconds: float | None
    end_unix_seconds: float | None


def trial_run(result: TrialResult, sweep: str, created: float | None) -> TrialRun:
    """Convert the result of a trial to a run of a tracking service.

    Args:
        result: The result.
        sweep: Name of the sweep.
        created: Unix time at which the sweep was planned. The ID of the run depends on this time, which
            differs between sweeps with the same trials and stays the same if a sweep is resumed or its folder moved.
    """
    (row,) = make_table(Capture(Path(), {result.name: result}, {}))
    names = [column.name for column in COLUMNS]
    measured = COLUMNS[names.index("outcome") :]
    facts = {column.name for column in measured if column.kind == "text"}
    figures = {column.name for column in measured} - facts
    sweep_id = _hashed(sweep if created is None else repr(created))
    start = row["start_unix_seconds"]
    return TrialRun(
        id=_hashed(f"{sweep_id}\n{result.key or result.name}"),
        name=one_line(result.name),
        sweep=one_line(sweep),
        sweep_id=sweep_id,
        config=_clean(result.spec.to_json()),
        figures={name: value for name, value in row.items() if name in figures or name.startswith("extra.")},
        facts={name: value for name, value in row.items() if name in facts and value is not None},
        state="killed" if result.outcome == "cancelled" else "failed" if result.outcome in FAILED else "finished",
        start_unix_seconds=start,
        end_unix_seconds=None if start is None else start + (row["total_seconds"] or 0),
    )


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:20]


def _clean(value: Any) -> Any:
    """Make a value acceptable to every service: escape lone surrogates, and replace NaN and infinity by None."""
    if isinstance(value, Mapping):
        return {whole_text(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, str):
        return whole_text(value)
    return None if isinstance(value, int | float) and not abs(value) <= MOST_FINITE else value


@dataclass(frozen=True, slots=True)
class Logged:
    """The outcome of logging trials.

    Attributes:
        count: Trials that were logged.
        failures: One text for each trial that could not be logged.
        gave_up: True if the remaining trials were skipped after `MOST_FAILURES` failures in a row.
    """

    count: int
    failures: tuple[str, ...]
    gave_up: bool

    def text(self, service: str) -> str:
        """How many trials were logged and how many failed, in one line.

        >>> Logged(3, ("a: no answer",), gave_up=False).text("W&B")
        'W&B: logged 3 trials, 1 failed (a: no answer)'
        """
        text = f"{service}: logged {plural(self.count, 'trial')}"
        if self.failures:
            text += f", {len(self.failures)} failed ({one_line(self.failures[0])[:500]})"
        return text + ("; the other trials were not tried" if self.gave_up else "")


MOST_FAILURES = 3
"""After this many failures in a row, the remaining trials are not logged, because the service is probably down."""


def log_trials(runs: Iterable[TrialRun], log: Callable[[TrialRun], None]) -> Logged:
    """Log trials one after the other. A trial that cannot be logged does not stop the others."""
    count, in_a_row, failures = 0, 0, []
    for run in runs:
        try:
            log(run)
        except Exception as error:  # noqa: BLE001 - W&B and MLflow raise errors of many libraries
            failures.append(f"{run.name}: {str(error) or type(error).__name__}")
            in_a_row += 1
            if in_a_row == MOST_FAILURES:
                return Logged(count, tuple(failures), gave_up=True)
        else:
            count, in_a_row = count + 1, 0
    return Logged(count, tuple(failures), gave_up=False)


class WandbTrials:
    """Logs each trial as a run: settings as config, measurements as summary, outcome and sweep as tags.

    W&B's environment variables (`WANDB_MODE`, `WANDB_ENTITY`, `WANDB_DIR`, ...) apply.

    Args:
        project: As for `wandb.init`.
        folder: The folder for W&B's files, unless `WANDB_DIR` names another one.
    """

    name = "W&B"
    _LONGEST_TAG, _LONGEST_NAME = 64, 128

    def __init__(self, project: str, folder: Path) -> None:
        self._wandb = require("wandb", "wandb")
        self._project, self._folder = project, folder
        if shared_id(self._wandb):
            raise InputError("inside a W&B sweep or launch every run gets the same id; log the trials outside of it")
        refuse_to_prompt(self._wandb, None)

    def log(self, run: TrialRun) -> None:
        # The output, machine and code of this process are not recorded, because the trial ran in another process.
        quiet = {"console": "off", "silent": True, "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
        tags = dict.fromkeys(tag[: self._LONGEST_TAG] for tag in (run.facts["outcome"], run.sweep) if tag)
        with self._wandb.init(
            project=self._project,
            id=run.id,
            resume="allow",
            reinit="create_new",
            name=run.name[: self._LONGEST_NAME],
            group=run.sweep[: self._LONGEST_NAME],
            job_type="trial",
            tags=list(tags),
            settings=quiet,
            **({} if os.environ.get("WANDB_DIR") else {"dir": str(self._folder)}),
        ) as opened:
            opened.config.update({**run.config, "flopwatch_sweep": run.sweep}, allow_val_change=True)
            # Unknown values are written as None, so that an updated run does not keep old values.
            opened.summary.update({**run.figures, **run.facts})
            opened.finish(exit_code=0 if run.state == "finished" else 1)


class MlflowTrials:
    """Logs each trial as a run: settings as params, measurements as metrics, outcome and versions as tags.

    The tag `flopwatch.trial_id` identifies the run of a trial, because MLflow chooses the ids of runs. A trial that has
    not changed since it was logged is not logged again.

    Args:
        experiment: Name of the experiment; created if it does not exist.
        folder: The folder for MLflow's database, if no server is set.
    """

    name = "MLflow"
    _TRIAL_TAG, _SWEEP_TAG, _DIGEST_TAG = "flopwatch.trial_id", "flopwatch.sweep_id", "flopwatch.digest"
    _LONGEST_PARAM, _MOST_PARAMS = 6000, 100

    def __init__(self, experiment: str, folder: Path) -> None:
        uri = uri_in_use(folder)
        self._client = require("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=uri)
        try:
            found = self._client.get_experiment_by_name(experiment)
            self._experiment_id = str(found.experiment_id if found else self._client.create_experiment(experiment))
        except require("mlflow.exceptions", "mlflow").MlflowException as error:
            raise unusable(f"MLflow at {uri} cannot be used", error) from error
        if found is not None and found.lifecycle_stage != "active":
            raise InputError(
                f"the MLflow experiment {experiment!r} was deleted; restore it, or name another one with --mlflow"
            )
        self._known: dict[str, tuple[str, str]] | None = None

    def log(self, run: TrialRun) -> None:
        if self._known is None:
            self._known = self._logged_before(run.sweep_id)
        run_id, logged = self._known.get(run.id, ("", ""))
        now = (run.name, run.sweep, run.figures, run.facts, run.state, run.end_unix_seconds)
        digest = _hashed(json.dumps(now, sort_keys=True))
        if digest == logged:
            return
        entities = require("mlflow.entities", "mlflow")
        # Params are sent only to a new run. MLflow cannot change them, and the settings of a trial never change.
        settings = [] if run_id else _renamed(_flat(run.config))
        params = [
            entities.Param(key, str(value)[: self._LONGEST_PARAM]) for key, value in settings if value is not None
        ]
        if not run_id:
            start = int(1000 * (run.start_unix_seconds or run.end_unix_seconds or 0)) or None
            ids = {self._TRIAL_TAG: run.id, self._SWEEP_TAG: run.sweep_id}
            created = self._client.create_run(self._experiment_id, start, ids, run.name[:_LONGEST_KEY])
            run_id = str(created.info.run_id)
        self._known[run.id] = (run_id, "")
        milliseconds = int(1000 * (run.end_unix_seconds or 0))
        status = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}[run.state]
        self._client.set_terminated(run_id, status, milliseconds or None)
        while len(params) > self._MOST_PARAMS:
            self._client.log_batch(run_id, (), params[: self._MOST_PARAMS], ())
            del params[: self._MOST_PARAMS]
        figures = [(key, float(value)) for key, value in _renamed(run.figures) if value is not None]
        metrics = [entities.Metric(key, value, milliseconds, 0) for key, value in figures]
        facts = _renamed({f"flopwatch.{key}": text for key, text in {"sweep": run.sweep, **run.facts}.items()})
        # The digest is sent with the last request, so a run that has the digest is complete.
        tags = [entities.RunTag(key, str(text)[:LONGEST_TAG]) for key, text in [*facts, (self._DIGEST_TAG, digest)]]
        self._client.log_batch(run_id, metrics, params, tags)
        self._known[run.id] = (run_id, digest)

    def _logged_before(self, sweep_id: str) -> dict[str, tuple[str, str]]:
        """Run id and digest of each trial of the sweep that has a run, by trial id."""
        known: dict[str, tuple[str, str]] = {}
        condition, token = f"tags.`{self._SWEEP_TAG}` = '{sweep_id}'", None
        while True:
            page = self._client.search_runs([self._experiment_id], condition, max_results=1000, page_token=token)
            for found in page:
                tags = found.data.tags
                known[tags.get(self._TRIAL_TAG, "")] = (str(found.info.run_id), tags.get(self._DIGEST_TAG, ""))
            token = page.token
            if not token:
                return known


_LONGEST_KEY = 250


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


def open_services(folder: Path, wandb: str | None, mlflow: str | None) -> list[WandbTrials | MlflowTrials]:
    services: list[WandbTrials | MlflowTrials] = [] if wandb is None else [WandbTrials(wandb, folder)]
    if mlflow is not None:
        # By default MLflow retries for four minutes, which is too long here. No other code in this process uses MLflow.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        services.append(MlflowTrials(mlflow, folder))
    return services


def refuse_unusable(wandb: str | None, mlflow: str | None) -> None:
    """Raise an error for an empty name or a package that is not installed, before the first trial runs."""
    for package, wanted in (("wandb", wandb), ("mlflow", mlflow)):
        if wanted is not None and not wanted.strip():
            raise InputError(f"--{package} needs the name of {'a project' if package == 'wandb' else 'an experiment'}")
        if wanted is not None and find_spec(package) is None:
            raise MissingDependencyError(
                f"--{package} needs the package {package!r}, which is not installed; "
                f'install it with: pip install "flopwatch[{package}]"'
            )


def log_capture(capture: Capture, wandb: str | None, mlflow: str | None) -> None:
    """Log every trial that has a result, or update its earlier run there. Exit with status 1 if that failed for one."""
    is_whole, name = True, capture.folder.resolve().name
    for service in open_services(capture.folder, wandb, mlflow):
        runs = (trial_run(result, name, capture.created) for result in capture.results.values())
        logged = log_trials(runs, service.log)
        say(logged.text(service.name), err=bool(logged.failures))
        is_whole = is_whole and not logged.failures
    if not is_whole:
        raise SystemExit(1)


# While a sweep runs: the process that logs its trials


@contextlib.contextmanager
def tracked(folder: Path, wandb: str | None, mlflow: str | None) -> Iterator[None]:
    """Log the trials that end inside the block. A failure to log is printed at the end and does not stop the sweep."""
    if wandb is None and mlflow is None:
        yield
        return
    results = folder / RESULTS
    offset = results.stat().st_size if results.exists() else 0
    with tempfile.TemporaryFile() as said:
        follower = None
        with contextlib.suppress(OSError):
            follower = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER, str(folder), str(offset), wandb or "", mlflow or ""],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C does not end the process that logs the trials
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):  # printing fails if the pipe is closed
                status, message = _finish(follower, said)
                say(message, err=status != 0)
                if status != 0:
                    words = [*(("--wandb", wandb) if wandb else ()), *(("--mlflow", mlflow) if mlflow else ())]
                    again = shlex.join(["flopwatch", "report", str(folder), *words])
                    say(f"The results of the sweep are not affected; log its trials with: {again}", err=True)


def _finish(follower: "subprocess.Popen[bytes] | None", said: IO[bytes]) -> tuple[int, str]:
    if follower is None:
        return 1, "the process that logs trials could not be started"
    if follower.stdin is not None:
        with contextlib.suppress(OSError):  # raised if the follower has exited
            follower.stdin.close()
    try:
        try:
            status = follower.wait(_SILENT_SECONDS)
        except subprocess.TimeoutExpired:
            say("Waiting until the last trials are logged; press Ctrl-C to end without logging them.", err=True)
            status = follower.wait(_PATIENCE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(follower.pid, signal.SIGKILL)
        follower.wait()
        why = "by Ctrl-C" if isinstance(end, KeyboardInterrupt) else f"after {_PATIENCE_SECONDS:.0f} s"
        return 1, f"logging the trials was ended {why}"
    if status < 0:
        return status, f"the process that logs trials was ended by signal {-status}"
    said.seek(0)
    lines = said.read()[-_LONGEST_LINE:].decode("utf-8", "replace").strip().splitlines()
    return status, one_line(lines[-1]) if lines else "the process that logs trials printed nothing"


def main() -> int:
    folder, offset, wandb, mlflow = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None, sys.argv[4] or None
    over = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    # A new sweep rejects a folder with files, such as W&B's, so the sweep must have created it.
    while not (folder / SWEEP).exists() and not over.wait(0.1):
        pass
    try:
        services = open_services(folder, wandb, mlflow)
    except Exception as error:  # noqa: BLE001 - W&B and MLflow raise errors of many libraries
        _print_line(f"nothing was logged: {error}")
        return 1
    name, created = folder.resolve().name, read_trial_list(folder).created

    def log_all(service: WandbTrials | MlflowTrials) -> Logged:
        results = follow_results(folder, offset, over.is_set)
        return log_trials((trial_run(result, name, created) for result in results), service.log)

    with ThreadPoolExecutor() as pool:  # a thread for each service, so that a slow one does not delay the others
        found = list(pool.map(log_all, services))
    _print_line("; ".join(logged.text(one.name) for one, logged in zip(services, found, strict=True)))
    return 1 if any(logged.failures for logged in found) else 0


def _print_line(line: str) -> None:
    sys.stdout.buffer.write(line.replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

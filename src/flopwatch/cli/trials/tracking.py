"""Logs trials to W&B and MLflow: after a sweep with `flopwatch report`, or while a sweep runs.

`flopwatch sweep --wandb PROJECT --mlflow EXPERIMENT` starts a second process, the follower, so that neither service can
delay or end the sweep: `python -m flopwatch.cli.trials.tracking FOLDER OFFSET WANDB MLFLOW`. The follower reads the
lines that the sweep appends to results.jsonl from the byte OFFSET on. It ends when its standard input is closed, which
also happens when the sweep is killed. The last line of its output tells how many trials it logged.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import click

from flopwatch.errors import InputError, MissingDependencyError
from flopwatch.records.sweep_results import read_trial_list
from flopwatch.records.trial_files import RESULTS, SWEEP
from flopwatch.report.capture import Capture, follow_results
from flopwatch.report.table import trial_run, trial_runs
from flopwatch.sinks.protocol import Logged, TrialLog, log_trials
from flopwatch.text import one_line, plural

FOLLOWER = "flopwatch.cli.trials.tracking"
_PATIENCE_SECONDS = 300.0
"""How long the end of a sweep waits for the last trials to be logged."""
_SILENT_SECONDS = 2.0
"""If logging the last trials of a sweep takes longer than this, a message tells the user what the sweep waits for."""
_LONGEST_LINE = 2000


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


@contextlib.contextmanager
def tracked(folder: Path, wandb: str | None, mlflow: str | None) -> Iterator[None]:
    """Log the trials that end inside the block. A failure to log is printed at the end and does not stop the sweep."""
    if wandb is None and mlflow is None:
        yield
        return
    with tempfile.TemporaryFile() as said:
        follower = _start(folder, wandb, mlflow, said)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # printing fails if the pipe is closed
                status, message = _finish(follower, said)
                click.echo(message, err=status != 0)
                if status != 0:
                    words = [*(("--wandb", wandb) if wandb else ()), *(("--mlflow", mlflow) if mlflow else ())]
                    again = shlex.join(["flopwatch", "report", str(folder), *words])
                    click.echo(f"The results of the sweep are not affected; log its trials with: {again}", err=True)


def _start(folder: Path, wandb: str | None, mlflow: str | None, said: IO[bytes]) -> "subprocess.Popen[bytes] | None":
    results = folder / RESULTS
    try:
        offset = results.stat().st_size if results.exists() else 0
        return subprocess.Popen(
            [sys.executable, "-m", FOLLOWER, str(folder), str(offset), wandb or "", mlflow or ""],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C does not end the process that logs the trials
        )
    except OSError:
        return None


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
            click.echo("Waiting until the last trials are logged; press Ctrl-C to end without logging them.", err=True)
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


def open_logs(folder: Path, wandb: str | None, mlflow: str | None) -> list[TrialLog]:
    logs: list[TrialLog] = []
    if wandb is not None:
        from flopwatch.sinks.wandb import WandbTrials

        logs.append(WandbTrials(wandb, folder))
    if mlflow is not None:
        from flopwatch.sinks.mlflow import MlflowTrials

        # By default MLflow retries for four minutes, which is too long here. No other code in this process uses MLflow.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        logs.append(MlflowTrials(mlflow, folder))
    return logs


def log_capture(capture: Capture, wandb: str | None, mlflow: str | None) -> None:
    """Log every trial that has a result, or update its earlier run there. Exit with status 1 if that failed for one."""
    is_whole = True
    for log in open_logs(capture.folder, wandb, mlflow):
        logged = log_trials(trial_runs(capture), log)
        click.echo(logged_text(log.name, logged), err=bool(logged.failures))
        is_whole = is_whole and not logged.failures
    if not is_whole:
        raise SystemExit(1)


def logged_text(service: str, logged: Logged) -> str:
    """How many trials were logged and how many failed, in one line.

    >>> logged_text("W&B", Logged(3, ("a: no answer",), gave_up=False))
    'W&B: logged 3 trials, 1 failed (a: no answer)'
    """
    text = f"{service}: logged {plural(logged.count, 'trial')}"
    if logged.failures:
        text += f", {len(logged.failures)} failed ({one_line(logged.failures[0])[:500]})"
    return text + ("; the other trials were not tried" if logged.gave_up else "")


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
        logs = open_logs(folder, wandb, mlflow)
    except Exception as error:
        _print_line(f"nothing was logged: {error}")
        return 1
    name, created = folder.resolve().name, read_trial_list(folder).created

    def log_all(log: TrialLog) -> Logged:
        results = follow_results(folder, offset, over.is_set)
        return log_trials((trial_run(result, name, created) for result in results), log)

    with ThreadPoolExecutor() as pool:  # a thread for each service, so that a slow one does not delay the others
        found = list(pool.map(log_all, logs))
    _print_line("; ".join(logged_text(log.name, logged) for log, logged in zip(logs, found, strict=True)))
    return 1 if any(logged.failures for logged in found) else 0


def _print_line(line: str) -> None:
    sys.stdout.buffer.write(line.replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

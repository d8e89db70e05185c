"""Trials to W&B and MLflow, for `flopwatch report` after a sweep and for the follower beside one."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flopwatch.report.capture import Capture
    from flopwatch.sinks.trial_runs import Logged, TrialLog


def open_logs(folder: Path, wandb: str | None, mlflow: str | None) -> "list[TrialLog]":
    """Those asked for. Raises what a person must mend first: a missing package, an account, a server that is away."""
    logs: list[TrialLog] = []
    if wandb is not None:
        from flopwatch.sinks.wandb_trials import WandbTrials

        logs.append(WandbTrials(wandb, folder))
    if mlflow is not None:
        from flopwatch.sinks.mlflow_trials import MlflowTrials

        # This process does nothing else, so its environment is ours: by default MLflow tries for four minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        logs.append(MlflowTrials(mlflow, folder))
    return logs


def log_capture(capture: "Capture", wandb: str | None, mlflow: str | None) -> None:
    """Log every trial that ended; a second time brings the same runs up to date. Exits with 1 when some were not."""
    from flopwatch.report.trial_runs import trial_runs
    from flopwatch.sinks.trial_runs import log_trials

    is_whole = True
    for log in open_logs(capture.folder, wandb, mlflow):
        logged = log_trials(trial_runs(capture), log)
        typer.echo(logged_text(log.name, logged), err=bool(logged.failures))
        is_whole = is_whole and not logged.failures
    if not is_whole:
        raise typer.Exit(1)


def logged_text(service: str, logged: "Logged") -> str:
    """One line for a person.

    >>> from flopwatch.sinks.trial_runs import Logged
    >>> logged_text("W&B", Logged(3, ("a: no answer",), gave_up=False))
    'W&B: logged 3 trials, 1 failed (a: no answer)'
    """
    from flopwatch.cli.quantities import plural
    from flopwatch.plain_text import one_line

    text = f"{service}: logged {plural(logged.count, 'trial')}"
    if logged.failures:
        text += f", {len(logged.failures)} failed ({one_line(logged.failures[0])[:500]})"
    return text + ("; gave up on the rest" if logged.gave_up else "")

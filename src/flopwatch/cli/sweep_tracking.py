"""`flopwatch sweep --wandb PROJECT --mlflow EXPERIMENT`: a follower beside the runner logs trials as they end."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import typer

from flopwatch.errors import InputError, MissingDependencyError

FOLLOWER = "flopwatch.cli.follow_trials"
_PATIENCE_SECONDS = 300.0
_SILENT_SECONDS = 2.0
_LONGEST_LINE = 2000


def refuse_unusable(wandb: str | None, mlflow: str | None) -> None:
    """Before the first trial, not after a week."""
    for package, wanted in (("wandb", wandb), ("mlflow", mlflow)):
        if wanted is not None and not wanted.strip():
            raise InputError(f"--{package} needs a name: of the {'project' if package == 'wandb' else 'experiment'}")
        if wanted is not None and find_spec(package) is None:
            raise MissingDependencyError(
                f"--{package} needs the package {package!r}, which is not installed; "
                f'install it with: pip install "flopwatch[{package}]"'
            )


@contextlib.contextmanager
def tracked(folder: Path, wandb: str | None, mlflow: str | None) -> Iterator[None]:
    """Log what ends inside the block. Nothing that goes wrong with it reaches the sweep; it is told at the end."""
    if wandb is None and mlflow is None:
        yield
        return
    with tempfile.TemporaryFile() as said:
        follower = _start(folder, wandb, mlflow, said)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # telling may fail too, as into a closed pipe
                _tell(*_finish(follower, said), folder, wandb, mlflow)


def _start(folder: Path, wandb: str | None, mlflow: str | None, said: IO[bytes]) -> "subprocess.Popen[bytes] | None":
    from flopwatch.trial_files import RESULTS

    results = folder / RESULTS
    try:
        offset = results.stat().st_size if results.exists() else 0
        return subprocess.Popen(
            [sys.executable, "-m", FOLLOWER, str(folder), str(offset), wandb or "", mlflow or ""],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the sweep
        )
    except OSError:
        return None


def _finish(follower: "subprocess.Popen[bytes] | None", said: IO[bytes]) -> tuple[int, str]:
    """Exit status, and what to tell of it."""
    if follower is None:
        return 1, "the process that logs trials could not be started"
    if follower.stdin is not None:
        with contextlib.suppress(OSError):  # it may be gone
            follower.stdin.close()
    try:
        status = _waited(follower)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(follower.pid, signal.SIGKILL)
        follower.wait()
        why = "by Ctrl-C" if isinstance(end, KeyboardInterrupt) else f"after {_PATIENCE_SECONDS:.0f} s"
        return 1, f"logging trials was ended {why}"
    if status < 0:
        return status, f"the process that logs trials was ended by signal {-status}"
    return status, _last_line(said)


def _tell(status: int, told: str, folder: Path, wandb: str | None, mlflow: str | None) -> None:
    typer.echo(told, err=status != 0)
    if status != 0:
        words = [*(("--wandb", wandb) if wandb else ()), *(("--mlflow", mlflow) if mlflow else ())]
        again = shlex.join(["flopwatch", "report", str(folder), *words])
        typer.echo(f"The sweep itself is not touched by that; log its trials with: {again}", err=True)


def _waited(follower: "subprocess.Popen[bytes]") -> int:
    try:
        return follower.wait(_SILENT_SECONDS)
    except subprocess.TimeoutExpired:
        typer.echo("Logging the last trials; Ctrl-C leaves them out.", err=True)
    return follower.wait(_PATIENCE_SECONDS)


def _last_line(said: IO[bytes]) -> str:
    from flopwatch.plain_text import one_line

    said.seek(0)
    lines = said.read()[-_LONGEST_LINE:].decode("utf-8", "replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "the process that logs trials said nothing"

"""`flopwatch sweep ... --detach`: the same command in a session of its own, which no terminal can end."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import typer

from flopwatch.plain_text import plain
from flopwatch.sweep.folder import held_folder
from flopwatch.sweep.runner_file import LOG, read_runner

_PATIENCE_SECONDS = 60.0


def run_detached(sweep: Path) -> None:
    """Start it and leave once it holds the folder, or with its words if it ended at once."""
    with held_folder(sweep):  # made if need be, and free
        pass
    words = [word for word in sys.argv[1:] if word != "--detach"]
    with (sweep / LOG).open("ab") as log:
        said_before = log.tell()
        runner = subprocess.Popen(
            [sys.executable, "-m", "flopwatch", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while runner.poll() is None and not _holds(sweep, runner.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if runner.returncode:
        with (sweep / LOG).open("rb") as log:
            log.seek(said_before)
            typer.echo(plain(log.read().decode(errors="replace")), nl=False, err=True)
        raise typer.Exit(runner.returncode)
    folder = shlex.quote(str(sweep))
    typer.echo(f"The sweep runs on as process {runner.pid}; what it says is in {sweep / LOG}.")
    typer.echo(f"See it:  flopwatch sweep attach {folder}")
    typer.echo(f"Stop it: flopwatch sweep stop {folder}")


def _holds(sweep: Path, pid: int) -> bool:
    state = read_runner(sweep)
    return state is not None and state.pid == pid

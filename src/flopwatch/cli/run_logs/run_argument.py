"""The argument RUN_DIR of the commands that read a run's log: a run, a folder of runs, or nothing for the newest."""

from pathlib import Path
from typing import Annotated

import click

from flopwatch.cli import argument
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.runs.log_file import NoLogError, find_log, runs_below
from flopwatch.runs.reading import read_around

RunDir = Annotated[
    str | None,
    argument(
        "The folder of a run, or its log file; of a folder of runs, the newest. Default: flopwatch-runs.", "[RUN_DIR]"
    ),
]
RUNS_FOLDER = "flopwatch-runs"


def chosen_run(run_dir: str | None) -> str:
    """The run to show. Says on stderr which one was taken, if the user did not name it.

    Raises:
        InputError: No run was named, and there is none in `flopwatch-runs`.
    """
    folder = RUNS_FOLDER if run_dir is None else run_dir
    try:
        find_log(folder)
    except NoLogError:
        below = runs_below(folder)
        if below:
            which = f"the newest of {len(below)} runs" if len(below) > 1 else "the only run"
            click.secho(f"{below[-1]}: {which} in {folder}", dim=True, err=True)
            return str(below[-1])
        if run_dir is None:
            place = f"{Path.cwd() / RUNS_FOLDER}"
            raise InputError(f"no run was named, and there is none in {place}; name a folder") from None
    return folder


def types_of_newest_run() -> tuple[tuple[str, ...], str | None]:
    """The compute types of the newest run in `flopwatch-runs`, and its folder; nothing if there is none."""
    for run in reversed(runs_below(RUNS_FOLDER)):
        try:
            log = read_around(find_log(run))
        except (FlopwatchError, OSError):
            continue
        dtypes = tuple(dict.fromkeys(name for record in reversed(log.provenances) for name in record.dtypes))
        if dtypes:
            return dtypes, str(run)
    return (), None

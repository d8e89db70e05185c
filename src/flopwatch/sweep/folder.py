"""The sweep's folder on the runner's side: held by one runner, kept whole, nothing in it ever overwritten."""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.sweep.claims import PULSE, STARTED, Watcher, withdraw
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.environment import fingerprint
from flopwatch.sweep.holders import RUNNERS, hold
from flopwatch.sweep.supervisor import RESULT, SPEC
from flopwatch.trial_files import (
    RESULTS,
    SWEEP,
    append_line,
    log_file,
    read_json,
    read_result,
    run_folder,
    trial_folder,
    write_json,
)
from flopwatch.trial_records import FORMAT, TrialResult

_OLD_LOCK = "lock"
_WATCHER = Watcher()
"""What this process has seen of all supervisors: a reader's own clock is the one that counts."""


@contextlib.contextmanager
def held_folder(sweep: Path, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Make the folder if need be and keep every other runner out of it.

    Args:
        sweep: The folder.
        tell: Is told in a line when it takes time to find out whether the last runner lives; None writes to stderr.
    """
    _make_folders(sweep)
    with hold(sweep, tell or _say):
        _close_torn_line(sweep / RESULTS)
        yield


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"flopwatch: {line}\n".encode(errors="replace"))


def _close_torn_line(file: Path) -> None:
    """A line cut short by a full disk must not swallow the next one."""
    if file.exists() and file.stat().st_size:
        with file.open("rb+") as stream:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")


def _make_folders(sweep: Path) -> None:
    is_foreign = sweep.is_dir() and any(sweep.iterdir()) and not _is_sweep(sweep)
    if is_foreign:
        raise InputError(f"{sweep} has files in it and is not the folder of a sweep; choose another with --output")
    try:
        for name in ("trials", "logs", "runs", RUNNERS):
            (sweep / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {sweep}: {error.strerror}; choose another folder with --output") from None


def _is_sweep(sweep: Path) -> bool:
    return any((sweep / name).exists() for name in (SWEEP, RESULTS, RUNNERS, _OLD_LOCK))


def write_trial_list(sweep: Path, trials: Sequence[Trial], engine: str) -> None:
    """All trials of the sweep: those of earlier runs in this folder stay in the list."""
    earlier = read_json(sweep / SWEEP) or {}
    listed = {entry["name"]: entry for entry in earlier.get("trials", [])}
    listed |= {trial.name: {"name": trial.name, "key": trial.key, "spec": trial.spec.to_json()} for trial in trials}
    content = {
        "format": FORMAT,
        "created": earlier.get("created", time.time()),
        "engine": engine,
        "trials": list(listed.values()),
    }
    write_json(sweep / SWEEP, content)


def prepare(trial: Trial) -> None:
    """Make the trial's folder with its `spec.json`; what an earlier attempt left is moved aside."""
    folder = trial_folder(trial.sweep, trial.name)
    _make_room(trial)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "name": trial.name,
        "key": trial.key,
        "spec": trial.spec.to_json(),
        "environment": fingerprint(trial.spec),
        "cwd": os.getcwd(),
        "attempt": uuid.uuid4().hex,
    }
    write_json(folder / SPEC, content)


def _make_room(trial: Trial) -> None:
    """An attempt nobody has begun is withdrawn, so that a job still in some queue finds nothing to start.

    Raises:
        InputError: An earlier attempt still runs.
    """
    folder = trial_folder(trial.sweep, trial.name)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if is_supervised(trial.sweep, trial.name):
        raise InputError(f"{trial.name} still runs: {folder / STARTED} says where; nothing is run twice")
    withdraw(folder)
    _move_aside(trial.sweep, trial.name)


def _move_aside(sweep: Path, name: str) -> None:
    number = 1
    while (sweep / "earlier" / f"{name}.{number}").exists():
        number += 1
    place = sweep / "earlier" / f"{name}.{number}"
    place.parent.mkdir(exist_ok=True)
    trial_folder(sweep, name).rename(place)
    for source, target in ((log_file(sweep, name), place / "log.txt"), (run_folder(sweep, name), place / "run")):
        if source.exists():
            shutil.move(source, target)


def is_supervised(sweep: Path, name: str) -> bool:
    """False once no supervisor of this trial lives; on another host that takes some time to be certain of."""
    folder = trial_folder(sweep, name)
    return _WATCHER.is_alive(folder / STARTED, folder / PULSE)


def silent_seconds(sweep: Path, name: str) -> float:
    """For how long this process has seen the supervisor's sign of life unchanged."""
    return _WATCHER.silent_seconds(trial_folder(sweep, name) / PULSE)


def own_result(sweep: Path, name: str) -> TrialResult | None:
    """The end of the attempt in the trial's folder; None while it is not in sight, or when it is another attempt's."""
    result = read_result(result_file(sweep, name))
    attempt = attempt_of(sweep, name)
    is_anothers = result is not None and result.attempt and attempt and result.attempt != attempt
    return None if is_anothers else result


def attempt_of(sweep: Path, name: str) -> str:
    """The token of the attempt that was prepared last."""
    job = read_json(trial_folder(sweep, name) / SPEC)
    return str(job.get("attempt", "")) if isinstance(job, dict) else ""


def record(sweep: Path, result: TrialResult) -> None:
    """Append to the list of results."""
    append_line(sweep / RESULTS, result.to_json())


def result_file(sweep: Path, name: str) -> Path:
    return trial_folder(sweep, name) / RESULT

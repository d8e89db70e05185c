"""The sweep's folder on the runner's side: held by one runner, kept whole, nothing in it ever overwritten."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.sweep.attempts import put_aside
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.environment import fingerprint
from flopwatch.sweep.supervisor import RESULT, SPEC, STARTED
from flopwatch.trial_files import RESULTS, SWEEP, append_line, read_json, trial_folder, write_json
from flopwatch.trial_records import FORMAT, TrialResult

LOCK = "lock"


@contextlib.contextmanager
def held_folder(sweep: Path) -> Iterator[None]:
    """Make the folder if need be and keep every other runner out of it."""
    _make_folders(sweep)
    with (sweep / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise InputError(
                f"another sweep is running in {sweep} ({lock.read().strip() or 'unknown process'}); "
                "wait for it, or choose another folder with --output"
            ) from None
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        _close_torn_line(sweep / RESULTS)
        yield


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
        for name in ("trials", "logs", "runs"):
            (sweep / name).mkdir(parents=True, exist_ok=True)
        with (sweep / LOCK).open("a"):
            pass
    except OSError as error:
        raise InputError(f"cannot write to {sweep}: {error.strerror}; choose another folder with --output") from None


def _is_sweep(sweep: Path) -> bool:
    return any((sweep / name).exists() for name in (SWEEP, RESULTS, LOCK))


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
    if has_begun(trial.sweep, trial.name):
        put_aside(trial.sweep, trial.name)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "name": trial.name,
        "key": trial.key,
        "spec": trial.spec.to_json(),
        "environment": fingerprint(trial.spec),
        "cwd": os.getcwd(),
        "retries": trial.retries,
        "earlier_attempts": list(trial.earlier_attempts),
    }
    write_json(folder / SPEC, content)


def has_begun(sweep: Path, name: str) -> bool:
    """True when an attempt left something that is worth keeping."""
    return (trial_folder(sweep, name) / STARTED).exists() or result_file(sweep, name).exists()


def is_supervised(sweep: Path, name: str) -> bool:
    """True while a supervisor of this trial lives on a host that shares this folder's locks."""
    try:
        with (trial_folder(sweep, name) / STARTED).open() as claim:
            fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def record(sweep: Path, result: TrialResult) -> None:
    """Append to the list of results."""
    append_line(sweep / RESULTS, result.to_json())


def result_file(sweep: Path, name: str) -> Path:
    return trial_folder(sweep, name) / RESULT

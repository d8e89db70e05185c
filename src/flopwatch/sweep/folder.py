"""The sweep's folder on the runner's side: held by one runner, kept whole, nothing in it ever overwritten."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.file_reading import UnreadableError, opened_regular, read_object
from flopwatch.sweep.attempts import free_name, put_aside
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.environment import fingerprint
from flopwatch.sweep.supervisor import RESULT, SPEC, STARTED
from flopwatch.sweep_reading import LOCK, read_trial_list
from flopwatch.sweep_results import is_sweep_folder
from flopwatch.trial_files import (
    PREFLIGHT,
    RESULTS,
    SWEEP,
    append_line,
    log_file,
    run_folder,
    trial_folder,
    write_json,
)
from flopwatch.trial_records import FORMAT, TrialResult

_FOLDERS = ("trials", "logs", "runs")


@contextlib.contextmanager
def held_folder(sweep: Path) -> Iterator[None]:
    """Make the folder if need be and keep every other runner out of it."""
    _make_folders(sweep)
    with (sweep / LOCK).open("a+", errors="replace") as lock:
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
    try:
        is_foreign = sweep.is_dir() and any(sweep.iterdir()) and not is_sweep_folder(sweep)
        if is_foreign:
            raise InputError(f"{sweep} has files in it and is not the folder of a sweep; choose another with --output")
        _clear_the_way(sweep)
        for name in _FOLDERS:
            (sweep / name).mkdir(parents=True, exist_ok=True)
        with (sweep / LOCK).open("a"):
            pass
    except OSError as error:
        raise InputError(f"cannot write to {sweep}: {error.strerror}; choose another folder with --output") from None


def _clear_the_way(sweep: Path) -> None:
    """What is no file where a file should be, or no folder where a folder should, is moved to `earlier`."""
    for name in ("earlier", *_FOLDERS):
        if os.path.lexists(sweep / name) and not (sweep / name).is_dir():
            _put_aside(sweep, sweep / name)
    for name in (SWEEP, RESULTS, LOCK, PREFLIGHT):
        if os.path.lexists(sweep / name) and not (sweep / name).is_file():
            _put_aside(sweep, sweep / name)


def _put_aside(sweep: Path, file: Path) -> None:
    """Rename it to a name of its own in `earlier`; nothing is ever overwritten."""
    if file == sweep / "earlier":
        file.rename(free_name(sweep / "earlier-damaged"))
        return
    (sweep / "earlier").mkdir(exist_ok=True)
    file.rename(free_name(sweep / "earlier" / file.name))


def write_trial_list(sweep: Path, trials: Sequence[Trial], engine: str) -> None:
    """All trials of the sweep: those of earlier runs in this folder stay in the list."""
    earlier = read_trial_list(sweep)
    if earlier.trouble or earlier.newer_format is not None:
        _put_aside(sweep, sweep / SWEEP)
    listed = dict(earlier.trials)
    listed |= {trial.name: {"name": trial.name, "key": trial.key, "spec": trial.spec.to_json()} for trial in trials}
    content = {
        "format": FORMAT,
        "created": earlier.created if earlier.created is not None else time.time(),
        "engine": engine,
        "trials": list(listed.values()),
    }
    write_json(sweep / SWEEP, content)


def prepare(trial: Trial) -> None:
    """Make the trial's folder with its `spec.json`; what an earlier attempt left is moved aside."""
    folder = trial_folder(trial.sweep, trial.name)
    if has_begun(trial.sweep, trial.name):
        put_aside(trial.sweep, trial.name)
    for file, is_right in (
        (log_file(trial.sweep, trial.name), Path.is_file),
        (run_folder(trial.sweep, trial.name), Path.is_dir),
    ):
        if os.path.lexists(file) and not is_right(file):
            _put_aside(trial.sweep, file)
    for place in (folder, log_file(trial.sweep, trial.name).parent):  # a trial may have deleted the latter
        place.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "name": trial.name,
        "key": trial.key,
        "spec": trial.spec.to_json(),
        "environment": fingerprint(trial.spec, is_here=False),  # an engine may run it on another host
        "cwd": os.getcwd(),
        "retries": trial.retries,
        "earlier_attempts": list(trial.earlier_attempts),
    }
    write_json(folder / SPEC, content)


def has_begun(sweep: Path, name: str) -> bool:
    """Whether an earlier attempt, or anything that is no trial's, lies there."""
    folder = trial_folder(sweep, name)
    if not folder.is_dir():
        return os.path.lexists(folder)
    spec = folder / SPEC
    has_odd_spec = os.path.lexists(spec) and (not spec.is_file() or read_object(spec).get("format") != FORMAT)
    return has_odd_spec or any(os.path.lexists(folder / name) for name in (STARTED, RESULT))


def is_supervised(sweep: Path, name: str) -> bool:
    """True while a supervisor of this trial lives on a host that shares this folder's locks."""
    try:
        with opened_regular(trial_folder(sweep, name) / STARTED) as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except (FileNotFoundError, UnreadableError):
        return False
    return False


def restore_lists(sweep: Path, trials: Sequence[Trial], kept: Iterable[TrialResult], engine: str) -> None:
    """After a trial deleted the sweep's folder: what this runner still knows is written again."""
    _make_folders(sweep)
    write_trial_list(sweep, trials, engine)
    for result in kept:
        record(sweep, result)


def record(sweep: Path, result: TrialResult) -> None:
    """Append to the list of results."""
    append_line(sweep / RESULTS, result.to_json())


def result_file(sweep: Path, name: str) -> Path:
    return trial_folder(sweep, name) / RESULT

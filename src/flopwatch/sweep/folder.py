"""The sweep's folder on the runner's side: held by one runner, kept whole, nothing in it ever overwritten."""

import contextlib
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.records.reading import read_json, read_object
from flopwatch.records.sweep_results import LOCK, RUNNERS, is_sweep_folder, read_result, read_trial_list
from flopwatch.records.trial import FORMAT, TrialResult
from flopwatch.records.trial_files import (
    PREFLIGHT,
    RESULTS,
    SWEEP,
    append_line,
    log_file,
    run_folder,
    trial_folder,
    write_json,
)
from flopwatch.sweep.attempts import free_name, put_aside
from flopwatch.sweep.claims import (
    BEAT_SECONDS,
    PULSE,
    SignOfLife,
    Watcher,
    has_ended,
    is_alive_here,
    make_exclusively,
    own_identity,
    visible_seconds,
    withdraw,
)
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.supervisor.supervise import RESULT, SPEC, STARTED

_FOLDERS = ("trials", "logs", "runs", RUNNERS)
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
        with file.open("ab+") as stream:
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
            os.listdir(sweep / name)
        with (sweep / RESULTS).open("a"):
            pass
    except OSError as error:
        where = error.filename or sweep
        raise InputError(f"cannot write to {where}: {error.strerror}; choose another folder with --output") from None


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
    _make_room(trial)
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
        "attempt": uuid.uuid4().hex,
        "retries": trial.retries,
        "earlier_attempts": list(trial.earlier_attempts),
    }
    write_json(folder / SPEC, content)


def _make_room(trial: Trial) -> None:
    """An attempt nobody has begun is withdrawn, so that a job still in some queue finds nothing to start.

    Raises:
        InputError: An earlier attempt still runs.
    """
    folder = trial_folder(trial.sweep, trial.name)
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if is_supervised(trial.sweep, trial.name):
        raise InputError(f"{trial.name} still runs: {folder / STARTED} says where; nothing is run twice")
    if _is_only_asked_for(folder) and withdraw(folder):
        _discard(trial.sweep, folder)
    elif os.path.lexists(folder):
        withdraw(folder)
        put_aside(trial.sweep, trial.name)


def _is_only_asked_for(folder: Path) -> bool:
    """Nothing but a `spec.json` of this version, as `prepare` makes it."""
    is_bare = folder.is_dir() and [file.name for file in folder.iterdir()] == [SPEC]
    return is_bare and read_object(folder / SPEC).get("format") == FORMAT


def _discard(sweep: Path, folder: Path) -> None:
    """What was asked for and never began. Renamed first, so that it is there as a whole or not at all."""
    (sweep / "earlier").mkdir(exist_ok=True)
    gone = folder.rename(sweep / "earlier" / f".{folder.name}.{uuid.uuid4().hex}")
    shutil.rmtree(gone, ignore_errors=True)


def has_begun(sweep: Path, name: str) -> bool:
    """Whether an earlier attempt, or anything that is no trial's, lies there."""
    folder = trial_folder(sweep, name)
    if not folder.is_dir():
        return os.path.lexists(folder)
    spec = folder / SPEC
    has_odd_spec = os.path.lexists(spec) and (not spec.is_file() or read_object(spec).get("format") != FORMAT)
    return has_odd_spec or any(os.path.lexists(folder / name) for name in (STARTED, RESULT))


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
    return str(read_object(trial_folder(sweep, name) / SPEC).get("attempt", ""))


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


# One runner per folder, without locks: each runner takes the next number in `runners/`, and the highest holds it.
#
# runners/3.runner    who took number 3: host, process, command
# runners/3.beat      its sign of life
#
# A number is taken by an exclusive file, so of two that see the same dead holder only one takes its place. Numbers are
# never given back: somebody who looked long ago cannot take one that was another's.


_LOOK_SECONDS = 0.5


@contextlib.contextmanager
def hold(sweep: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Be the one runner of this folder.

    Args:
        sweep: The sweep's folder.
        tell: Is told in a line why this takes time.

    Raises:
        InputError: Another lives, or may live.
    """
    folder = sweep / RUNNERS
    number = _take(folder, sweep, tell)
    ended = threading.Event()
    sign = SignOfLife(_sign(folder, number), {"number": number})
    sign.beat()
    beater = threading.Thread(target=_beat, args=(folder, number, sign, ended), name="flopwatch-holder", daemon=True)
    beater.start()
    try:
        yield
    finally:
        ended.set()
        beater.join(BEAT_SECONDS)
        sign.end()


def _take(folder: Path, sweep: Path, tell: Callable[[str], None]) -> int:
    number = _highest(folder)
    while True:
        if number:
            _refuse_if_alive(folder, number, sweep, tell)
        facts = {**own_identity(), "unix_time": time.time(), "command": sys.argv[:20]}
        if make_exclusively(_claim(folder, number + 1), facts):
            return number + 1
        number += 1  # somebody was quicker, or its file is not in sight yet


def _refuse_if_alive(folder: Path, number: int, sweep: Path, tell: Callable[[str], None]) -> None:
    """Returns when the holder of this number is gone. One of another host is watched for its sign of life."""
    watcher, began, is_told = Watcher(), time.monotonic(), False
    while True:
        holder: Any = read_json(_claim(folder, number))
        is_seen = isinstance(holder, dict)
        here = is_alive_here(holder) if is_seen else None
        if here is False or has_ended(_sign(folder, number)):
            return
        if here or watcher.has_beaten(_sign(folder, number)):
            raise InputError(
                f"another sweep is running in {sweep} ({_who(holder)}); "
                "wait for it, or choose another folder with --output"
            )
        if time.monotonic() - began > visible_seconds():
            return
        if not is_told:
            tell(f"{_who(holder)} held {sweep} last; watching for {visible_seconds():.0f} s whether it still lives")
            is_told = True
        time.sleep(_LOOK_SECONDS)


def _who(holder: Any) -> str:
    if not isinstance(holder, dict):
        return "a runner that has just begun"
    return f"pid {holder.get('pid')} on {holder.get('host')}"


def _beat(folder: Path, number: int, sign: SignOfLife, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        successor = _highest(folder)
        if successor > number and not ended.is_set():
            # As if killed: nothing may be written, placed or cancelled by two runners.
            who = _who(read_json(_claim(folder, successor)))
            os.write(2, f"flopwatch: {who} took over this sweep while this runner was silent; it ends here\n".encode())
            os._exit(1)
        sign.beat()


def _highest(folder: Path) -> int:
    with contextlib.suppress(OSError):
        names = [name.removesuffix(".runner") for name in os.listdir(folder) if name.endswith(".runner")]
        return max((int(name) for name in names if name.isdecimal()), default=0)
    return 0


def _claim(folder: Path, number: int) -> Path:
    return folder / f"{number}.runner"


def _sign(folder: Path, number: int) -> Path:
    return folder / f"{number}.beat"

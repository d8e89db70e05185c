"""The sweep's folder: only one runner may use it at a time, and results in it are never overwritten.

Each runner creates the next number in `runners/`, which only one process can do: `runners/3.runner` is the claim
(`claim.py`) of runner 3. The runner with the highest number owns the folder, and deletes its file when it ends. If two
runners find the last one gone, only one takes its place.
"""

import contextlib
import errno
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch.decode import clean_value
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.files import append_line, is_full_disk, read_object, write_json
from flopwatch.records.sweep_results import is_sweep_folder, read_result, read_trial_list
from flopwatch.records.trial import FORMAT, TrialJob, TrialResult, TrialSpec
from flopwatch.records.trial_files import (
    EARLIER,
    KEPT_LOG,
    KEPT_RUN,
    LOGS,
    RESULT,
    RESULTS,
    RUNNERS,
    RUNS,
    SPEC,
    STARTED,
    SWEEP,
    TRIALS,
    log_file,
    run_folder,
    trial_folder,
)
from flopwatch.sweep.claim import BEAT_SECONDS, Claim, is_elsewhere, trial_claim, visible_seconds
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.host.processes import check_system, kill_marked

_FOLDERS = (TRIALS, LOGS, RUNS, RUNNERS)
_POLL_SECONDS = 0.5  # time between two readings of another runner's heartbeat


class FolderGoneError(FlopwatchError):
    """The sweep's folder was deleted while this runner used it."""


class StillRunsError(InputError):
    """An earlier attempt of the trial still runs."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of a sweep. An engine runs it by starting `python -m flopwatch.sweep.supervisor SWEEP_FOLDER NAME`."""

    sweep: Path
    name: str
    key: str  # hash of the configuration, the library versions and the devices
    spec: TrialSpec
    earlier_attempts: tuple[Mapping[str, Any], ...] = ()  # the lost ones, as in `TrialResult.earlier_attempts`

    @property
    def folder(self) -> Path:
        return trial_folder(self.sweep, self.name)


_HELD: dict[Path, Claim] = {}
"""The folders that this process holds."""


@contextlib.contextmanager
def held_folder(sweep: Path) -> Iterator[None]:
    """Create the folder if it does not exist, and keep every other runner out of it.

    Raises InputError if another runner is alive or on another host, the folder is not a sweep's or cannot be
    written, or this system cannot run trials.
    """
    check_system()
    _make_folders(sweep)
    with refused_on_a_full_disk(sweep):
        claim = _claim_folder(sweep)
    _HELD[sweep], ended = claim, threading.Event()
    beater = threading.Thread(target=_beat_until, args=(ended, claim), name="flopwatch-holder", daemon=True)
    beater.start()
    try:
        with refused_on_a_full_disk(sweep):
            _close_torn_line(sweep / RESULTS)
        yield
    finally:
        del _HELD[sweep]
        ended.set()
        beater.join(BEAT_SECONDS)
        claim.release()


def _claim_folder(sweep: Path) -> Claim:
    number = _highest_number(sweep)
    while True:
        if number:
            _wait_for_end(sweep, runner_claim(sweep, number))
        number += 1
        claim = runner_claim(sweep, number)
        # If this fails, another runner has taken the number, perhaps on a host whose files become visible late.
        if claim.take(command=sys.argv[:20]):
            return claim


def _wait_for_end(sweep: Path, claim: Claim) -> None:
    """Return once the runner has ended. Raises InputError if it is alive, or on another host."""
    is_reported = False
    while (holder := claim.holder()).life != "gone":
        who = f"pid {holder.facts.get('pid')} on {holder.facts.get('host')}" if holder.facts else "its file is empty"
        if holder.life == "alive":
            raise InputError(
                f"another sweep is running in {sweep} ({who}); wait for it, or choose another folder with --output"
            )
        if is_elsewhere(holder.facts):
            raise InputError(
                f"{sweep} is in use by a sweep on another host ({who}); wait for it or end it there. If it was killed, "
                f"free the folder with `rm {shlex.quote(str(claim.file))}` and run the command again"
            )
        if not is_reported:
            sys.stderr.write(
                f"flopwatch: the last runner of {sweep} ({who}) is not known to this system, as after the end of a "
                f"container; waiting {visible_seconds():.0f} s to see whether it is still alive\n"
            )
            is_reported = True
        time.sleep(_POLL_SECONDS)


def _beat_until(ended: threading.Event, claim: Claim) -> None:
    while not ended.wait(_POLL_SECONDS):
        claim.beat()


def _highest_number(sweep: Path) -> int:
    with contextlib.suppress(OSError):
        names = [name.removesuffix(".runner") for name in os.listdir(sweep / RUNNERS) if name.endswith(".runner")]
        return max((int(name) for name in names if name.isdecimal()), default=0)
    return 0


def runner_claim(sweep: Path, number: int | None = None) -> Claim:
    """The claim of the runner with this number; None stands for the last runner."""
    return Claim(sweep / RUNNERS / f"{_highest_number(sweep) if number is None else number}.runner")


def check_held(sweep: Path) -> None:
    """Raise a FolderGoneError if this process held the folder and holds it no more.

    Then a user has deleted the folder or its claim, and perhaps started a new sweep in it. This runner must not write
    into it again.
    """
    claim = _HELD.get(sweep)
    if claim is not None and (claim.owner() != "this process" or runner_claim(sweep).file != claim.file):
        raise FolderGoneError(
            f"{sweep} was deleted, renamed or given to another sweep while this sweep ran in it, so this sweep was "
            "ended; the same command starts it again"
        )


@contextlib.contextmanager
def refused_on_a_full_disk(sweep: Path) -> Iterator[None]:
    """Raise an InputError if the disk is full before any trial has run."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise InputError(
            f"cannot write to {error.filename or sweep}: {error.strerror}; "
            "free some space, or choose another folder with --output"
        ) from None


def _close_torn_line(file: Path) -> None:
    """Add the missing line break if a full disk cut the last line short, so that the next line is separate."""
    if file.exists() and file.stat().st_size:
        with file.open("ab+") as stream:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")


def _make_folders(sweep: Path) -> None:
    try:
        if sweep.is_dir() and any(sweep.iterdir()) and not is_sweep_folder(sweep):
            raise InputError(f"{sweep} is not empty and not the folder of a sweep; choose another with --output")
        for name in _FOLDERS:
            (sweep / name).mkdir(parents=True, exist_ok=True)
            os.listdir(sweep / name)
        _need_type(sweep / RESULTS, Path.is_file)
        with (sweep / RESULTS).open("a"):
            pass
    except OSError as error:
        where = error.filename or sweep
        advice = "move it away, or choose another folder with --output"
        raise InputError(f"cannot write to {where}: {error.strerror}; {advice}") from None


def _need_type(place: Path, has_right_type: Callable[[Path], bool]) -> None:
    if os.path.lexists(place) and not has_right_type(place):  # opening a FIFO would wait for ever
        raise FileExistsError(errno.EEXIST, "something else has this name", str(place))


def write_trial_list(sweep: Path, trials: Sequence[Trial], engine: str) -> None:
    """Write `sweep.json` with these trials and all trials that it lists already."""
    earlier = read_trial_list(sweep)
    if earlier.trouble or earlier.newer_format is not None:
        (sweep / EARLIER).mkdir(exist_ok=True)
        (sweep / SWEEP).rename(free_name(sweep / EARLIER / SWEEP))
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
    """Create the trial's folder with its `spec.json`, and move the files of an earlier attempt to `earlier/`.

    Raises StillRunsError if such an attempt still runs.
    """
    check_held(trial.sweep)
    folder = trial.folder
    _clear_folder(trial)
    _need_type(log_file(trial.sweep, trial.name), Path.is_file)
    _need_type(run_folder(trial.sweep, trial.name), Path.is_dir)
    folder.mkdir(parents=True, exist_ok=True)
    job = TrialJob(
        trial.spec,
        trial.name,
        trial.key,
        # `is_here=False` leaves this host's devices out, because an engine may choose another host.
        environment=fingerprint(trial.spec, is_here=False),
        cwd=os.getcwd(),
        attempt=os.urandom(16).hex(),
        earlier_attempts=trial.earlier_attempts,
    )
    write_json(folder / SPEC, job.to_json())


def _clear_folder(trial: Trial) -> None:
    folder = trial.folder
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if is_supervised(trial.sweep, trial.name):
        raise StillRunsError(
            f"{trial.name} still runs, see {folder / STARTED}; wait until it ends, then run the sweep again"
        )
    # An attempt that was not started is replaced: a job of it that starts later sees the new attempt, and leaves.
    is_bare = folder.is_dir() and [file.name for file in folder.iterdir()] == [SPEC]
    if os.path.lexists(folder) and not (is_bare and read_object(folder / SPEC).get("format") == FORMAT):
        kill_marked(trial_folder(trial.sweep.resolve(), trial.name))
        put_aside(trial.sweep, trial.name)


def has_begun(sweep: Path, name: str) -> bool:
    """Whether the trial's folder holds an attempt that has started, a result, or a `spec.json` in another format."""
    folder = trial_folder(sweep, name)
    if not folder.is_dir():
        return os.path.lexists(folder)
    spec = folder / SPEC
    has_foreign_spec = os.path.lexists(spec) and (not spec.is_file() or read_object(spec).get("format") != FORMAT)
    return has_foreign_spec or any(os.path.lexists(folder / name) for name in (STARTED, RESULT))


def is_supervised(sweep: Path, name: str) -> bool:
    """Whether this trial's supervisor seems to be alive. One on another host is judged by how it touches its claim."""
    return trial_claim(trial_folder(sweep, name)).holder().may_be_alive


def own_result(sweep: Path, name: str) -> TrialResult | None:
    """The result of the attempt that was prepared last; None if this attempt has no result yet."""
    result = read_result(result_file(sweep, name))
    attempt = attempt_of(sweep, name)
    is_earlier = result is not None and result.attempt and attempt and result.attempt != attempt
    return None if is_earlier else result


def attempt_of(sweep: Path, name: str) -> str:
    return str(read_object(trial_folder(sweep, name) / SPEC).get("attempt", ""))


def record(sweep: Path, result: TrialResult) -> None:
    check_held(sweep)
    append_line(sweep / RESULTS, result.to_json())


def result_file(sweep: Path, name: str) -> Path:
    return trial_folder(sweep, name) / RESULT


Attempt: TypeAlias = Mapping[str, Any]
"""An entry of `TrialResult.earlier_attempts`."""


def listed_attempts(sweep: Path, name: str, key: str) -> tuple[Attempt, ...]:
    """The attempts that `trials/NAME/spec.json` lists, oldest first. Empty if the file is for another `Trial.key`."""
    job = read_object(trial_folder(sweep, name) / SPEC)
    listed = job.get("earlier_attempts") if job.get("key") == key else None
    return tuple(
        clean_value(entry) for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, dict)
    )


def attempt_from(result: TrialResult, folder: str | None) -> Attempt:
    """The entry for an attempt that ended; `folder` is where its files were moved, None if it left no files."""
    return {
        "outcome": result.outcome,
        "reason": result.reason,
        "host": result.evidence.get("host") or result.environment.get("host"),
        "state": result.evidence.get("state") or result.evidence.get("error"),
        "unix_time": result.unix_time,
        "seconds": result.seconds,
        "folder": folder,
    }


def put_aside(sweep: Path, name: str) -> str:
    """Move the trial's folder, log and TensorBoard run to `earlier/NAME.N`; return that path relative to the sweep."""
    place = free_name(sweep / EARLIER / name)
    place.parent.mkdir(exist_ok=True)
    trial_folder(sweep, name).rename(place)
    moves = ((log_file(sweep, name), place / KEPT_LOG), (run_folder(sweep, name), place / KEPT_RUN))
    for home, kept in moves if place.is_dir() else ():
        if os.path.lexists(home) and not os.path.lexists(kept):
            shutil.move(home, kept)
    return str(place.relative_to(sweep))


def free_name(place: Path) -> Path:
    number = 1
    while os.path.lexists(f"{place}.{number}"):
        number += 1
    return Path(f"{place}.{number}")

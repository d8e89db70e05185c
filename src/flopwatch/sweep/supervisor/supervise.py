"""What a trial deleted while it ran: its folder, its log, the whole sweep. Told, and its end is kept all the same."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from flopwatch.records.reading import (
    BrokenRecordError,
    UnreadableError,
    clean_value,
    load_json,
    read_object,
    read_record,
)
from flopwatch.records.trial import FORMAT, Limits, TrialResult, TrialSpec
from flopwatch.records.trial_files import log_file, trial_folder, write_json
from flopwatch.sweep import claims
from flopwatch.sweep.attempts import slurm_life, takes_over
from flopwatch.sweep.claims import Progress, Pulse, claim, read_progress, visible_seconds
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.memory_limit import MemoryLimit, limit_memory, own_oom_kills
from flopwatch.sweep.host.processes import PARENT, end_worker, start_worker, waiter
from flopwatch.sweep.host.tree_memory import HostPeak, TreeMemory, fullest, resident
from flopwatch.sweep.supervisor.build_result import Seen, conclude
from flopwatch.sweep.supervisor.classify import JobEnd, OwnKill, signal_name
from flopwatch.sweep.supervisor.leftovers import clear_earlier_life, group_name, leave_guard_behind
from flopwatch.sweep.supervisor.measurements import AFTER_THE_STEPS
from flopwatch.sweep.supervisor.start_nodes import RunningNodes, start_nodes


def deleted_places(sweep: Path, name: str, claim: int) -> tuple[str, ...]:
    """Of a trial that has ended, in words.

    Args:
        sweep: The sweep's folder.
        name: The trial.
        claim: Its `started.json`, open: a file without a name was deleted, one that was moved still has one.
    """
    if not sweep.is_dir():
        return ("the sweep's folder",)
    try:
        is_folder_gone = os.fstat(claim).st_nlink == 0
    except OSError:  # a network's file system knows it no longer
        is_folder_gone = True
    is_log_gone = not os.path.lexists(log_file(sweep, name))
    return (*(("its folder",) if is_folder_gone else ()), *(("its log",) if is_log_gone else ()))


def told_deleted(result: TrialResult, places: tuple[str, ...]) -> TrialResult:
    """The result with what was deleted in it. A trial without its files has no measurement, whatever it says."""
    if not places:
        return result
    what = " and ".join(places) + (" were" if len(places) > 1 else " was")
    evidence = {**result.evidence, "deleted_while_it_ran": list(places)}
    if places == ("its log",) or result.outcome not in ("ok", "error"):
        return replace(result, reason=f"{result.reason}; {what} deleted while it ran", evidence=evidence)
    reason = f"it ran, and {what} deleted while it did, so that what it measured could not be kept ({result.reason})"
    return replace(result, outcome="error", reason=reason, evidence=evidence)


def restore_folder(sweep: Path, name: str, spec: dict[str, Any]) -> None:
    """A place for the result, and the `spec.json` that its command names."""
    folder = trial_folder(sweep, name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "spec.json", spec)


# Watches over one trial: `python -m flopwatch.sweep.supervisor.supervise SWEEP_FOLDER NAME`.
#
# Starts the worker in a session of its own, watches its heartbeat, ends it at its limits after asking for its stacks,
# kills everything it left behind, says how it ended and writes `result.json`. Standard library only: it starts quickly
# and stays small beside a trial that needs the memory.
#
# Started with a third word, ATTEMPT, it runs that attempt or nothing: one that comes late, after the trial was placed
# again, leaves. The process that is started becomes the guard of the supervisor (`trial_guard.py`), which is its child.


SPEC, STARTED, RESULT = "spec.json", claims.STARTED, "result.json"
CORES = "FLOPWATCH_CORES"

_TICK_SECONDS = 0.2
_SPEC_TICK_SECONDS = 0.25
_SILENCE_SECONDS = 600.0
GUARD_PATIENCE_SECONDS = 30.0
"""Beyond its trial's limits, for a supervisor that is busy killing or reading; less than a runner's patience."""


class AlreadyStartedError(Exception):
    """Somebody runs this trial, or ran it before: nothing is run twice."""


class UnusableSpecError(Exception):
    """There is no `spec.json` that can be read: nobody knows what to run."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What `spec.json` must have."""

    spec: TrialSpec
    key: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    cwd: str | None = None
    format: int = FORMAT
    earlier_attempts: tuple[Mapping[str, Any], ...] = ()
    retries: int = 0


@dataclass
class _Watch:
    """What the watching finds out while the worker lives."""

    own_kill: OwnKill | None = None
    detail: str = ""
    stacks: str = ""
    memory: TreeMemory = field(default_factory=TreeMemory)
    steps_peak: HostPeak = field(default_factory=HostPeak)


def supervise(
    sweep: Path,
    name: str,
    cancel: Callable[[], str | None] = lambda: None,
    attempt: str | None = None,
    guard: int | None = None,
) -> TrialResult:
    """Run one trial to its end, whatever that is; the result is also in `trials/NAME/result.json`.

    Call it in a process without other children: whatever is below it at the end is killed.

    Args:
        sweep: The sweep's folder.
        name: The trial, whose `spec.json` is there.
        cancel: Asked several times a second; a text means stop, and says why.
        attempt: The token in `spec.json`; None takes whichever is there.
        guard: A pipe to the guard, which is told that we live.

    Raises:
        AlreadyStartedError: It was started before, or was given to somebody else.
        UnusableSpecError: Its `spec.json` cannot be read.
    """
    sweep = sweep.resolve()
    folder = trial_folder(sweep, name)
    job, spec = _wait_for_job(folder, attempt)
    process_tree.adopt_orphans()
    token = str(job.get("attempt", ""))
    with _started(folder, token) as claimed:
        if guard is not None:
            os.write(guard, f"{allowed_silence(spec.limits) + GUARD_PATIENCE_SECONDS:g}\n".encode())
        pulse = Pulse(folder, token, guard)
        pulse.beat()
        clear_earlier_life(folder)
        os.environ[process_tree.ATTEMPT_MARK] = token  # every process of the trial inherits it
        seen = _run(sweep, name, spec, job, cancel, pulse)
        deleted = deleted_places(sweep, name, claimed)
        result = replace(told_deleted(conclude(sweep, name, job, spec, seen), deleted), attempt=token)
        if pulse.look_again():
            raise AlreadyStartedError(f"{folder / STARTED} is another's by now: this attempt was given up")
        if deleted:
            restore_folder(sweep, name, job)
        write_json(folder / RESULT, result.to_json())
        pulse.end()
    return result


def allowed_silence(limits: Limits) -> float:
    """Longest time a supervisor may give no sign of life: as long as its trial may, ten minutes without a limit."""
    known = [seconds for seconds in (limits.wall_seconds, limits.no_progress_seconds) if seconds is not None]
    return min([*known, _SILENCE_SECONDS])


def _wait_for_job(folder: Path, attempt: str | None) -> tuple[dict[str, Any], TrialSpec]:
    """What the runner's host has written may come into sight here late, or what stood there before first."""
    deadline = time.monotonic() + visible_seconds()
    while True:
        with contextlib.suppress(FileNotFoundError):
            job, spec = _read_job(folder)
            if attempt in (None, job.get("attempt")):
                return job, spec
        claimed = read_object(folder / STARTED)
        is_anothers = bool(claimed) and attempt is not None and claimed.get("attempt") != attempt
        if is_anothers or time.monotonic() > deadline:
            break
        time.sleep(_SPEC_TICK_SECONDS)
    if (folder / SPEC).exists():
        raise AlreadyStartedError(f"{folder / SPEC} is not of attempt {attempt}: the trial was placed again since")
    raise UnusableSpecError(f"{folder / SPEC} does not exist")


def _read_job(folder: Path) -> tuple[dict[str, Any], TrialSpec]:
    """What `spec.json` holds: the whole of it, and the configuration."""
    try:
        content = load_json(folder / SPEC)
        job = read_record(_Job, content)
        cleaned: dict[str, Any] = clean_value(content)
    except (UnreadableError, BrokenRecordError) as error:
        raise UnusableSpecError(f"{folder / SPEC} is damaged: {error}") from None
    if job.format > FORMAT:
        raise UnusableSpecError(
            f"{folder / SPEC} is of format {job.format} and this flopwatch reads up to {FORMAT}: update it on this node"
        )
    return cleaned, job.spec


def _run(
    sweep: Path, name: str, spec: TrialSpec, job: Mapping[str, Any], cancel: Callable[[], str | None], pulse: Pulse
) -> Seen:
    # The system's clock may jump, by an hour or by the years a machine without a battery is behind.
    unix_time, began, kills_before = time.time(), time.monotonic(), own_oom_kills()
    folder, attempt = trial_folder(sweep, name), str(job.get("attempt", ""))
    limit = limit_memory(spec.limits.memory_bytes, group_name(folder, attempt))
    try:
        nodes = start_nodes(sweep, name, spec, limit, job.get("cwd"))
        worker = nodes.agent if nodes else start_worker(sweep, name, spec, limit, job.get("cwd"))
        watch = _watch(worker, folder, spec, cancel, pulse, nodes)
        job_end = nodes.finish(at_once=watch.own_kill is not None) if nodes else JobEnd()
        seconds = time.monotonic() - began
        would_not_die = process_tree.kill_descendants(os.getpid())
        life = _life_peak(watch)
        return Seen(
            pid=worker.pid,
            status=worker.poll(),
            own_kill=watch.own_kill,
            own_kill_detail=watch.detail,
            stacks=watch.stacks,
            # Of a command all its life; of a worker its steps, which it knows better itself where it has come so far.
            host_peak=life if spec.trainer == "command" else fullest(watch.steps_peak, job_end.host_peak),
            sure_bytes=watch.memory.sure_bytes,
            oom_kills=limit.oom_kills() if limit.kind == "cgroup" else own_oom_kills() - kills_before,
            memory_limit=_limit_facts(limit, spec, life),
            would_not_die=would_not_die,
            unix_time=unix_time,
            seconds=seconds,
            job_end=job_end,
        )
    finally:
        limit.close()


def _life_peak(watch: _Watch) -> HostPeak:
    """Most that was seen, or that the largest process which has ended says: it may have been quicker than our looks.

    A child begins as a copy of this process, so a figure up to our own says nothing of it.
    """
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    own = resident("self")
    if own is not None and largest <= own.peak:
        return watch.memory.peak
    watch.memory.note_ended(largest)
    return watch.memory.peak


def _limit_facts(limit: MemoryLimit, spec: TrialSpec, life: HostPeak) -> dict[str, Any]:
    """How memory was limited, and what was seen of it: by us, and by the kernel where it counted."""
    if limit.kind == "none":
        return {}
    facts = {"by": limit.kind, "limit_bytes": spec.limits.memory_bytes, "life_bytes": life.bytes}
    return {**facts, "charged_bytes": limit.peak_bytes()}


@contextlib.contextmanager
def _started(folder: Path, attempt: str) -> Iterator[int]:
    """Claim the trial. The claim stays open, so that we see whether the trial deletes it."""
    if not claim(folder, attempt, slurm_life()):
        raise AlreadyStartedError(f"{folder / STARTED} exists: this trial was started before")
    handle = os.open(folder / STARTED, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _watch(
    worker: "subprocess.Popen[bytes]",
    folder: Path,
    spec: TrialSpec,
    cancel: Callable[[], str | None],
    pulse: Pulse,
    nodes: RunningNodes | None = None,
) -> _Watch:
    watch = _Watch(memory=TreeMemory(spec.limits.memory_bytes))
    began = moved = time.monotonic()
    progress = Progress()
    wait = waiter(worker)
    while not wait(_TICK_SECONDS):
        pulse.beat()
        watch.memory.look()
        now, latest = time.monotonic(), _latest_progress(folder, spec)
        if latest.phase not in AFTER_THE_STEPS:  # read after the look, which was in the steps too then
            watch.steps_peak = watch.memory.peak
        if latest != progress:
            progress, moved = latest, now
        if why := cancel() or pulse.superseded():
            watch.own_kill, watch.detail = "cancelled", why
        elif held := watch.memory.over_limit_bytes():
            watch.own_kill, watch.detail = "oom_host", _over_limit(held, spec.limits, progress)
        else:
            watch.own_kill, watch.detail = _limit_reached(spec.limits, progress, now - began, now - moved)
        if watch.own_kill is not None:
            # What eats memory is not asked to go, and has no time to tell its stacks.
            is_command = spec.trainer == "command" and watch.own_kill != "oom_host"
            wants_stacks = watch.own_kill not in ("cancelled", "oom_host")
            if nodes and wants_stacks:
                watch.stacks, wants_stacks = nodes.stacks(), False
            stacks = end_worker(worker, folder, is_command=is_command, wants_stacks=wants_stacks)
            watch.stacks = watch.stacks or stacks
            break
        if nodes and nodes.is_over():
            _ask_who_sent_it(worker, watch, cancel)
            break
    else:
        _ask_who_sent_it(worker, watch, cancel)
    return watch


def _limit_reached(limits: Limits, progress: Progress, age: float, still: float) -> tuple[OwnKill | None, str]:
    if limits.wall_seconds is not None and age > limits.wall_seconds:
        return "timeout", f"not done after {limits.wall_seconds:g} s, in {progress.text}"
    if limits.no_progress_seconds is not None and still > limits.no_progress_seconds:
        return "hang", f"nothing moved for {still:.0f} s, in {progress.text}"
    return None, ""


def _over_limit(held: int, limits: Limits, progress: Progress) -> str:
    most = (limits.memory_bytes or 0) / 2**20
    return f"its processes held {held / 2**20:,.0f} MiB together, its limit is {most:,.0f} MiB; in {progress.text}"


def _ask_who_sent_it(worker: "subprocess.Popen[bytes]", watch: _Watch, cancel: Callable[[], str | None]) -> None:
    """Slurm sends SIGTERM to every process of a job at once, and the worker may go before we have heard of it.

    It may also leave with any exit code, as a shell whose child was ended or a trainer that saves and goes: within a
    job no end is believed before there was time to hear of it.
    """
    is_ended_by_it = worker.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    patience = (0.05 if worker.returncode == 0 else 0.5) if slurm_life() else 0.5 if is_ended_by_it else 0.0
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if why := cancel():
            watch.own_kill, watch.detail = "cancelled", why
            return
        time.sleep(0.01)


def _latest_progress(folder: Path, spec: TrialSpec) -> Progress:
    """A command has no heartbeat of ours: whatever it prints is progress."""
    if spec.trainer != "command":
        return read_progress(folder)
    try:
        printed = log_file(folder.parent.parent, folder.name).stat().st_size
    except OSError:
        printed = 0
    return Progress("run", printed)


def main(arguments: list[str], errors: TextIO = sys.stderr) -> int:
    sweep, name = Path(arguments[0]), arguments[1]
    process_tree.die_with_parent(signal.SIGTERM)
    expected = os.environ.get(PARENT)
    if expected is not None and os.getppid() != int(expected):
        return 1  # who asked for this trial is gone already
    guard = leave_guard_behind(sweep, name)
    stop: list[str] = []

    def note(number: int, frame: object) -> None:
        stop.append(f"the supervisor was told to stop ({signal_name(number)}): its runner or its job ended")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    attempt = arguments[2] if len(arguments) > 2 else None
    if not takes_over(sweep.resolve(), name):
        return 0
    try:
        supervise(sweep, name, cancel=lambda: stop[0] if stop else None, attempt=attempt, guard=guard)
    except AlreadyStartedError as error:
        errors.write(f"flopwatch: {error}; nothing was run\n")
    except UnusableSpecError as error:
        errors.write(f"flopwatch: {error}; nothing was run\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs trials as tasks of Slurm array jobs: each task runs `flopwatch trial` for its line of the batch script.

The batch script is `DIR/slurm/ARRAY.sh`, where DIR is the sweep's folder, which all nodes share, and ARRAY a random
name; the output of a task is `DIR/slurm/ARRAY-INDEX.log`. The engine looks for results in the folder; of a task without
a result, Slurm's accounting (`sacct`) says how it ended. Slurm requeues nothing, because the runner retries what is
lost. Jobs of a killed runner go on; the next runner finds them in Slurm's queue by the paths of their scripts.
"""

import hashlib
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.files import read_object, tail
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import RESULT, SPEC, STARTED
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial, attempt_of
from flopwatch.text import one_line

_ASK_EVERY_SECONDS = 5.0  # how often Slurm's accounting is asked, and an array that was not taken is submitted again
_LARGEST_ARRAY = 1000  # Slurm's default MaxArraySize is 1001, which allows indices up to 1000.
_NOT_OVER = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT")


class SlurmEngine:
    """Runs trials as tasks of Slurm array jobs. The sweep's folder must be on a file system that all nodes share.

    Args:
        sbatch: Options of sbatch, with `_` for `-`: `partition="gpu"`, `time=90`, `exclusive=True`, or `array="%4"` for
            four tasks at once. They replace those that flopwatch computes; None leaves one out.
    """

    name = "slurm"

    def __init__(self, **sbatch: Any) -> None:
        self._at_once = str(sbatch.pop("array", ""))
        self._sbatch = {key.replace("_", "-"): value for key, value in sbatch.items()}
        self._tasks: dict[str, tuple[str, Path]] = {}  # of each trial: its task, such as `12_0`, and the batch script
        self._begun: set[str] = set()
        self._held: dict[str, list[Trial]] = {}  # by their requests: the trials that Slurm has not taken yet
        self._next_question = 0.0
        self._trouble, self._has_submitted, self._is_cancelled = "", False, False

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Find the tasks of an earlier runner that are still in Slurm's queue, and return the names of their trials."""
        self._sweep, self._job_name = sweep.resolve(), job_name(sweep)
        (self._sweep / "slurm").mkdir(parents=True, exist_ok=True)
        queue, trouble = _ask("squeue", "-h", "-r", f"--name={self._job_name}", "-o", "%F_%K|%o")
        if trouble:
            raise InputError(f"Slurm cannot be used here, because `squeue` failed: {trouble}")
        awaited = {f"{trial.name} {attempt_of(sweep, trial.name)}": trial.name for trial in unfinished}
        for task, script in re.findall(r"(?m)^\s*(\S+)\|(.*)$", queue):
            lines = Path(script).read_text(errors="replace") if os.path.exists(script) else ""
            found = re.search(f"^# task {task.partition('_')[2]}: (.*)$", lines, re.MULTILINE)
            name = awaited.get(found[1]) if found else None
            if name is not None and not self._has_final_result(name):
                self._tasks[name] = task, Path(script)
        return list(self._tasks)

    def room(self, next_up: TrialSpec) -> int:
        """Return how many trials fit into the next array; 0 until half of the last ones have ended."""
        return 0 if self._held or len(self._tasks) > _LARGEST_ARRAY // 2 else _LARGEST_ARRAY

    def submit(self, trials: Sequence[Trial]) -> None:
        """Submit one array for all trials that request the same resources."""
        for trial in trials:
            self._held.setdefault(self._requests(trial.spec), []).append(trial)
        self._send()

    def _requests(self, spec: TrialSpec) -> str:
        wall, memory = spec.limits.wall_seconds, spec.limits.memory_bytes
        # Slurm's limits are larger than the trial's own, so that the supervisor ends the trial first.
        options = {
            "no-requeue": True,
            "cpus-per-task": spec.cpus or spec.processes,
            "gres": f"gpu:{math.ceil(spec.gpus)}" if spec.gpus else None,
            "mem": f"{256 + math.ceil(memory / (1 << 20))}M" if memory else None,
            "time": 2 + math.ceil(wall / 60) if wall else None,
        }
        return _options({**options, **self._sbatch})

    def _send(self) -> None:
        """Submit the arrays that Slurm has not taken yet. Raises InputError if it does not take the very first one."""
        while self._held:
            requests, trials = next(iter(self._held.items()))
            script = self._write_script(requests, trials)
            job, self._trouble = _ask("sbatch", "--parsable", str(script))
            if self._trouble and not self._has_submitted:
                raise InputError(f"Slurm does not take the jobs in {script}: {self._trouble}")
            if self._trouble:
                return
            del self._held[requests]
            self._has_submitted = True
            for index, trial in enumerate(trials):
                self._tasks[trial.name] = f"{job.strip().partition(';')[0]}_{index}", script

    def _write_script(self, requests: str, trials: Sequence[Trial]) -> Path:
        script = self._sweep / "slurm" / f"{os.urandom(6).hex()}.sh"
        log = str(script.with_suffix("")).replace("%", "%%") + "-%a.log"
        ours = {"job-name": self._job_name, "array": f"0-{len(trials) - 1}{self._at_once}", "output": log}
        command = shlex.join([sys.executable, "-m", "flopwatch", "trial", "--spec", f"{self._sweep}/trials/"])
        lines = [f"# task {i}: {trial.name} {attempt_of(self._sweep, trial.name)}\n" for i, trial in enumerate(trials)]
        text = f'line=$(sed -n "s/^# task $SLURM_ARRAY_TASK_ID: //p" {shlex.quote(str(script))})\n'
        text += f'exec {command}"${{line% *}}"/{SPEC} --attempt "${{line##* }}"\n'
        # A folder's name may contain any bytes. surrogateescape writes them unchanged.
        script.write_text(f"#!/bin/sh\n{_options(ours)}{requests}{text}{''.join(lines)}", "utf-8", "surrogateescape")
        return script

    def wait(self, seconds: float) -> Sequence[Ended]:
        time.sleep(seconds)
        known: dict[str, dict[str, Any]] = {}
        if time.monotonic() >= self._next_question and (self._tasks or self._held):
            self._next_question = time.monotonic() + _ASK_EVERY_SECONDS
            self._send()
            jobs = ",".join({task.partition("_")[0] for task, _ in self._tasks.values()})
            answer, trouble = _ask("sacct", "-XPn", "-j", jobs or "1", "-o", "JobID,State,ExitCode,NodeList")
            known, self._trouble = read_sacct(answer), self._trouble if self._held else trouble
        self._begun = {name for name in self._tasks if (self._sweep / "trials" / name / STARTED).exists()}
        ended = []
        for name, (task, script) in list(self._tasks.items()):
            # Accounting has one row, with the number of the job alone, for the tasks that never ran.
            row = known.get(task, {} if name in self._begun else known.get(task.partition("_")[0], {}))
            is_over = row.get("state", "PENDING") not in _NOT_OVER
            if is_over or self._has_final_result(name):
                log = {"log": tail(script.with_name(f"{script.stem}-{task.partition('_')[2]}.log"))}
                ended.append(Ended(name, {"job": task, **({**log, **row} if is_over else {})}))
                del self._tasks[name]
        return ended

    def _has_final_result(self, name: str) -> bool:
        """Whether the trial has a result other than `cancelled`, for which only Slurm knows the cause."""
        file = self._sweep / "trials" / name / RESULT
        return file.exists() and (self._is_cancelled or read_object(file).get("outcome") != "cancelled")

    def withdraw(self) -> Sequence[str]:
        """Remove from Slurm's queue what waits there, and return the names of all trials that have not begun."""
        names = [trial.name for trials in self._held.values() for trial in trials] + [*(set(self._tasks) - self._begun)]
        if not names or _ask("scancel", f"--name={self._job_name}", "--state=PENDING")[1]:
            return ()
        self._held, self._tasks = {}, {name: task for name, task in self._tasks.items() if name in self._begun}
        return names

    def cancel(self) -> None:
        self._is_cancelled, self._next_question = True, 0.0
        _ask("scancel", f"--name={self._job_name}")

    def close(self) -> None:
        """Do nothing, because this engine holds no resources."""

    def state(self) -> str:
        running, submitted = len(self._begun & set(self._tasks)), len(self._tasks)
        queued = submitted - running + sum(map(len, self._held.values()))
        return f"{running} running, {queued} queued" + (f"; waiting: {self._trouble}" if self._trouble else "")


def job_name(sweep: Path) -> str:
    return "flopwatch-" + hashlib.sha256(os.fsencode(sweep.resolve())).hexdigest()[:12]


def why_jobs_wait(sweep: Path) -> str:
    """What Slurm says of the jobs of this sweep that wait: `6 jobs wait in Slurm's queue: JobHeldUser`."""
    answer, trouble = _ask("squeue", "-h", "-r", f"--name={job_name(sweep)}", "-t", "PENDING", "-o", "%r")
    reasons = answer.split()
    return trouble or (
        f"{len(reasons)} jobs wait in Slurm's queue: {', '.join(sorted(set(reasons)))}" if reasons else ""
    )


def _ask(*command: str) -> tuple[str, str]:
    """What a command of Slurm prints, and why it failed; that is empty if it did not."""
    try:  # A busy controller may need tens of seconds to answer.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", one_line(f"{command[0]}: {error}", 300)
    return done.stdout, one_line(done.stderr.strip() or f"{command[0]} failed", 300) if done.returncode else ""


def read_sacct(text: str) -> dict[str, dict[str, Any]]:
    """Parse the output of `sacct -XPn -o JobID,State,ExitCode,NodeList`."""
    rows = {}
    for job, state, code, number, node in re.findall(r"(?m)^(\d+(?:_\d+)?)[^|]*\|(\w+)[^|]*\|(\d+):(\d+)\|(.*)$", text):
        status = {"signal": int(number)} if number != "0" else {"exit_code": int(code)}
        rows[job] = {"state": state, "host": node.replace("None assigned", ""), **status}
    return rows


def _options(options: dict[str, Any]) -> str:
    """Lines of a batch script; True is an option without a value, None and False leave one out."""
    asked = {key: value for key, value in options.items() if value is not None and value is not False}
    words = [key if value is True else f"{key}={shlex.quote(str(value))}" for key, value in asked.items()]
    return "".join(f"#SBATCH --{word}\n" for word in words)

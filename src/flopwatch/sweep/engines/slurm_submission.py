"""Array jobs on their way to Slurm: their batch scripts, and the outbox that submits them until Slurm accepts them.

A controller that fails over, restarts or is overloaded refuses jobs with dozens of different messages, and a long sweep
meets them. So only a message that names a fault of the request itself ends a submission; all others are retried.
"""

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.engines import slurm_commands
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial

_TIME_MARGIN_SECONDS = 120.0
"""Added to the trial's own time limit, so that the supervisor ends it first and records why."""

_MEMORY_MARGIN_BYTES = 256 << 20
"""Added to the trial's own memory limit: for the supervisor itself, and so that its limit is reached before Slurm's."""

_FULL_PAUSE_SECONDS = 20.0  # until the next submission if the user has too many jobs
_FIRST_PAUSE_SECONDS = 2.0  # after other errors; it doubles with each failure
_LONGEST_PAUSE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Request:
    """The resources that a task requests from Slurm; None leaves the choice to the site.

    Attributes:
        cpus: Cores on each node.
        gpus: Whole GPUs on each node.
        memory_megabytes: Host memory on each node.
        minutes: Time limit.
        nodes: Number of nodes; the supervisor runs on the first.
    """

    cpus: int | None
    gpus: int
    memory_megabytes: int | None
    minutes: int | None
    nodes: int = 1

    @property
    def options(self) -> dict[str, object]:
        """The options of sbatch; None leaves one out."""
        return {
            "nodes": self.nodes,
            "ntasks": self.nodes,
            "ntasks-per-node": 1 if self.nodes > 1 else None,
            "cpus-per-task": self.cpus,
            "gres": f"gpu:{self.gpus}" if self.gpus else None,
            "mem": None if self.memory_megabytes is None else f"{self.memory_megabytes}M",
            "time": self.minutes,
        }


def request_for(
    spec: TrialSpec, *, cpus: int | None, gpus: float, memory_megabytes: int | None, minutes: int | None
) -> Request:
    """The request of a trial: its own settings, or these arguments where it has none. Slurm gets whole GPUs only.

    >>> request_for(TrialSpec("standard", "tiny", 1, 1), cpus=2, gpus=0.5, memory_megabytes=None, minutes=None)
    Request(cpus=2, gpus=1, memory_megabytes=None, minutes=62, nodes=1)
    """
    wall, limit = spec.limits.wall_seconds, spec.limits.memory_bytes
    if minutes is None and wall is not None:
        minutes = math.ceil((wall + _TIME_MARGIN_SECONDS) / 60)
    if memory_megabytes is None and limit is not None:
        memory_megabytes = math.ceil((limit + _MEMORY_MARGIN_BYTES) / (1 << 20))
    a_core_each = spec.processes if spec.processes > 1 else None
    return Request(
        spec.cpus or cpus or a_core_each, math.ceil(spec.gpus or gpus), memory_megabytes, minutes, spec.nodes
    )


def script(
    job_name: str,
    request: Request,
    names_file: Path,
    tasks: int,
    command: Sequence[str],
    *,
    parallelism: int | None,
    partition: str | None,
    extra: Mapping[str, object],
    avoid: Sequence[str] = (),
) -> str:
    """The batch script. Task i runs the command for line i + 1 of the names file.

    A line holds a trial's name, a blank and its attempt. The command replaces the shell, so it gets Slurm's signals.
    """
    wanted = {key.replace("_", "-"): value for key, value in extra.items()}
    options: dict[str, object] = {
        "job-name": job_name,
        "array": f"0-{tasks - 1}" + (f"%{parallelism}" if parallelism else ""),
        "output": str(names_file.with_suffix("")).replace("%", "%%") + "-%a.log",
        "partition": partition,
        **request.options,
        "exclude": ",".join(avoid) or None,
        # Slurm runs the job again after preemption or a node failure; see flopwatch.sweep.attempts.
        "requeue": True,
        "open-mode": "append",
        **wanted,
    }
    if wanted.get("no-requeue"):
        del options["requeue"]
    return "\n".join(
        [
            "#!/bin/sh",
            *(_option(key, value) for key, value in options.items() if value is not None and value is not False),
            f'trial=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(names_file))})',
            "unset FLOPWATCH_PARENT_PID",
            f'exec {shlex.join(command)} "${{trial% *}}" "${{trial##* }}"',
            "",
        ]
    )


def _option(key: str, value: object) -> str:
    return f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}"


@dataclass(slots=True)
class Array:
    """Trials with the same request.

    Attributes:
        trials: In the order of the tasks.
        names: The file with their names; the script is in the same folder.
        write_script: Writes the script, with or without the list of nodes to avoid.
        tries: Number of failed submissions.
        since: Time of the first failed submission.
        next_try: Time of the next submission.
        message: Slurm's last message.
        is_full: Slurm refuses only because this user has too many jobs, which is retried without end.
    """

    trials: Sequence[Trial]
    names: Path
    write_script: Callable[[bool], None]
    tries: int = 0
    since: float = 0.0
    next_try: float = 0.0
    message: str = ""
    is_full: bool = False

    @property
    def script(self) -> Path:
        return self.names.with_suffix(".sh")


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a round of submissions.

    Attributes:
        placed: Arrays that Slurm accepted, with their job numbers.
        ended: Trials that will not be submitted again.
    """

    placed: list[tuple[Array, str]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


class Outbox:
    """The arrays that Slurm has not accepted yet.

    Args:
        job_name: The job name of all arrays of this sweep.
        patience_seconds: How long a submission is retried before its trials are lost.
    """

    def __init__(self, job_name: str, patience_seconds: float) -> None:
        self._job_name, self._patience = job_name, patience_seconds
        self._arrays: list[Array] = []

    def __len__(self) -> int:
        return sum(len(array.trials) for array in self._arrays)

    def add(self, array: Array) -> None:
        array.write_script(True)
        self._arrays.append(array)

    def send(self) -> Sent:
        """Submit the arrays whose time has come."""
        sent = Sent()
        for array in [array for array in self._arrays if time.monotonic() >= array.next_try]:
            outcome = self._try_to_submit(array)
            if outcome is None:
                continue
            self._arrays.remove(array)
            if isinstance(outcome, str):
                sent.placed.append((array, outcome))
            else:
                sent.ended.extend(Ended(trial.name, outcome) for trial in array.trials)
        return sent

    def _try_to_submit(self, array: Array) -> str | Mapping[str, Any] | None:
        """The job number; or the evidence of a final refusal; or None to submit it again later."""
        try:
            return self._submit(array)
        except slurm_commands.QueueFullError as error:
            array.is_full, array.message = True, str(error)
            array.next_try = time.monotonic() + _FULL_PAUSE_SECONDS
            return None
        except slurm_commands.RefusedError as error:
            return {"state": "REFUSED", "detail": str(error)}
        except slurm_commands.NotNowError as error:
            return self._postponed(array, str(error))

    def _submit(self, array: Array) -> str:
        # An earlier submission without an answer may have succeeded, so look for it before submitting again.
        try:
            return slurm_commands.submit(array.script, self._job_name, may_have_arrived=array.tries > 0)
        except slurm_commands.RefusedError:
            if not array.trials[0].avoid:
                raise
            array.write_script(False)  # no other node fits, so allow all
            return slurm_commands.submit(array.script, self._job_name, may_have_arrived=False)

    def _postponed(self, array: Array, message: str) -> Mapping[str, Any] | None:
        now = time.monotonic()
        if array.tries == 0:
            array.since = now
        if now - array.since > self._patience:
            hours = self._patience / 3600
            return {"state": "NOT_TAKEN", "detail": f"Slurm did not accept the job for {hours:.3g} h: {message}"}
        array.next_try = now + min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0**array.tries)
        array.tries, array.is_full, array.message = array.tries + 1, False, message
        return None

    def take_back(self) -> list[Array]:
        """Remove and return all arrays, including those that Slurm may have accepted without an answer."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def state(self) -> str:
        """Why arrays wait; empty if none does."""
        if not self._arrays:
            return ""
        last = max(self._arrays, key=lambda array: array.tries)
        if last.is_full:
            return f"{len(self)} held back: Slurm accepts no more jobs of this user"
        wait = max(0.0, min(array.next_try for array in self._arrays) - time.monotonic())
        return f"{len(self)} held back, next try in {wait:.0f} s: {last.message[:200]}"

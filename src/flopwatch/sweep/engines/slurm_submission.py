"""Writes the batch scripts of Slurm array jobs, and submits them until Slurm accepts them.

A controller that restarts or is overloaded rejects jobs with dozens of different messages. Therefore a submission is
given up only if the message says that the request is wrong. After all other messages it is retried.
"""

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.engines import slurm_commands
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial

_TIME_MARGIN_SECONDS = 120.0
"""Slurm's time limit is this much larger than the trial's own, so that the supervisor ends the trial first."""

_MEMORY_MARGIN_BYTES = 256 << 20
"""Slurm's memory limit is this much larger than the trial's own, because the supervisor needs memory too."""

_FULL_PAUSE_SECONDS = 20.0  # Time until the next submission if the user has too many jobs.
_FIRST_PAUSE_SECONDS = 2.0  # Pause before a retry, unless the user has too many jobs. Each further error doubles it.
_LONGEST_PAUSE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Request:
    """The resources that a task requests from Slurm: cores, GPUs and host memory on each node, and the time limit.

    None means the site's default.
    """

    cpus: int | None
    gpus: int
    memory_megabytes: int | None
    minutes: int | None
    nodes: int = 1

    @property
    def options(self) -> dict[str, object]:
        """Return the options for sbatch. Those with the value None are not written to the script."""
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
    """Return a trial's request to Slurm. `cpus` and `gpus` apply if `spec` sets none; the others override its limits.

    GPU fractions are rounded up, because Slurm allocates whole GPUs only.

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
    """Return the text of the batch script. Task i runs the command for line i + 1 of the names file.

    Each line contains a trial's name, a blank and its attempt. The script calls the command with exec, so that the
    command receives Slurm's signals.
    """
    wanted = {key.replace("_", "-"): value for key, value in extra.items()}
    options: dict[str, object] = {
        "job-name": job_name,
        "array": f"0-{tasks - 1}" + (f"%{parallelism}" if parallelism else ""),
        "output": str(names_file.with_suffix("")).replace("%", "%%") + "-%a.log",
        "partition": partition,
        **request.options,
        "exclude": ",".join(avoid) or None,
        # Let Slurm run the job again after preemption or a node failure (see flopwatch.sweep.attempts).
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
    """An array job that Slurm has not accepted yet.

    Attributes:
        trials: The trials in the order of the tasks. All request the same resources.
        names: Path of the file with their names. The script is in the same folder.
        write_script: Writes the script. The argument says whether to exclude the nodes of failed attempts.
        tries: Number of failed submissions, of which the first was at the time `since`.
        is_full: Whether the last error was that the user has too many jobs. Then the submission is retried without end.
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


class Outbox:
    """Submits arrays until Slurm has accepted them.

    Args:
        job_name: The job name of all arrays of this sweep.
        patience_seconds: How long a submission is retried. After that its trials are recorded as lost.
    """

    def __init__(self, job_name: str, patience_seconds: float) -> None:
        self._job_name, self._patience = job_name, patience_seconds
        self._arrays: list[Array] = []

    def __len__(self) -> int:
        return sum(len(array.trials) for array in self._arrays)

    def add(self, array: Array) -> None:
        array.write_script(True)
        self._arrays.append(array)

    def send(self) -> tuple[list[tuple[Array, str]], list[Ended]]:
        """Submit the arrays whose `next_try` has passed.

        Returns:
            The arrays that Slurm accepted with their job numbers, and the trials that will not be submitted again.
        """
        placed, ended = [], []
        for array in [array for array in self._arrays if time.monotonic() >= array.next_try]:
            outcome = self._try_to_submit(array)
            if outcome is None:
                continue
            self._arrays.remove(array)
            if isinstance(outcome, str):
                placed.append((array, outcome))
            else:
                ended += [Ended(trial.name, outcome) for trial in array.trials]
        return placed, ended

    def _try_to_submit(self, array: Array) -> str | Mapping[str, Any] | None:
        """Return the job number; None if the submission must be retried; if it is given up, a dict that says why."""
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
        # Slurm may have accepted an earlier submission although sbatch reported an error.
        try:
            return slurm_commands.submit(array.script, self._job_name, may_have_arrived=array.tries > 0)
        except slurm_commands.RefusedError:
            if not array.trials[0].avoid:
                raise
            array.write_script(False)  # allow the excluded nodes, because perhaps only they have the resources
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
        """Remove and return all arrays. Slurm may have accepted some of them although sbatch reported an error."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def state(self) -> str:
        """Return why arrays are waiting; "" if none is."""
        if not self._arrays:
            return ""
        last = max(self._arrays, key=lambda array: array.tries)
        if last.is_full:
            return f"{len(self)} held back: Slurm accepts no more jobs of this user"
        wait = max(0.0, min(array.next_try for array in self._arrays) - time.monotonic())
        return f"{len(self)} held back, next try in {wait:.0f} s: {last.message[:200]}"

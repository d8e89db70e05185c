"""The batch script of an array of trials. Pure."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flopwatch.trial_records import TrialSpec

_TIME_MARGIN_SECONDS = 120.0
"""Our supervisor ends a trial at its limit and says why; Slurm's own limit comes later and says nothing."""

_MEMORY_MARGIN_BYTES = 256 << 20
"""For the supervisor, and so that its memory limit is met before Slurm's."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a task asks of Slurm; None leaves it to the site.

    Attributes:
        cpus: Cores, on each node.
        gpus: Whole GPUs, on each node.
        memory_megabytes: Host memory, on each node.
        minutes: Time limit.
        nodes: How many; the supervisor is on the first.
    """

    cpus: int | None
    gpus: int
    memory_megabytes: int | None
    minutes: int | None
    nodes: int = 1


def request_for(
    spec: TrialSpec, *, cpus: int | None, gpus: float, memory_megabytes: int | None, minutes: int | None
) -> Request:
    """What this trial asks for; the arguments count where its configuration is silent. A share of a GPU is a whole one.

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
    """The whole script. Task i runs the command, in place of the shell, for line i + 1 of the names file.

    A line holds a trial's name, a blank and its attempt.
    """
    wanted = {key.replace("_", "-"): value for key, value in extra.items()}
    options: dict[str, object] = {
        "job-name": job_name,
        "array": f"0-{tasks - 1}" + (f"%{parallelism}" if parallelism else ""),
        "output": str(names_file.with_suffix("")).replace("%", "%%") + "-%a.log",
        "partition": partition,
        "nodes": request.nodes,
        "ntasks": request.nodes,
        "ntasks-per-node": 1 if request.nodes > 1 else None,
        "cpus-per-task": request.cpus,
        "gres": f"gpu:{request.gpus}" if request.gpus else None,
        "mem": None if request.memory_megabytes is None else f"{request.memory_megabytes}M",
        "time": request.minutes,
        "exclude": ",".join(avoid) or None,
        # After preemption or the death of its node Slurm runs the job again; see flopwatch.sweep.requeued.
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

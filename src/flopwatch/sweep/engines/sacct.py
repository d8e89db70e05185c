"""What Slurm's commands print, read. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SQUEUE_FORMAT = "%F_%K|%T|%o"
"""Array job, task, state, and the script, last because a path may hold anything."""

SACCT_FORMAT = "JobID,State,ExitCode,MaxRSS,Elapsed,NodeList"

_UNIT_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_NOT_OVER = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT")


@dataclass(frozen=True, slots=True)
class Queued:
    """A task that Slurm still has.

    Attributes:
        task: `ARRAYJOB_INDEX`.
        is_pending: It has not begun.
        script: The batch script it was submitted with.
    """

    task: str
    is_pending: bool
    script: str


@dataclass(frozen=True, slots=True)
class Accounted:
    """How Slurm says a task ended; None is what it does not tell.

    Attributes:
        state: `COMPLETED`, `FAILED`, `TIMEOUT`, `CANCELLED`, `NODE_FAIL`, `OUT_OF_MEMORY`, ...
        exit_code: Of the batch script.
        signal: That ended the batch script.
        max_rss_bytes: The largest of its steps.
        elapsed_seconds: From start to end.
        node: Where it ran.
    """

    state: str
    exit_code: int | None = None
    signal: int | None = None
    max_rss_bytes: int | None = None
    elapsed_seconds: int | None = None
    node: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state not in _NOT_OVER


def read_squeue(text: str) -> list[Queued]:
    """The lines of `squeue -h -r -o SQUEUE_FORMAT`.

    >>> read_squeue("12_0|PENDING|/data/a.sh")
    [Queued(task='12_0', is_pending=True, script='/data/a.sh')]
    """
    rows = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
    return [Queued(task.strip(), state.strip() == "PENDING", script.strip()) for task, state, script in rows]


def read_sacct(text: str) -> dict[str, Accounted]:
    """The lines of `sacct -P -n -o SACCT_FORMAT`, by task; the steps of a task are folded into it.

    An array whose tasks have not begun stands as `12_[3-5]` and is left out.

    >>> read_sacct("12_0|CANCELLED by 0|0:15||00:01:02|n1")["12_0"].elapsed_seconds
    62
    """
    tasks: dict[str, Accounted] = {}
    step_rss: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6 or "[" in fields[0]:
            continue
        name, state, exit_code, rss, elapsed, node = (field.strip() for field in fields)
        task, is_step, _ = name.partition(".")
        if (used := read_bytes(rss)) is not None:
            step_rss[task] = max(used, step_rss.get(task, 0))
        if not is_step:
            code, signal = _read_exit(exit_code)
            word = state.partition(" ")[0]
            where = None if node in ("", "None assigned") else node
            tasks[task] = Accounted(word, code, signal, None, read_seconds(elapsed), where)
    return {task: _with_rss(found, step_rss.get(task)) for task, found in tasks.items()}


def read_scontrol(text: str) -> dict[str, Accounted]:
    """The lines of `scontrol -o show job`, by task: what sites without accounting have, for some minutes.

    >>> read_scontrol("JobId=14 ArrayJobId=12 ArrayTaskId=1 JobState=NODE_FAIL ExitCode=1:0 NodeList=n2")["12_1"].node
    'n2'
    """
    tasks: dict[str, Accounted] = {}
    for line in text.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "ArrayTaskId" not in facts or not facts["ArrayTaskId"].isdigit():
            continue
        code, signal = _read_exit(facts.get("ExitCode", ""))
        node = facts.get("NodeList")
        tasks[f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"] = Accounted(
            facts.get("JobState", ""), code, signal, node=None if node in (None, "", "(null)") else node
        )
    return tasks


def _with_rss(found: Accounted, rss: int | None) -> Accounted:
    return Accounted(found.state, found.exit_code, found.signal, rss, found.elapsed_seconds, found.node)


def _read_exit(text: str) -> tuple[int | None, int | None]:
    """`7:0` is exit code 7, `0:9` is signal 9."""
    code, colon, signal = text.partition(":")
    if not colon or not code.isdigit() or not signal.isdigit():
        return None, None
    return (None, int(signal)) if int(signal) else (int(code), None)


def read_bytes(text: str) -> int | None:
    """`1234K`, `1.5G`; empty while nothing was sampled.

    >>> read_bytes("1.5G")
    1610612736
    """
    number = text[:-1] if text[-1:] in _UNIT_BYTES else text
    try:
        return int(float(number) * _UNIT_BYTES.get(text[-1:], 1))
    except ValueError:
        return None


def read_seconds(text: str) -> int | None:
    """`[days-]hours:minutes:seconds`.

    >>> read_seconds("1-00:00:01")
    86401
    """
    days, dash, clock = text.rpartition("-")
    try:
        seconds = int(days) * 86400 if dash else 0
        for factor, part in zip((1, 60, 3600), reversed(clock.split(":")), strict=False):
            seconds += factor * int(part)
        return seconds
    except ValueError:
        return None


def job_list(tasks: Iterable[str]) -> Sequence[str]:
    """The array jobs of these tasks, for `-j`: whole arrays, as thousands of single tasks are too long a line."""
    return sorted({task.partition("_")[0] for task in tasks}, key=int)

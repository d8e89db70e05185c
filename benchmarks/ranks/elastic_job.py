"""Kill three workers of a torchrun job, stop one, and compare the logged goodput with the operating system's clock.

    python benchmarks/ranks/elastic_job.py

The truth is kept outside the monitor: this process sees the workers' processes start, every worker keeps a diary of its
steps and checkpoints in unix time, and the classes of lost time are computed here from those alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from flopwatch.runs import RunLog, read_log
from ranks.elastic_worker import BATCH, POSITIONS

WORKER = Path(__file__).with_name("elastic_worker.py")
RANKS = 2
RANKS_IN_TOTALS = RANKS
"""Whose tokens the log's totals hold: 1 for the logging rank's own, RANKS for the sum over all."""
TOKENS_PER_STEP = BATCH * POSITIONS * RANKS_IN_TOTALS
KILLS = ((1, 62), (0, 141), (1, 233))
"""Rank and step: each some way behind a checkpoint."""
STOP = (1, 290, 2.0)
"""Rank, step and seconds: it is stopped, and the others wait for it."""
LAST_STEP = 330
CLASSES = ("productive", "start_up", "compile", "stall", "checkpoint", "count", "rerun", "restart", "other")
_TIME_LIMIT_SECONDS = 300.0
_LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class Session:
    """What rank 0 did in one attempt, by the operating system's clock.

    Attributes:
        process_began: When its process was first seen.
        first_step_began: After start-up.
        step_seconds: By step, each from the end of what came before it, so that nothing lies between steps.
        count_seconds: Between the first step and the second, where flopwatch counts FLOPs.
        checkpoint_seconds: All checkpoints.
        last_sign: The diary's last entry.
    """

    process_began: float
    first_step_began: float
    step_seconds: Mapping[int, float]
    count_seconds: float
    checkpoint_seconds: float
    last_sign: float


@dataclass(frozen=True)
class Outcome:
    """The log of a job that was killed, and the truth."""

    log: RunLog
    sessions: Sequence[Session]
    logged: dict[str, float]
    truth: dict[str, float]

    @property
    def goodput_error(self) -> float:
        return self.logged["goodput"] / self.truth["goodput"] - 1


def run_elastic(folder: Path, kills: Sequence[tuple[int, int]] = KILLS, last_step: int = LAST_STEP) -> Outcome:
    """One job to its end; torchrun starts its workers again after each kill."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += [f"--max-restarts={len(kills)}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it torch itself recovered 4 times of 8
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(WORKER.parent), os.environ.get("PYTHONPATH")])),
    }
    with (folder / "torchrun.txt").open("w") as output:
        job = subprocess.Popen(
            [*command, str(WORKER), str(folder), str(last_step)], env=environment, stdout=output, stderr=output
        )
        try:
            began = _watch(job, folder, list(kills))
        finally:
            job.kill()
            job.wait()
    if job.returncode:
        raise RuntimeError(f"torchrun ended with {job.returncode}: {(folder / 'torchrun.txt').read_text()[-3000:]}")
    log = read_log(folder / "run" / "training_log.jsonl")
    sessions = [_session(folder, attempt, began) for attempt in range(len(kills) + 1)]
    return Outcome(log, sessions, _logged(log), _truth(sessions))


def _watch(job: "subprocess.Popen[bytes]", folder: Path, kills: list[tuple[int, int]]) -> dict[int, float]:
    """See processes start, kill and stop them; the moment each process was first seen."""
    began: dict[int, float] = {}
    attempt, has_stopped = 0, False
    deadline = time.monotonic() + _TIME_LIMIT_SECONDS
    while job.poll() is None:
        for pid in _children(job.pid):
            began.setdefault(pid, time.time())
        rank, step = kills[0] if kills else STOP[:2]
        diary = folder / f"diary_{attempt}_{rank}.jsonl"
        if not has_stopped and _has_done(diary, step):
            pid = next(_entries(diary))["pid"]
            if kills:
                os.kill(pid, signal.SIGKILL)
                del kills[0]
                attempt += 1
            else:
                has_stopped = True
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOP[2])
                os.kill(pid, signal.SIGCONT)
        if time.monotonic() > deadline:
            raise TimeoutError((folder / "torchrun.txt").read_text()[-3000:])
        time.sleep(_LOOK_SECONDS)
    return began


def _has_done(diary: Path, step: int) -> bool:
    return diary.exists() and f'"step": {step}}}'.encode() in diary.read_bytes()


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, task.read_text().split())
        except OSError:  # the thread has ended
            continue


def _entries(diary: Path) -> Iterator[dict[str, Any]]:
    for line in diary.read_text().splitlines():
        yield json.loads(line)


def _session(folder: Path, attempt: int, began: dict[int, float]) -> Session:
    process, *entries = _entries(folder / f"diary_{attempt}_0.jsonl")
    first, second = (entry for entry in entries[:2])
    before, step_seconds, checkpoint_seconds = first["began"], {}, 0.0
    for entry in entries:
        since = second["began"] if entry is second else before
        if entry["kind"] == "step":
            step_seconds[entry["step"]] = entry["unix_time"] - since
        elif entry["kind"] == "checkpoint":
            checkpoint_seconds += entry["unix_time"] - since
        before = entry["unix_time"]
    return Session(
        began[process["pid"]],
        first["began"],
        step_seconds,
        second["began"] - first["unix_time"],
        checkpoint_seconds,
        entries[-1]["unix_time"],
    )


def _truth(sessions: Sequence[Session]) -> dict[str, float]:
    """Every step that was run again counts once; what a slow one took beyond the median is lost."""
    spent = dict.fromkeys(CLASSES, 0.0)
    for number, session in enumerate(sessions):
        later = sessions[number + 1 :]
        resumed = min((min(other.step_seconds) for other in later), default=sys.maxsize)
        typical = median(session.step_seconds.values())
        is_warming_up = True
        for step, took in session.step_seconds.items():
            is_warming_up = is_warming_up and took > 1.5 * typical
            excess = took - typical if is_warming_up or took > 5 * typical else 0.0
            if step >= resumed:
                spent["rerun"] += took
            else:
                spent["productive"] += took - excess
                spent["compile" if is_warming_up else "stall"] += excess
        spent["start_up"] += session.first_step_began - session.process_began
        spent["checkpoint"] += session.checkpoint_seconds
        spent["count"] += session.count_seconds
        if later:
            spent["restart"] += later[0].process_began - session.last_sign
    wall = sessions[-1].last_sign - sessions[0].process_began
    spent["other"] = wall - sum(spent.values())
    return {**spent, "wall": wall, "goodput": spent["productive"] / wall}


def _logged(log: RunLog) -> dict[str, float]:
    if log.summary is None:
        raise RuntimeError("the log has no summary")
    values = log.summary.values
    times = {key[5:-8]: value for key, value in values.items() if key.startswith("time/")}
    return {**times, "goodput": values["perf/goodput"]}


def table_of(outcome: Outcome) -> Table:
    """Seconds by class, as logged and by the operating system's clock."""
    table = Table("", "logged", "operating system", "difference")
    for name in ("wall", *CLASSES):
        logged, truth = outcome.logged.get(name, 0.0), outcome.truth.get(name, 0.0)
        table.add_row(name, f"{logged:.3f} s", f"{truth:.3f} s", f"{logged - truth:+.3f} s")
    logged, truth = outcome.logged["goodput"], outcome.truth["goodput"]
    table.add_row("goodput", f"{logged:.4%}", f"{truth:.4%}", f"{outcome.goodput_error:+.3%} of it")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcome = run_elastic(folder)
    values = outcome.log.summary.values if outcome.log.summary else {}
    console = Console()
    console.print(table_of(outcome))
    console.print(
        f"{len(outcome.log.starts)} sessions in one log; {values['total/steps']} steps and {values['total/tokens']} "
        f"tokens, truly {LAST_STEP} and {LAST_STEP * TOKENS_PER_STEP}; {folder}"
    )


if __name__ == "__main__":
    main()

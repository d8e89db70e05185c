"""Trials of two processes on this machine: their figures, every ending of one of them, and kills from outside.

    python benchmarks/sweeps/many_processes.py

Prints a row for each trial: what was expected, what was told, and processes left. About five minutes on two cores.
"""

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flopwatch.process import read_stat
from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialResult, TrialSpec
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.folder import Trial, prepare, result_file
from flopwatch.sweep.progress import read_progress

ENDINGS = {
    "OneRaises": "error",
    "OneRaisesInBackward": "error",
    "OneIsKilled": "crash",
    "OneSegfaults": "crash",
    "OneIsOutOfMemory": "oom_host",
    "OneLeaves": "error",
    "OneEatsMemory": "oom_host",
    "OneHangs": "hang",
}
SILENCE_SECONDS = 40.0  # longer than torchrun and its processes need to start on a busy machine
KILLS = {
    "supervisor": (None, "lost"),
    "torchrun": ("crash",),
    "cancel": ("cancelled",),
}


def spec(trainer: str = "standard", **settings: Any) -> TrialSpec:
    memory = 1500 << 20 if trainer.endswith("OneEatsMemory") else None
    limits = Limits(300.0, SILENCE_SECONDS if trainer.endswith("OneHangs") else 200.0, memory)
    fixed: dict[str, Any] = {"steps": 5, "warmup_steps": 1, "trace": False, "device": "cpu", "limits": limits}
    return TrialSpec(trainer, "tiny", 4, 16, **{**fixed, "processes": 2, "layout": "ddp", **settings})


def placed(engine: LocalEngine, sweep: Path, trial_spec: TrialSpec, do: Callable[[Trial], None]) -> TrialResult | None:
    """One trial to its end; something is done to it meanwhile."""
    for name in ("trials", "logs", "runs"):
        (sweep / name).mkdir(parents=True, exist_ok=True)
    trial = Trial(sweep, "t", "key", trial_spec)
    prepare(trial)
    engine.open(sweep, [])
    try:
        while not engine.room(trial_spec):
            time.sleep(0.1)
        engine.submit([trial])
        is_done = False
        while not engine.wait(0.1):
            if not is_done and read_progress(trial_folder(sweep, "t")).phase in ("measure", "warmup"):
                is_done = True
                do(trial)
    finally:
        engine.close()
    return read_result(result_file(sweep, "t"))


def processes(trial: Trial, words: str) -> list[int]:
    """Processes of this trial whose command line has these words."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if entry.name.isdigit() and words in line and str(trial.sweep) in line:
                found.append(int(entry.name))
    guards = {stat.parent for pid in found if (stat := read_stat(pid)) is not None}
    return [pid for pid in found if pid not in guards]


def kill(engine: LocalEngine, what: str) -> Callable[[Trial], None]:
    def do(trial: Trial) -> None:
        if what == "cancel":
            engine.cancel()
            return
        folder = trial_folder(trial.sweep, trial.name)
        words = "flopwatch.sweep.supervisor " if what == "supervisor" else f"worker.torchrun {folder} "
        for pid in processes(trial, words):
            os.kill(pid, signal.SIGKILL)

    return do


def row(what: str, expected: tuple[str | None, ...], result: TrialResult | None, sweep: Path) -> None:
    from testbeds.trial_processes import left_behind

    told = None if result is None else result.outcome
    left, deadline = left_behind(sweep), time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = left_behind(sweep)
    verdict = "right" if told in expected and not left else "WRONG"
    reason = "" if result is None else result.reason
    if told == "hang" and result is not None:
        reason += "; its stack is told" if "go_wrong" in result.stacks.partition("rank 1:")[2] else "; NO STACK"
    print(f"{verdict} | {what} | {told} | {len(left)} left | {reason}", flush=True)


def leave_alone(trial: Trial) -> None:
    """Nothing is done to it."""


def figures(root: Path) -> None:
    single = replace(spec(), processes=1, layout=None)
    alone = placed(LocalEngine(gpus=()), root / "alone", single, leave_alone)
    assert alone is not None
    assert alone.measured.cost is not None
    for layout in ("ddp", "fsdp"):
        job = placed(LocalEngine(gpus=()), root / layout, spec(layout=layout), leave_alone)
        cost = job.measured.cost if job else None
        same = cost is not None and (cost.model_flops, cost.hardware_flops) == (
            alone.measured.cost.model_flops,
            alone.measured.cost.hardware_flops,
        )
        row(f"{layout}: FLOPs as alone {same}", ("ok",) if same else (), job, root / layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endings", nargs="+", default=list(ENDINGS))
    parser.add_argument("--parts", nargs="+", default=["figures", "endings", "kills"])
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="flopwatch-many-")).resolve()
    if "figures" in asked.parts:
        figures(root)
    for trainer in asked.endings if "endings" in asked.parts else ():
        engine = LocalEngine(gpus=())
        result = placed(engine, root / trainer, spec(f"testbeds.rank_endings:{trainer}"), leave_alone)
        row(trainer, (ENDINGS[trainer],), result, root / trainer)
    for what, expected in KILLS.items() if "kills" in asked.parts else ():
        engine = LocalEngine(gpus=())
        result = placed(engine, root / what, spec(steps=2000), kill(engine, what))
        row(f"killed: {what}", expected, result, root / what)


if __name__ == "__main__":
    main()

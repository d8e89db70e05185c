"""Trials of several processes under every engine: their figures, every ending of one of many, and kills from outside.

    python benchmarks/sweeps/many_processes.py --engines local slurm ray

Two processes on this machine, on two nodes of a real Slurm, and on two nodes of a Ray cluster. Prints a row for each
trial: what was expected, what was told, and processes left. About half an hour on two cores.
"""

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flopwatch.process import read_stat
from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialResult, TrialSpec
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.engines.protocol import Engine
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
    "agent 0": ("crash",),
    "agent 1": ("lost",),
    "cancel": ("cancelled",),
}


def spec(engine: str, trainer: str = "standard", **settings: Any) -> TrialSpec:
    memory = 1500 << 20 if trainer.endswith("OneEatsMemory") else None
    limits = Limits(300.0, SILENCE_SECONDS if trainer.endswith("OneHangs") else 200.0, memory)
    shape = {"processes": 2} if engine == "local" else {"nodes": 2}
    fixed: dict[str, Any] = {"steps": 5, "warmup_steps": 1, "trace": False, "device": "cpu", "limits": limits}
    return TrialSpec(trainer, "tiny", 4, 16, **{**fixed, **shape, "layout": "ddp", **settings})


def placed(engine: Engine, sweep: Path, trial_spec: TrialSpec, do: Callable[[Trial], None]) -> TrialResult | None:
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
            if entry.name.isdigit() and words in line and str(trial.sweep) in line and "srun" not in line:
                found.append(int(entry.name))
    guards = {stat.parent for pid in found if (stat := read_stat(pid)) is not None}
    return [pid for pid in found if pid not in guards]


def kill(engine: Engine, what: str) -> Callable[[Trial], None]:
    def do(trial: Trial) -> None:
        if what == "cancel":
            engine.cancel()
            return
        folder = trial_folder(trial.sweep, trial.name)
        words = "flopwatch.sweep.supervisor " if what == "supervisor" else f"supervisor.ranks {folder} "
        pids = processes(trial, words)
        if what != "supervisor":
            first = [
                pid for pid in pids if f"{folder} 0 " in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            ]
            pids = first if what == "agent 0" else [pid for pid in pids if pid not in first]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return do


def row(engine: str, what: str, expected: tuple[str | None, ...], result: TrialResult | None, sweep: Path) -> None:
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
    print(f"{verdict} | {engine} | {what} | {told} | {len(left)} left | {reason}", flush=True)


def leave_alone(trial: Trial) -> None:
    """Nothing is done to it."""


def figures(name: str, make: Callable[[], Any], root: Path) -> None:
    from flopwatch.sweep.engines.local import LocalEngine

    single = replace(spec("local"), processes=1, layout=None)
    alone = placed(LocalEngine(gpus=()), root / "alone", single, leave_alone)
    assert alone is not None
    assert alone.measured.cost is not None
    for layout in ("ddp", "fsdp"):
        job = placed(make(), root / layout, spec(name, layout=layout), leave_alone)
        cost = job.measured.cost if job else None
        same = cost is not None and (cost.model_flops, cost.hardware_flops) == (
            alone.measured.cost.model_flops,
            alone.measured.cost.hardware_flops,
        )
        row(name, f"{layout}: FLOPs as alone {same}", ("ok",) if same else (), job, root / layout)


@contextlib.contextmanager
def engines(name: str) -> Iterator[Callable[[], Any]]:
    if name == "local":
        from flopwatch.sweep.engines.local import LocalEngine

        yield lambda: LocalEngine(gpus=())
    elif name == "slurm":
        from flopwatch.sweep.engines.slurm import SlurmEngine
        from sweeps.campaign import slurm

        with slurm():
            yield lambda: SlurmEngine()
    else:
        from flopwatch.sweep.engines.ray import RayEngine
        from testbeds.real_ray import ray_cluster

        with ray_cluster() as cluster:
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            yield lambda: RayEngine(address=cluster.address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["local", "slurm", "ray"])
    parser.add_argument("--endings", nargs="+", default=list(ENDINGS))
    parser.add_argument("--parts", nargs="+", default=["figures", "endings", "kills"])
    asked = parser.parse_args()
    for name in asked.engines:
        root = Path(tempfile.mkdtemp(prefix="flopwatch-many-")).resolve()
        with engines(name) as make:
            if "figures" in asked.parts:
                figures(name, make, root)
            for trainer in asked.endings if "endings" in asked.parts else ():
                outcome = ENDINGS[trainer]
                result = placed(make(), root / trainer, spec(name, f"testbeds.rank_endings:{trainer}"), leave_alone)
                row(name, trainer, (outcome,), result, root / trainer)
            for what, expected in KILLS.items() if "kills" in asked.parts else ():
                if (name, what) == ("local", "agent 1"):
                    continue
                engine, sweep = make(), root / what.replace(" ", "-")
                result = placed(engine, sweep, spec(name, steps=2000), kill(engine, what))
                row(name, f"killed: {what}", expected, result, sweep)


if __name__ == "__main__":
    main()

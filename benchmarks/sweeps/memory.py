"""What the memory figure of a trial is worth: against the kernel's own PSS, from run to run, and what looking costs.

    python benchmarks/sweeps/memory.py --parts loaders,repeats,looking,cost

`loaders`: trees of forked loaders that share memory, the reported figure against the PSS that this process reads from
smaps_rollup meanwhile. `repeats`: the same trial several times, how far its figures lie apart: the jitter of the edge.
`looking`: processor time of looking at such trees, as a share of a core. `cost`: step times of the same trial with the
supervisor looking at its memory and without, in turns; it needs a quiet machine.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialResult, TrialSpec
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.folder import Trial, held_folder, prepare
from flopwatch.sweep.host.memory import TreeMemory
from flopwatch.sweep.supervisor.supervise import supervise

MIB = 2**20

LOADERS = f"""
import os, sys, time
count, shared, own = (int(word) for word in sys.argv[1:4])
held = b"x" * (shared * {MIB})
for _ in range(count):
    if not os.fork():
        mine = b"y" * (own * {MIB})
        time.sleep(600)
time.sleep(float(sys.argv[4]))
"""

TRAINER = f"""
import os, time, torch
from flopwatch.sweep.trainers.builtin import StandardTrainer


class WithLoaders(StandardTrainer):
    '''Forks four loaders that share 400 MiB with it, and waits for nothing of theirs.'''

    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.dataset = torch.ones(400 * {MIB}, dtype=torch.uint8)
        for _ in range(4):
            if not os.fork():
                time.sleep(600)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="loaders,repeats,looking,cost")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flopwatch-memory-"))
    (folder / "loaders.py").write_text(LOADERS)
    (folder / "with_loaders.py").write_text(TRAINER)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    parts = {"loaders": measure_loaders, "repeats": measure_repeats, "looking": measure_looking, "cost": measure_cost}
    try:
        with held_folder(folder / "sweep"):
            for part in asked.parts.split(","):
                parts[part](folder / "sweep", asked.rounds, asked.steps)
    finally:
        shutil.rmtree(folder)


def measure_loaders(sweep: Path, rounds: int, steps: int) -> None:
    for count, shared, own in ((8, 500, 5), (4, 100, 50), (1, 800, 20), (16, 50, 10)):
        script = sweep.parent / "loaders.py"
        command = f"exec {sys.executable} {script} {count} {shared} {own} 4"
        name = _prepared(sweep, TrialSpec("command", "none", 1, 1, command=command, limits=Limits(60.0, None)))
        supervisor = subprocess.Popen([sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), name])
        truth = before = 0
        while supervisor.poll() is None:
            # Processes are read one after the other: a fork in between would count what they share twice.
            now = _pss_bytes(trial_folder(sweep, name).resolve())
            truth, before = max(truth, min(before, now)), now
            time.sleep(0.1)
        told = _result(sweep, name).measured.memory.host_bytes or 0
        print(
            f"{count} loaders of {own} MiB, {shared} MiB shared: {told / MIB:.1f} MiB told, "
            f"PSS {truth / MIB:.1f} MiB, {100 * (told / truth - 1):+.1f} %",
            flush=True,
        )


def _pss_bytes(trial_dir: Path) -> int:
    mark, total = f"FLOPWATCH_TRIAL_DIR={trial_dir}".encode(), 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            continue
    return total


def measure_repeats(sweep: Path, rounds: int, steps: int) -> None:
    for trainer, model in (("standard", "tiny"), ("standard", "small"), ("with_loaders:WithLoaders", "tiny")):
        peaks = [_worker(sweep, trainer, model, 5).measured.memory.host_bytes or 0 for _ in range(rounds)]
        middle, spread = median(peaks), max(peaks) - min(peaks)
        print(
            f"{trainer} on {model}, {rounds} times: {middle / MIB:.1f} MiB, least and most "
            f"{spread / MIB:.1f} MiB apart ({100 * spread / middle:.2f} %)",
            flush=True,
        )


def measure_looking(sweep: Path, rounds: int, steps: int) -> None:
    for count, shared, own, limit in ((0, 500, 0, None), (8, 500, 5, None), (8, 500, 5, 600)):
        words = [sys.executable, str(sweep.parent / "loaders.py"), str(count), str(shared), str(own), "60"]
        loaders = subprocess.Popen(words, start_new_session=True)
        try:
            time.sleep(4)
            share = _looking_share(TreeMemory(None if limit is None else limit * MIB), seconds=8.0)
        finally:
            os.killpg(loaders.pid, signal.SIGKILL)
            loaders.wait()
        print(f"{count} loaders, {shared} MiB shared, limit {limit}: {100 * share:.2f} % of a core", flush=True)


def _looking_share(memory: TreeMemory, seconds: float) -> float:
    """As a supervisor looks: five times a second. The first look, which reads everything, is not counted."""
    memory.sample()
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        memory.sample()
        time.sleep(0.2)
    return (time.process_time() - used) / (time.monotonic() - began)


def measure_cost(sweep: Path, rounds: int, steps: int) -> None:
    for trainer in ("standard", "with_loaders:WithLoaders"):
        ratios = []
        for _ in range(rounds):
            seconds = [_step_seconds(sweep, trainer, steps, looks=looks) for looks in (True, False)]
            ratios.append(seconds[0] / seconds[1])
        print(
            f"{trainer}: step time with looking over without, {rounds} pairs: median {median(ratios):.4f} "
            f"({min(ratios):.4f} to {max(ratios):.4f})",
            flush=True,
        )


def _step_seconds(sweep: Path, trainer: str, steps: int, *, looks: bool) -> float:
    steps_times = _worker(sweep, trainer, "small", steps, looks=looks).measured.steps
    assert steps_times is not None
    return steps_times.median


def _worker(sweep: Path, trainer: str, model: str, steps: int, *, looks: bool = True) -> TrialResult:
    spec = TrialSpec(trainer, model, 2, 64, device="cpu", steps=steps, warmup_steps=2, threads=1, trace=False)
    name = _prepared(sweep, replace(spec, limits=Limits(300.0, None)))
    child = os.fork()
    if not child:
        try:
            if not looks:
                TreeMemory.sample = lambda self: None  # type: ignore[method-assign]
            supervise(sweep, name)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    result = _result(sweep, name)
    assert result.outcome == "ok", result.reason
    return result


def _prepared(sweep: Path, spec: TrialSpec) -> str:
    name = f"trial-{time.monotonic_ns()}"
    prepare(Trial(sweep, name, "key", spec))
    return name


def _result(sweep: Path, name: str) -> TrialResult:
    result = read_result(trial_folder(sweep, name) / "result.json")
    assert result is not None
    return result


if __name__ == "__main__":
    main()

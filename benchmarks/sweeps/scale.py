"""Does the runner stay as quick at the ten-thousandth trial as at the first? No trial costs anything here.

python benchmarks/sweeps/scale.py --trials 10000
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from flopwatch.records.trial import Measured, MemoryUse, StepCost, StepTimes, TrialResult, TrialSpec
from flopwatch.sweep.folder import Trial, held_folder, write_trial_list
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import make_plan
from flopwatch.sweep.runner.run import run_plan
from flopwatch.testing import InProcessEngine

_TRAINERS = ("standard", "dpsgd", "ghost", "fast")


@dataclass(frozen=True)
class Figures:
    """Seconds, of the runner alone."""

    trials: int
    first_thousand: float
    last_thousand: float
    resume: float
    report: float

    @property
    def drift(self) -> float:
        """Median seconds per trial in the last tenth over those in the first."""
        return self.last_thousand / self.first_thousand


def specs(count: int) -> list[TrialSpec]:
    """A grid of that many trials."""
    sizes = range(1, count // (len(_TRAINERS) * 10) + 2)
    grid = (
        TrialSpec(trainer, "tiny", batch, 64 * length)
        for trainer in _TRAINERS
        for batch in sizes
        for length in range(1, 11)
    )
    return [spec for spec, _ in zip(grid, range(count), strict=False)]


def made_up(trial: Trial) -> TrialResult:
    """A result as large as a real one."""
    seconds = 1e-3 * trial.spec.batch_size * trial.spec.seq_len / 64
    times = StepTimes(
        10, seconds, 0.99 * seconds, 1.01 * seconds, 0.98 * seconds, 1.02 * seconds, 1.03 * seconds, 2 * seconds, False
    )
    return TrialResult(
        trial.name,
        trial.key,
        trial.spec,
        "ok",
        "ran to its end",
        {"exit_code": 0, "pid": 1},
        phase="done",
        unix_time=time.time(),
        seconds=10.0,
        measured=Measured(
            parameters=200_000,
            steps=times,
            samples_per_s=trial.spec.batch_size / seconds,
            tokens_per_s=trial.spec.batch_size * trial.spec.seq_len / seconds,
            memory=MemoryUse(
                host_bytes=10**8 + 10**6 * trial.spec.batch_size, by_phase={"build": 10**8, "forward": 10**8}
            ),
            cost=StepCost(10**9, 2 * 10**9, "trace", peak={"flops_per_s": 1e11, "kind": "measured"}, mfu=0.1, hfu=0.2),
        ),
        environment={"torch": "2.13.0", "host": "here", "cpu": "some"},
    )


class _Pace:
    """Notes when each trial ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def started(self, trial: Trial) -> None:
        pass

    def ended(self, result: TrialResult) -> None:
        self.ends.append(time.perf_counter())

    def ticked(self, running: object, waiting: int, engine_state: str) -> None:
        pass


def measure(count: int, folder: Path) -> Figures:
    asked = specs(count)
    engine = InProcessEngine(made_up)
    pace = _Pace()
    with held_folder(folder):
        plan = make_plan(folder, asked)
        write_trial_list(folder, plan.trials, engine.name)
        run_plan(plan, engine, pace, Stop())
    gaps = [after - before for before, after in zip(pace.ends, pace.ends[1:], strict=False)]
    tenth = max(10, len(gaps) // 10)
    began = time.perf_counter()
    with held_folder(folder):
        again = make_plan(folder, asked)
        write_trial_list(folder, again.trials, engine.name)
    assert len(again.kept) == count - len(again.todo) == count, "a finished sweep has nothing left to do"
    resume = time.perf_counter() - began
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flopwatch", "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return Figures(count, median(gaps[:tenth]), median(gaps[-tenth:]), resume, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    folder = Path(tempfile.mkdtemp(prefix="flopwatch-scale-"))
    try:
        figures = measure(parser.parse_args().trials, folder)
    finally:
        shutil.rmtree(folder)
    for name, value in asdict(figures).items():
        print(f"{name:>16} {value:.4g}")
    print(f"{'drift':>16} {figures.drift:.3f}")


if __name__ == "__main__":
    main()

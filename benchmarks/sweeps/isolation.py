"""Does a thousand trials leave anything behind in the parent or in each other? Real processes, one per trial.

python benchmarks/sweeps/isolation.py --trials 1000
"""

import argparse
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import Limits, TrialResult, TrialSpec
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.folder import Trial, held_folder, write_trial_list
from flopwatch.sweep.host.memory import resident
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import make_plan
from flopwatch.sweep.runner.run import run_plan


@dataclass(frozen=True)
class Isolation:
    """Attributes:
    trials: How many ran, all with outcome `ok`.
    parent_growth_bytes: Resident memory of the runner's process, after less before.
    distinct_processes: Different worker processes seen.
    first_trials_bytes: Median peak memory of the first hundred trials; of the last hundred beside it.
    """

    trials: int
    parent_growth_bytes: int
    distinct_processes: int
    first_trials_bytes: float
    last_trials_bytes: float


class _Quiet:
    def started(self, trial: Trial) -> None:
        pass

    def ended(self, result: TrialResult) -> None:
        assert result.outcome == "ok", result.reason

    def ticked(self, running: object, waiting: int, engine_state: str) -> None:
        pass


def measure(folder: Path, trials: int, jobs: int) -> Isolation:
    specs = [
        TrialSpec("command", "none", batch + 1, 1, label="Command", command="true", limits=Limits(None, None))
        for batch in range(trials)
    ]
    engine = LocalEngine(gpus=(), jobs=jobs)
    with held_folder(folder):
        plan = make_plan(folder, specs)
        write_trial_list(folder, plan.trials, engine.name)
        before = resident(os.getpid())
        run_plan(plan, engine, _Quiet(), Stop())
        after = resident(os.getpid())
    results = sorted(read_results(folder).values(), key=lambda result: result.unix_time or 0)
    peaks = [result.measured.memory.host_bytes or 0 for result in results]
    return Isolation(
        trials=len(results),
        parent_growth_bytes=after.now - before.now if after and before else 0,
        distinct_processes=len({(result.evidence["pid"], result.unix_time) for result in results}),
        first_trials_bytes=median(peaks[:100]),
        last_trials_bytes=median(peaks[-100:]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flopwatch-isolation-"))
    try:
        found = measure(folder / "sweep", asked.trials, asked.jobs)
    finally:
        shutil.rmtree(folder)
    print(f"{found.trials} trials in {found.distinct_processes} processes")
    print(f"parent grew by {found.parent_growth_bytes / 2**20:.2f} MiB")
    print(
        f"a trial's memory: {found.first_trials_bytes / 2**20:.2f} MiB among the first hundred, "
        f"{found.last_trials_bytes / 2**20:.2f} MiB among the last"
    )


if __name__ == "__main__":
    main()

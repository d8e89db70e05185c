"""Sweeps as tests run them: through the runner, with everything it is told kept."""

from dataclasses import replace
from pathlib import Path

from flopwatch.records.sweep_results import read_results
from flopwatch.sweep.folder import held_folder, write_trial_list
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import make_plan
from flopwatch.sweep.runner.run import run_plan
from testbeds.trial_processes import left_behind as left_behind

TESTS = Path(__file__).parent


class Listener:
    """Keeps what the runner tells it."""

    def __init__(self):
        self.begun, self.results = [], []

    def started(self, trial):
        self.begun.append(trial.name)

    def ended(self, result):
        self.results.append(result)

    def ticked(self, running, waiting, engine_state):
        pass


def run_sweep(folder, specs, engine, *, stop=None, listener=None, **choices):
    """Run them all; the results by name."""
    with held_folder(folder):
        plan = make_plan(folder, specs, **choices)
        write_trial_list(folder, plan.trials, engine.name)
        if plan.todo:
            plan = replace(plan, todo=tuple(trial for trial in plan.trials if trial in plan.todo))  # not at random
            run_plan(plan, engine, listener or Listener(), stop or Stop())
    return read_results(folder)

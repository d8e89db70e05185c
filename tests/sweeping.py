"""Sweeps as tests run them: through the runner, with everything it is told kept."""

import os
from pathlib import Path

from flopwatch.sweep.folder import held_folder, write_trial_list
from flopwatch.sweep.plan import make_plan
from flopwatch.sweep.runner import Stop, run_plan
from flopwatch.trial_files import read_results

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
            run_plan(plan, engine, listener or Listener(), stop or Stop())
    return read_results(folder)


def left_behind(folder):
    """Processes that carry the mark of any trial of this sweep."""
    mark = f"FLOPWATCH_TRIAL_DIR={Path(folder).resolve()}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and any(part.startswith(mark) for part in environment.split(b"\0")):
            found.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return found

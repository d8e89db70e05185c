"""Trials whose interval is too wide are run again, and what has run is not run again after an interruption."""

import sys

import pytest

from flopwatch.files import write_json
from flopwatch.records.repeats import RepeatPolicy, with_repeats
from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import Measured, StepTimes, TrialResult, TrialSpec
from flopwatch.sweep.folder import held_folder, write_trial_list
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import exit_status, make_plan
from flopwatch.sweep.runner.run import run_plan
from flopwatch.testing import FakeClock, InProcessEngine
from support.sweeping import Listener
from support.warm_sweep import WITHOUT_TORCH, flopwatch_warm

SPECS = [TrialSpec("standard", "tiny", batch, 64) for batch in (1, 2, 4)]
NAME = "standard_bs2_seq64"
UNTIL = RepeatPolicy(0.05, 5)


class Killed(BaseException):
    """As SIGKILL: nothing after it runs."""


class Shaky(InProcessEngine):
    """The trial of batch size 2 is unstable, and its runs take these times; None is a supervisor that died."""

    def __init__(self, *medians, kill_at=None, leaves_cancelled=False):
        super().__init__(self.answer)
        self.medians, self.ran, self.kill_at, self.leaves_cancelled = list(medians), [], kill_at, leaves_cancelled

    def _write_cancelled(self, trial):
        attempts = trial.earlier_attempts
        result = TrialResult(trial.name, trial.key, trial.spec, "cancelled", unix_time=5.0, earlier_attempts=attempts)
        write_json(trial.sweep / "trials" / trial.name / "result.json", result.to_json())

    def answer(self, trial):
        is_shaky = trial.spec.batch_size == 2
        if is_shaky and self.kill_at == len(self.ran):
            if self.leaves_cancelled:  # as a supervisor does that notices the death of its runner
                self._write_cancelled(trial)
            raise Killed
        median = self.medians.pop(0) if is_shaky else 1.0
        if is_shaky:
            self.ran.append(median)
        if median is None:
            (trial.sweep / "trials" / trial.name / "started.json").write_text("{}")
            return None
        if isinstance(median, str):
            return TrialResult(
                trial.name, trial.key, trial.spec, median, unix_time=99.0, earlier_attempts=trial.earlier_attempts
            )
        width = 0.2 if is_shaky else 0.01
        low, high = median * (1 - width / 2), median * (1 + width / 2)
        steps = StepTimes(10, median, low, high, low, high, high, median, is_shaky)
        measured = with_repeats(Measured(steps=steps, samples_per_s=1 / median), trial.earlier_attempts)
        attempts = trial.earlier_attempts
        started = 1000.0 + len(attempts)
        return TrialResult(
            trial.name, trial.key, trial.spec, "ok", measured=measured, unix_time=started, earlier_attempts=attempts
        )


class Told(Listener):
    def __init__(self):
        super().__init__()
        self.repeated = []

    def repeats(self, result, repeat, most):
        self.repeated.append((result.name, repeat, most))


def run(folder, engine, *, listener=None, stop=None, repeats=UNTIL, **settings):
    with held_folder(folder):
        plan = make_plan(folder, SPECS, shuffle_seed=None, repeats=repeats)
        write_trial_list(folder, plan.trials, engine.name)
        counts = {}
        if plan.todo:
            counts = run_plan(plan, engine, listener or Told(), stop or Stop(), repeats=repeats, **settings)
    return plan, counts


def test_an_unstable_trial_runs_until_its_interval_is_narrow_and_each_run_keeps_its_folder(tmp_path):
    engine, listener = Shaky(1.00, 1.01, 1.00, 1.01), Told()
    plan, counts = run(tmp_path / "s", engine, listener=listener)
    result = read_results(tmp_path / "s")[NAME]

    assert engine.ran == [1.00, 1.01, 1.00]
    assert result.measured.run_medians == (1.00, 1.01, 1.00)
    assert [attempt["folder"] for attempt in result.earlier_attempts] == [f"earlier/{NAME}.1", f"earlier/{NAME}.2"]
    assert all((tmp_path / "s" / attempt["folder"] / "result.json").exists() for attempt in result.earlier_attempts)
    assert listener.repeated == [(NAME, 1, 5), (NAME, 2, 5)]
    assert counts == {"ok": 3}
    assert engine.submitted[-2:] == [NAME, NAME], "all trials have run once before one is repeated"
    assert exit_status(plan, counts, was_stopped=False) == 0


def test_repeats_end_at_their_cap_and_without_until_there_are_none(tmp_path):
    engine = Shaky(*[1.0, 1.5] * 4)
    run(tmp_path / "s", engine, repeats=RepeatPolicy(0.05, 3))
    assert len(engine.ran) == 4
    assert read_results(tmp_path / "s")[NAME].measured.steps.unstable

    once = Shaky(1.0)
    run(tmp_path / "other", once, repeats=RepeatPolicy())
    assert once.ran == [1.0]


@pytest.mark.parametrize("leaves_cancelled", [True, False])
@pytest.mark.parametrize("kill_at", [1, 2])
def test_after_a_kill_no_finished_run_is_run_again(tmp_path, kill_at, leaves_cancelled):
    with pytest.raises(Killed):
        run(tmp_path / "s", Shaky(1.00, 1.01, 1.00, kill_at=kill_at, leaves_cancelled=leaves_cancelled))
    assert read_results(tmp_path / "s")[NAME].outcome == "ok", "the runs so far stay its result"

    engine = Shaky(*[1.00, 1.01, 1.00][kill_at:])
    run(tmp_path / "s", engine)
    assert len(engine.ran) == 3 - kill_at
    assert read_results(tmp_path / "s")[NAME].measured.run_medians == (1.00, 1.01, 1.00)

    rested = Shaky()
    plan, _ = run(tmp_path / "s", rested)
    assert (plan.todo, rested.ran) == ((), [])


def test_a_finished_sweep_is_repeated_where_a_later_until_asks_for_it(tmp_path):
    run(tmp_path / "s", Shaky(1.00), repeats=RepeatPolicy())
    engine = Shaky(1.01, 1.00)
    plan, counts = run(tmp_path / "s", engine)

    assert [trial.name for trial in plan.todo] == [NAME]
    assert read_results(tmp_path / "s")[NAME].measured.run_medians == (1.00, 1.01, 1.00)
    assert counts == {"ok": 1}


def test_a_budget_ends_repeats_and_the_next_sweep_goes_on(tmp_path):
    clock = FakeClock()
    engine = Shaky(1.00)
    answer = engine.answer

    def slow(trial):
        clock.advance(10.0)
        return answer(trial)

    engine._run = slow
    stop = Stop()
    plan, counts = run(tmp_path / "s", engine, stop=stop, budget_seconds=25.0, clock=clock)

    assert engine.ran == [1.00]
    assert read_results(tmp_path / "s")[NAME].outcome == "ok"
    assert exit_status(plan, counts, was_stopped=False, is_over_budget=stop.is_over_budget) == 75

    later = Shaky(1.01, 1.00)
    run(tmp_path / "s", later)
    assert read_results(tmp_path / "s")[NAME].measured.run_medians == (1.00, 1.01, 1.00)


@pytest.mark.parametrize("outcome", ["crash", "oom_host"])
def test_a_repeat_that_fails_costs_itself_and_not_the_runs_before(tmp_path, outcome):
    run(tmp_path / "s", Shaky(1.00, 1.01, outcome))
    result = read_results(tmp_path / "s")[NAME]

    assert (result.outcome, result.measured.run_medians) == ("ok", (1.00, 1.01))
    assert [attempt["outcome"] for attempt in result.earlier_attempts] == ["ok", outcome]
    assert (tmp_path / "s" / "trials" / NAME / "result.json").exists()
    plan, _ = run(tmp_path / "s", Shaky())
    assert plan.todo == (), "it is not repeated any more"


def test_a_repeat_that_is_lost_is_retried_and_not_counted_as_a_run(tmp_path):
    engine = Shaky(1.00, None, 1.01, None, 1.00)
    run(tmp_path / "s", engine)
    result = read_results(tmp_path / "s")[NAME]

    assert engine.ran == [1.00, None, 1.01, None, 1.00]
    assert result.measured.run_medians == (1.00, 1.01, 1.00)
    assert [attempt["outcome"] for attempt in result.earlier_attempts] == ["ok", "lost", "ok", "lost"]


def test_the_command_repeats_a_command_by_its_real_supervisor_until_its_runs_agree(tmp_path):
    """Steps of one run vary by half, the medians of the runs agree: three runs, and the report tells it."""
    script = tmp_path / "steps.py"
    script.write_text(
        "import json, os, pathlib\n"
        "seconds = [0.5, 0.6, 0.7, 1.0, 1.0, 1.3, 1.4, 1.5]\n"
        "metrics = pathlib.Path(os.environ['FLOPWATCH_TRIAL_DIR'], 'metrics.json')\n"
        "metrics.write_text(json.dumps({'step_seconds': seconds}))\n"
    )
    folder = tmp_path / "sweep"
    words = ["sweep", "--command", f"{sys.executable} {script}", "--batch-sizes", "4", "--seq-lens", "8"]
    done = flopwatch_warm(*words, "--until", "5%", "-o", str(folder), modules=WITHOUT_TORCH)
    report = flopwatch_warm("report", str(folder), modules=WITHOUT_TORCH, COLUMNS="200")
    (result,) = read_results(folder).values()

    assert done.returncode == 0, done.stdout + done.stderr
    assert "its interval is too wide, so it is repeated (1 of at most 5)" in done.stdout
    assert result.measured.run_medians == (1.0, 1.0, 1.0)
    assert (result.measured.steps.low, result.measured.steps.unstable) == (1.0, False)
    assert sorted(place.name for place in (folder / "earlier").iterdir()) == [f"{result.name}.1", f"{result.name}.2"]
    assert "1 trial ran 3 times in all to narrow the interval" in " ".join(report.stdout.split())
    assert "needed more than one attempt" not in report.stdout

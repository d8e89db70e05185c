"""What is lost is tried again, up to a cap; what the trainer did wrong is not. An engine in this process answers."""

import errno
import itertools
import json
import os

import pytest

from flopwatch.errors import InputError
from flopwatch.files import append_line
from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import held_folder, write_trial_list
from flopwatch.sweep.runner import run as passing_errors
from flopwatch.sweep.runner import run as runner_module
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import RetryPolicy, make_plan, retry_policy
from flopwatch.sweep.runner.run import run_plan
from flopwatch.sweep.spec.parsing import parse_seconds
from flopwatch.testing import FakeClock, InProcessEngine
from support.sweeping import Listener

SPECS = [TrialSpec("standard", "tiny", batch, 64) for batch in (1, 2, 4)]
OUTCOMES = ("ok", "oom_device", "oom_host", "crash", "timeout", "hang", "error", "unsupported", "invalid", "cancelled")


class Told(Listener):
    def __init__(self):
        super().__init__()
        self.retried = []

    def tries_again(self, lost, retry, most):
        self.retried.append((lost.name, lost.outcome, retry, most))


class Losing(InProcessEngine):
    """Loses the trial of batch size 2 so many times, with this evidence, then answers `ok`."""

    def __init__(self, losses, evidence=None, outcome=None):
        super().__init__(self.answer)
        self.losses, self.evidence, self.outcome = losses, evidence or {}, outcome

    def answer(self, trial):
        if trial.spec.batch_size != 2:
            return TrialResult(trial.name, trial.key, trial.spec, "ok")
        self.losses -= 1
        if self.losses >= 0 and self.outcome is None:
            (trial.sweep / "trials" / trial.name / "started.json").write_text("{}")
            return None
        return TrialResult(trial.name, trial.key, trial.spec, self.outcome if self.losses >= 0 else "ok")

    def wait(self, seconds):
        return [Ended(ended.name, self.evidence) for ended in super().wait(seconds)]


class NeverBeginning(Losing):
    """Loses the trial of batch size 2 before its supervisor has begun."""

    def answer(self, trial):
        found = super().answer(trial)
        if found is None:
            (trial.sweep / "trials" / trial.name / "started.json").unlink()
        return found


def run(folder, engine, *, listener=None, stop=None, **settings):
    with held_folder(folder):
        plan = make_plan(folder, SPECS)
        write_trial_list(folder, plan.trials, engine.name)
        if plan.todo:
            run_plan(plan, engine, listener or Told(), stop or Stop(), **settings)
    return read_results(folder)["standard_bs2_seq64"]


def lost(outcome="lost"):
    return TrialResult("t", "key", SPECS[0], outcome)


@pytest.mark.parametrize(
    ("outcome", "earlier", "is_stopping", "policy", "expected"),
    [
        ("lost", 0, False, RetryPolicy(), True),
        ("lost", 1, False, RetryPolicy(), True),
        ("lost", 2, False, RetryPolicy(), False),
        ("lost", 2, False, RetryPolicy(3), True),
        ("lost", 0, True, RetryPolicy(), False),
        ("lost", 0, False, RetryPolicy(0), False),
        *[(outcome, 0, False, RetryPolicy(), False) for outcome in OUTCOMES],
        ("error", 0, False, retry_policy(2, ["error"]), True),
        ("crash", 0, False, retry_policy(2, ["error"]), False),
        ("lost", 0, False, retry_policy(2, ["error"]), True),
        ("error", 2, False, retry_policy(2, ["error"]), False),
    ],
)
def test_what_is_done_with_an_end(outcome, earlier, is_stopping, policy, expected):
    assert policy.tries_again(lost(outcome), earlier, is_stopping=is_stopping) is expected


@pytest.mark.parametrize("also", ["ok", "oom_host", "invalid", "eror", ""])
def test_only_failures_can_be_asked_for(also):
    with pytest.raises(InputError, match="retry_on must be one of crash, timeout, hang, error, lost"):
        retry_policy(2, ["error", also])


@pytest.mark.parametrize(
    ("text", "seconds"), [("8h", 28800), ("90m", 5400), ("3600", 3600), (60, 60), ("1h30m", 5400), ("1.5 h", 5400)]
)
def test_spans_of_time(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "8 hours", "-1h", "0", "1h30", "8x", True, "h8", "nan", "1e3"])
def test_what_is_no_span_of_time(text):
    with pytest.raises(InputError, match=r"duration.*write.* 8h, 90m"):
        parse_seconds(text)


def test_a_lost_trial_is_tried_again_and_its_attempts_are_kept(tmp_path):
    told = Told()
    engine = Losing(2, {"state": "NODE_FAIL", "host": "n7"})
    result = run(tmp_path / "s", engine, listener=told)
    assert result.outcome == "ok"
    assert [attempt["outcome"] for attempt in result.earlier_attempts] == ["lost", "lost"]
    assert [attempt["host"] for attempt in result.earlier_attempts] == ["n7", "n7"]
    assert [attempt["folder"] for attempt in result.earlier_attempts] == [
        "earlier/standard_bs2_seq64.1",
        "earlier/standard_bs2_seq64.2",
    ]
    for attempt in result.earlier_attempts:
        assert (tmp_path / "s" / attempt["folder"] / "started.json").exists()
    assert told.retried == [("standard_bs2_seq64", "lost", 1, 2), ("standard_bs2_seq64", "lost", 2, 2)]
    assert len(told.results) == 3, "an attempt that is tried again is no end"


def test_after_the_cap_it_is_lost_with_all_its_attempts(tmp_path):
    engine = Losing(99, {"state": "PREEMPTED"})
    result = run(tmp_path / "s", engine, retries=RetryPolicy(3))
    assert result.outcome == "lost"
    assert len(result.earlier_attempts) == 3
    assert engine.submitted.count("standard_bs2_seq64") == 4


def test_the_same_command_again_tries_what_stayed_lost_as_often_once_more(tmp_path):
    run(tmp_path / "s", Losing(99))
    again = Losing(2)
    assert run(tmp_path / "s", again).outcome == "ok"
    assert again.submitted == ["standard_bs2_seq64"] * 3


@pytest.mark.parametrize("outcome", ["error", "crash", "oom_host", "timeout", "hang", "invalid", "unsupported"])
def test_what_the_trainer_did_is_never_tried_again_unasked(tmp_path, outcome):
    engine = Losing(1, outcome=outcome)
    assert run(tmp_path / "s", engine).outcome == outcome
    assert engine.submitted.count("standard_bs2_seq64") == 1


def test_it_is_tried_again_if_asked_for(tmp_path):
    result = run(tmp_path / "s", Losing(1, outcome="error"), retries=retry_policy(2, ["error"]))
    assert result.outcome == "ok"
    assert [attempt["outcome"] for attempt in result.earlier_attempts] == ["error"]


def test_a_preempted_job_whose_supervisor_was_told_to_stop_is_tried_again(tmp_path):
    result = run(tmp_path / "s", Losing(1, {"state": "PREEMPTED"}, outcome="cancelled"))
    assert (result.outcome, result.earlier_attempts[0]["outcome"]) == ("ok", "lost")


def test_a_cancelled_one_is_not(tmp_path):
    engine = Losing(1, {"state": "CANCELLED"}, outcome="cancelled")
    assert run(tmp_path / "s", engine).outcome == "cancelled"


def test_a_killed_runner_forgets_no_attempt(tmp_path):
    class KilledError(Exception):
        pass

    class DiesAfterTheFirstLoss(Losing):
        def room(self, next_up):
            if self.submitted.count("standard_bs2_seq64") == 1 and not self._ended and len(self.submitted) == 3:
                raise KilledError
            return super().room(next_up)

    with pytest.raises(KilledError):
        run(tmp_path / "s", DiesAfterTheFirstLoss(9, {"host": "n1"}))
    engine = Losing(1, {"host": "n2"})
    result = run(tmp_path / "s", engine)
    assert result.outcome == "ok"
    assert [attempt["host"] for attempt in result.earlier_attempts] == ["n1", "n2"]


def test_after_the_budget_nothing_new_is_started_and_the_rest_stays_unrun(tmp_path):
    clock, stop = FakeClock(), Stop()

    def answer(trial):
        clock.advance(40.0)
        return TrialResult(trial.name, trial.key, trial.spec, "ok")

    with held_folder(tmp_path / "s"):
        plan = make_plan(tmp_path / "s", SPECS)
        counts = run_plan(plan, InProcessEngine(answer), Listener(), stop, budget_seconds=60.0, clock=clock)
    assert counts == {"ok": 2}
    assert stop.is_over_budget
    assert not stop.finish


def test_what_is_queued_comes_back_and_stays_unrun(tmp_path):
    stop = Stop()

    class Queueing(InProcessEngine):
        """Runs the first; the others wait in its queue until they are withdrawn."""

        def __init__(self):
            super().__init__(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "ok"), room=3)
            self.queued, self.withdrawals = [], itertools.count(1)

        def submit(self, trials):
            super().submit(trials[:1])
            self.queued = [trial.name for trial in trials[1:]]
            stop.finish = True

        def withdraw(self):
            back, self.queued = self.queued, []
            return back

    listener = Listener()
    with held_folder(tmp_path / "s"):
        plan = make_plan(tmp_path / "s", SPECS)
        counts = run_plan(plan, Queueing(), listener, stop)
        assert counts == {"ok": 1}
        assert len(make_plan(tmp_path / "s", SPECS).todo) == 2


def test_a_disk_that_is_full_for_a_while_ends_nothing(tmp_path, monkeypatch):
    """As it is before a trial's folder is made and when its end is listed; the order of the list stays."""
    monkeypatch.setattr(passing_errors, "_PAUSE_SECONDS", 0.1)
    full = {"prepare": 2, "record": 2}
    states = []

    def failing(name, function):
        def called(*arguments):
            if full[name]:
                full[name] -= 1
                raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
            return function(*arguments)

        return called

    monkeypatch.setattr(runner_module, "prepare", failing("prepare", runner_module.prepare))
    monkeypatch.setattr(runner_module, "record", failing("record", runner_module.record))

    class Watching(Told):
        def ticked(self, running, waiting, engine_state):
            states.append(engine_state)

    told = Watching()
    assert run(tmp_path / "s", Losing(1), listener=told).outcome == "ok"
    assert len(read_results(tmp_path / "s")) == 3
    assert full == {"prepare": 0, "record": 0}
    assert "waiting: No space left on device (somewhere)" in states
    listed = [json.loads(line)["name"] for line in (tmp_path / "s" / "results.jsonl").read_text().splitlines()]
    assert listed == [result.name for result in told.results]


def test_an_error_that_will_not_pass_costs_the_trial_whose_folder_has_it(tmp_path, monkeypatch):
    def refused(trial):
        if trial.spec.batch_size == SPECS[0].batch_size:
            raise OSError(errno.EINVAL, "Invalid argument")
        made(trial)

    made = runner_module.prepare
    monkeypatch.setattr(runner_module, "prepare", refused)
    run(tmp_path / "s", Losing(0))
    results = read_results(tmp_path / "s").values()
    assert sorted(result.outcome for result in results) == ["lost", "ok", "ok"]
    assert any("not started (Invalid argument: " in result.reason for result in results)


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl"
    append_line(file, {"name": "a"})
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: whole(handle, data[:5]))
        with pytest.raises(OSError, match="No space left"):
            append_line(file, {"name": "b"})
    append_line(file, {"name": "c"})
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == ["a", "c"]


def test_a_supervisor_that_never_began_costs_no_retry_and_is_no_attempt(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "0")
    listener = Told()
    result = run(tmp_path, NeverBeginning(2), listener=listener)
    assert (result.outcome, result.earlier_attempts) == ("ok", ())
    assert listener.retried == [("standard_bs2_seq64", "lost", 1, 2), ("standard_bs2_seq64", "lost", 2, 2)]


def test_a_supervisor_that_never_begins_at_all_is_lost_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "0")
    result = run(tmp_path, NeverBeginning(99))
    assert (result.outcome, result.earlier_attempts) == ("lost", ())

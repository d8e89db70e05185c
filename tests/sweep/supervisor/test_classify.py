import signal
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as some

from flopwatch.records.trial import Outcome
from flopwatch.sweep.supervisor.classify import ExitFacts, classify, memory_hint

EXCEPTION = {"type": "ValueError", "message": "a mistake\nwith details", "outcome": "error"}


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        (ExitFacts(status=0, has_finished=True), "ok"),
        (ExitFacts(status=0, is_command=True), "ok"),
        (ExitFacts(status=0, is_command=True, own_kill="timeout"), "timeout"),
        (ExitFacts(status=0, is_command=True, own_kill="cancelled"), "cancelled"),
        (ExitFacts(status=3, oom_kills=1), "oom_host"),
        (ExitFacts(status=3, oom_kills=1, has_own_group=False), "error"),
        (ExitFacts(status=137, oom_kills=1, has_own_group=False, is_command=True), "oom_host"),
        (ExitFacts(status=0), "error"),
        (ExitFacts(status=3), "error"),
        (ExitFacts(status=1, exception=EXCEPTION), "error"),
        (ExitFacts(status=1, exception={**EXCEPTION, "outcome": "oom_device"}), "oom_device"),
        (ExitFacts(status=-signal.SIGSEGV), "crash"),
        (ExitFacts(status=-signal.SIGKILL), "crash"),
        (ExitFacts(status=-signal.SIGKILL, oom_kills=1), "oom_host"),
        (ExitFacts(status=137, oom_kills=1, is_command=True), "oom_host"),
        (ExitFacts(status=-signal.SIGSEGV, oom_kills=1), "crash"),
        (ExitFacts(status=1, exception=EXCEPTION, oom_kills=1), "oom_host"),
        (ExitFacts(status=1, exception=EXCEPTION, oom_kills=1, has_own_group=False), "error"),
        (ExitFacts(status=0, is_command=True, oom_kills=1), "oom_host"),
        (ExitFacts(status=0, is_command=True, oom_kills=1, has_own_group=False), "ok"),
        (ExitFacts(status=1, is_command=True, reported="oom_device"), "oom_device"),
        (ExitFacts(status=0, is_command=True, reported="oom_host"), "oom_host"),
        (ExitFacts(own_kill="oom_host", status=-signal.SIGKILL), "oom_host"),
        (ExitFacts(status=-signal.SIGKILL, held_bytes=96, limit_bytes=100), "oom_host"),
        (ExitFacts(status=-signal.SIGKILL, held_bytes=90, limit_bytes=100), "crash"),
        (ExitFacts(status=-signal.SIGKILL, held_bytes=96), "crash"),
        (ExitFacts(status=-signal.SIGABRT, held_bytes=96, limit_bytes=100), "oom_host"),
        (ExitFacts(status=-signal.SIGABRT, held_bytes=90, limit_bytes=100), "crash"),
        (ExitFacts(status=-signal.SIGSEGV, held_bytes=101, limit_bytes=100), "crash"),
        (ExitFacts(status=0, is_command=True, held_bytes=101, limit_bytes=100), "oom_host"),
        (ExitFacts(status=1, held_bytes=99, limit_bytes=100), "error"),
        (ExitFacts(status=1, exception=EXCEPTION, held_bytes=101, limit_bytes=100), "error"),
    ],
)
def test_the_outcome_of_an_ending(ending, outcome):
    assert classify(ending)[0] == outcome


WORDS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "RuntimeError: CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    "MemoryError",
    "CUDA out of memory in optional autotune, going on",
)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize(
    "ending",
    [
        ExitFacts(status=1),
        ExitFacts(status=1, is_command=True),
        ExitFacts(status=-signal.SIGABRT),
        ExitFacts(status=1, exception=EXCEPTION),
        ExitFacts(status=1, is_command=True, held_bytes=99, limit_bytes=100),
    ],
)
def test_words_in_a_log_decide_nothing_and_are_kept_as_a_hint(ending, words):
    silent, spoken = classify(ending), replace(ending, log_tail=f"one\n  {words}\nKeyError: 'x'")
    assert classify(spoken) == silent
    assert silent[0] in ("error", "crash")
    assert memory_hint(spoken, silent[0]) == words
    assert memory_hint(ending, silent[0]) is None


@pytest.mark.parametrize("harmless", ["Error: no memory leak found", "an error in memory.py", "MemoryErrors: 0"])
def test_words_that_only_sound_like_memory_are_no_hint(harmless):
    assert memory_hint(ExitFacts(status=1, log_tail=harmless), "error") is None


AFTER_ITS_STEPS = [
    ExitFacts(status=-signal.SIGKILL, oom_kills=1),
    ExitFacts(status=-signal.SIGSEGV),
    ExitFacts(own_kill="hang", own_kill_detail="nothing moved", status=-signal.SIGKILL),
    ExitFacts(own_kill="timeout", status=-signal.SIGKILL),
    ExitFacts(own_kill="oom_host", status=-signal.SIGKILL),
    ExitFacts(status=1, exception={**EXCEPTION, "outcome": "oom_host"}),
    ExitFacts(status=3),
]


@pytest.mark.parametrize("ending", AFTER_ITS_STEPS)
def test_whatever_happens_after_its_steps_a_trial_is_ok_and_that_is_told(ending):
    before = classify(ending)
    assert before[0] != "ok"
    outcome, reason = classify(replace(ending, has_finished_steps=True))
    assert outcome == "ok"
    assert reason.endswith(before[1])


def test_a_trial_cancelled_after_its_steps_runs_again():
    assert classify(ExitFacts(own_kill="cancelled", status=-9, has_finished_steps=True))[0] == "cancelled"


def test_our_own_kill_explains_the_signal_it_sent():
    ending = ExitFacts(own_kill="timeout", own_kill_detail="not done after 5 s", status=-signal.SIGKILL, oom_kills=1)
    assert classify(ending) == ("timeout", "not done after 5 s")


def test_a_trial_that_finished_as_we_killed_it_is_ok():
    assert classify(ExitFacts(own_kill="timeout", status=0, has_finished=True))[0] == "ok"


def test_the_reason_is_one_line():
    assert classify(ExitFacts(status=1, exception=EXCEPTION))[1] == "ValueError: a mistake"


def test_a_helper_killed_for_memory_is_told_though_the_trial_went_on():
    outcome, reason = classify(ExitFacts(status=0, has_finished=True, oom_kills=2))
    assert outcome == "ok"
    assert "2 of its processes were killed for memory" in reason


EXCEPTIONS = some.sampled_from([None, EXCEPTION, {**EXCEPTION, "outcome": "oom_device"}])
STATUSES = some.sampled_from([0, 1, 3, 137, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV, None])


@some.composite
def ending(draw):
    """Any combination of facts, also those that no worker can cause."""
    status = draw(STATUSES)
    own_kill = draw(some.sampled_from([None, "timeout", "hang", "cancelled", "oom_host"]))
    return ExitFacts(
        own_kill=own_kill,
        own_kill_detail="we killed it" if own_kill else "",
        status=status,
        has_finished=draw(some.booleans()),
        has_finished_steps=draw(some.booleans()),
        is_command=draw(some.booleans()),
        exception=draw(EXCEPTIONS),
        reported=draw(some.sampled_from([None, "oom_device", "oom_host"])),
        oom_kills=draw(some.integers(0, 2)),
        has_own_group=draw(some.booleans()),
        held_bytes=draw(some.sampled_from([0, 90, 96, 101])),
        limit_bytes=draw(some.sampled_from([None, 100])),
    )


@given(ending())
def test_every_combination_of_facts_has_one_outcome_and_a_reason_in_one_line(facts):
    outcome, reason = classify(facts)
    assert outcome in get_args(Outcome)
    assert reason
    assert "\n" not in reason


@given(ending())
def test_a_finished_worker_goes_before_our_own_kill_and_that_before_all_that_the_kill_may_have_caused(facts):
    facts = replace(facts, has_finished_steps=False)
    outcome, reason = classify(facts)
    if facts.exit_code == 0 and facts.has_finished:
        assert outcome == "ok"
    elif facts.own_kill is not None:
        assert (outcome, reason) == (facts.own_kill, "we killed it")
    elif facts.reported is not None:
        assert outcome == facts.reported


@given(ending())
def test_a_trial_is_out_of_memory_only_if_something_else_than_its_status_says_so(facts):
    silent = replace(
        facts, own_kill=None, reported=None, exception=None, oom_kills=0, held_bytes=0, has_finished_steps=False
    )
    assert classify(silent)[0] in ("ok", "error", "crash")


@given(ending())
def test_after_its_steps_a_trial_is_ok_or_cancelled(facts):
    before, after = (classify(replace(facts, has_finished_steps=is_so))[0] for is_so in (False, True))
    assert after == ("cancelled" if before == "cancelled" else "ok")

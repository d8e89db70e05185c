import signal

import pytest

from flopwatch.sweep.classify import Ending, classify

EXCEPTION = {"type": "ValueError", "message": "a mistake\nwith details", "outcome": "error"}


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        (Ending(exit_code=0, has_finished=True), "ok"),
        (Ending(exit_code=0, is_command=True), "ok"),
        (Ending(exit_code=0, is_command=True, own_kill="timeout"), "timeout"),
        (Ending(exit_code=0, is_command=True, own_kill="cancelled"), "cancelled"),
        (Ending(exit_code=3, oom_kills=1), "oom_host"),
        (Ending(exit_code=3, oom_kills=1, has_own_group=False), "error"),
        (Ending(exit_code=137, oom_kills=1, has_own_group=False, is_command=True), "oom_host"),
        (Ending(exit_code=0), "error"),
        (Ending(exit_code=3), "error"),
        (Ending(exit_code=1, exception=EXCEPTION), "error"),
        (Ending(exit_code=1, exception={**EXCEPTION, "outcome": "oom_device"}), "oom_device"),
        (Ending(signal_number=signal.SIGSEGV), "crash"),
        (Ending(signal_number=signal.SIGKILL), "crash"),
        (Ending(signal_number=signal.SIGKILL, oom_kills=1), "oom_host"),
        (Ending(exit_code=137, oom_kills=1, is_command=True), "oom_host"),
        (Ending(signal_number=signal.SIGSEGV, oom_kills=1), "crash"),
        (Ending(signal_number=signal.SIGABRT, log_tail="DefaultCPUAllocator: can't allocate memory"), "oom_host"),
        (Ending(exit_code=1, log_tail="torch.OutOfMemoryError: CUDA out of memory. Tried"), "oom_device"),
        (Ending(exit_code=1, log_tail="RuntimeError: CUDA error: out of memory"), "oom_device"),
        (Ending(exit_code=1, log_tail="Traceback\nMemoryError"), "oom_host"),
    ],
)
def test_the_outcome_of_an_ending(ending, outcome):
    assert classify(ending)[0] == outcome


@pytest.mark.parametrize(
    "harmless", ["Error: no memory leak found", "an error in memory.py", "out of memory of men", "ran out of memorys"]
)
def test_words_that_only_sound_like_memory_prove_nothing(harmless):
    assert classify(Ending(exit_code=1, log_tail=harmless))[0] == "error"


def test_our_own_kill_explains_the_signal_it_sent():
    ending = Ending(own_kill="timeout", own_kill_detail="not done after 5 s", signal_number=signal.SIGKILL, oom_kills=1)
    assert classify(ending) == ("timeout", "not done after 5 s")


def test_a_trial_that_finished_as_we_killed_it_is_ok():
    assert classify(Ending(own_kill="timeout", exit_code=0, has_finished=True))[0] == "ok"


def test_the_reason_is_one_line():
    assert classify(Ending(exit_code=1, exception=EXCEPTION))[1] == "ValueError: a mistake"


def test_a_helper_killed_for_memory_is_told_though_the_trial_went_on():
    outcome, reason = classify(Ending(exit_code=0, has_finished=True, oom_kills=2))
    assert outcome == "ok"
    assert "2 of its processes were killed for memory" in reason

"""Failures meet by cause, and each comes with what a person needs to act."""

import pytest

from flopwatch.errors import UnsupportedError
from flopwatch.records.trial import Limits
from flopwatch.report.problems import normalised
from flopwatch.report.sweep.document import sweep_document
from flopwatch.sweep.trainers.protocol import step_parts
from support.few_results import ended, ran, summary_of
from testbeds.documents import document_text

pytestmark = pytest.mark.requirement("R26")


def error(batch, message, **more):
    evidence = {"exception": {"type": "ValueError", "message": message}, "exit_code": 1}
    return ended("standard", batch, 64, "error", evidence=evidence, reason=f"ValueError: {message}", **more)


def test_messages_that_differ_in_numbers_and_paths_are_one_cause():
    (failure,) = summary_of(
        error(4, "shape 4 at /home/a/x.py:12 (0x7f01)"), error(8, "shape 8 at /tmp/b/x.py:99 (0x8e)")
    ).failures
    assert failure.count == 2
    assert failure.cause == "ValueError: shape N at PATH:N (ADDRESS)"
    assert failure.trials == ("standard_bs4_seq64_tiny_0", "standard_bs8_seq64_tiny_0")


def test_digits_inside_a_word_stay():
    assert normalised("bf16 on fp32, layer3 of 4,096") == "bf16 on fp32, layer3 of N"


def test_different_exceptions_signals_and_exit_codes_are_different_causes():
    summary = summary_of(
        error(1, "a"),
        error(2, "b"),
        ended("standard", 3, 64, "crash", evidence={"signal": "SIGSEGV"}),
        ended("standard", 4, 64, "crash", evidence={"signal": "SIGKILL"}),
        ended("standard", 5, 64, "error", evidence={"exit_code": 3}),
        ended("standard", 6, 64, "lost", evidence={"state": "NODE_FAIL"}),
    )
    causes = {(failure.outcome, failure.cause) for failure in summary.failures}
    assert causes == {
        ("error", "ValueError: a"),
        ("error", "ValueError: b"),
        ("crash", "SIGSEGV"),
        ("crash", "SIGKILL"),
        ("error", "exit code 3"),
        ("lost", "NODE_FAIL"),
    }


def test_what_needs_a_person_comes_before_out_of_memory_and_unsupported():
    summary = summary_of(
        *(ended("ghost", batch, 64, "unsupported", reason="tied weights") for batch in range(1, 9)),
        *(ended("dpsgd", batch, 64, "oom_device") for batch in range(1, 4)),
        ended("standard", 1, 64, "hang"),
    )
    assert [failure.outcome for failure in summary.failures] == ["hang", "oom_device", "unsupported"]


def test_inferred_and_skipped_trials_are_no_failures():
    assert summary_of(ended("dpsgd", 8, 64, "oom_inferred"), ended("dpsgd", 9, 64, "skipped")).failures == ()


def test_a_failure_tells_its_command_evidence_and_the_last_15_lines_of_the_log():
    log = "\n".join(f"line {number}" for number in range(40))
    (failure,) = summary_of(error(4, "no", command="flopwatch trial X", log_tail=log, phase="measure", step=3)).failures
    assert failure.command == "flopwatch trial X"
    assert failure.evidence["exit_code"] == 1
    assert (failure.phase, failure.step) == ("measure", 3)
    assert failure.log_tail.splitlines() == [f"line {number}" for number in range(25, 40)]


def test_out_of_memory_advice_names_the_batch_that_ran_and_fit():
    summary = summary_of(
        ran("dpsgd", 4, 512), ran("dpsgd", 32, 128), ended("dpsgd", 8, 512, "oom_device"), ran("standard", 8, 512)
    )
    (failure,) = summary.failures
    assert failure.advice[0] == (
        "Keep the batch, because epsilon depends on it, and add micro_batch_size=4 to the sweep."
    )
    assert failure.advice[1] == "Use a batch below 8: 4 ran at sequence 512."
    assert any("Try ghost" in line for line in failure.advice)
    assert failure.advice[-1] == "`flopwatch fit` finds the largest batch of this trainer and model."


def test_out_of_memory_advice_is_for_this_very_configuration():
    summary = summary_of(
        ran("mine:Own", 16, 512, options={"rank": 8}),
        ended(
            "mine:Own",
            8,
            512,
            "oom_host",
            options={"rank": 64},
            dtype="bf16",
            checkpointing=True,
            model="my model.json",
        ),
    )
    (failure,) = summary.failures
    assert "Use a batch below 8." in failure.advice


def test_smaller_micro_batches_are_advised_to_private_trainers_only_and_below_the_present_ones():
    advice = [
        " ".join(summary_of(ended(trainer, 64, 512, "oom_device", **more)).failures[0].advice)
        for trainer, more in (("standard", {}), ("ghost", {"micro_batch_size": 16}), ("ghost", {"micro_batch_size": 1}))
    ]
    assert ["micro_batch_size=8" in text for text in advice] == [False, True, False]
    assert ["micro_batch" in text for text in advice] == [False, True, False]


def test_checkpointing_is_not_advised_to_a_private_trainer_which_cannot_have_it():
    advice = {
        trainer: " ".join(summary_of(ended(trainer, 8, 512, "oom_device")).failures[0].advice)
        for trainer in ("standard", "ghost")
    }
    assert "checkpointing" in advice["standard"]
    assert "checkpointing" not in advice["ghost"]


@pytest.mark.parametrize(
    ("outcome", "more", "words"),
    [
        ("crash", {"evidence": {"signal": "SIGKILL"}}, "dmesg"),
        ("crash", {"evidence": {"signal": "SIGSEGV"}}, "PYTHONFAULTHANDLER=1"),
        ("hang", {"stacks": "Thread 1", "limits": Limits(no_progress_seconds=42)}, "longer than 42 s"),
        ("hang", {"stacks": "Thread 1"}, "stack traces below"),
        ("timeout", {"phase": "build", "limits": Limits(wall_seconds=99)}, "phase build after 99 s: raise --timeout"),
        ("oom_host", {"limits": Limits(memory_bytes=2**30)}, "raise --memory"),
        ("lost", {}, "--only failed"),
        ("cancelled", {}, "resumes where it stopped"),
        ("unsupported", {"checkpointing": True}, "without gradient checkpointing"),
        ("error", {"evidence": {"exception": {"type": "ModuleNotFoundError", "message": "x"}}}, "Install"),
    ],
)
def test_advice_fits_the_ending(outcome, more, words):
    (failure,) = summary_of(ended("standard", 8, 512, outcome, **more)).failures
    assert words in " ".join(failure.advice)


@pytest.mark.parametrize(
    ("outcome", "limits", "advice"),
    [
        (
            "timeout",
            Limits(99.0, None),
            "The command was still running after 99 s: raise --timeout, or let it do less.",
        ),
        ("hang", Limits(None, 5.0), "If the command may print nothing for 5 s, raise no_progress."),
    ],
)
def test_advice_for_a_command_speaks_of_no_step_and_no_python(outcome, limits, advice):
    (failure,) = summary_of(ended("command", 8, 512, outcome, limits=limits, command="true")).failures
    assert failure.advice == (advice,)


def test_the_signal_of_our_own_kill_is_not_taken_for_the_cause():
    (failure,) = summary_of(ended("standard", 8, 64, "hang", evidence={"signal": "SIGKILL"}, phase="warmup")).failures
    assert failure.cause == "in phase warmup"


def test_the_advice_for_a_trainer_that_cannot_accumulate_does_not_contradict_the_reason():
    reason = ""
    try:
        step_parts(object(), [{}, {}])
    except UnsupportedError as error:
        reason = str(error)
    (failure,) = summary_of(ended("mine:Own", 4, 64, "unsupported", reason=reason, micro_batch_size=2)).failures

    assert failure.advice == (
        "Leave `micro_batch_size` out of the matrix, or add the method accumulate() to the trainer.",
    )


def test_evidence_is_told_in_words_and_not_as_a_dict():
    evidence = {"exit_code": 137, "memory_limit": {"by": "cgroup", "limit_bytes": 1300 * 2**20}, "states": ["a", "b"]}
    text = document_text(sweep_document(summary_of(ended("standard", 8, 512, "oom_host", evidence=evidence))), 160)
    assert "exit_code 137, memory_limit by cgroup, limit 1.27 GiB, states a, b" in text
    assert "{" not in text

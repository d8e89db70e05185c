"""Epsilon in the report: with what it is for, in every form, and told where nobody asked."""

import json
from dataclasses import replace

from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.records.privacy import PrivacySpent
from flopwatch.report.cells import epsilon_text
from flopwatch.report.sweep.document import sweep_document, sweep_json
from support.few_results import ended, ran, summary_of
from testbeds.documents import document_text

SPENT = PrivacySpent(1.83831, 1e-5, 0.8, 0.01, 25_000, "prv")


def spending(trainer, batch, spent, **more):
    result = ran(trainer, batch, 32, **more)
    return replace(result, measured=replace(result.measured, privacy=spent))


def texts(summary):
    document = sweep_document(summary)
    return {"terminal": document_text(document, 120), "markdown": to_markdown(document), "page": to_page(document)}


def test_trainers_that_spend_the_same_stand_in_one_row_with_all_that_epsilon_is_for():
    summary = summary_of(
        ran("standard", 8, 32),
        spending("ghost", 8, SPENT),
        spending("fast", 8, SPENT),
        spending("fast", 16, replace(SPENT, sample_rate=0.02, epsilon=2.5, note="a warning of Opacus's")),
    )
    first, second = summary.groups[0].privacy_spent

    assert (first.batch_size, first.trainers, second.trainers) == (8, ("ghost", "fast"), ("fast",))
    for form, text in texts(summary).items():
        words = " ".join(text.replace("\\", "").split())
        for part in (
            "1.839",
            "25,000",
            "1e-05",
            "0.01",
            "prv",
            "ghost, fast",
            "Batch 16 of fast: a warning",
            "Poisson",
        ):
            assert part in words, (form, part)


def test_where_nobody_asked_the_report_says_so():
    asked_nothing = texts(summary_of(ran("ghost", 8, 32)))
    not_private = texts(summary_of(ran("standard", 8, 32)))

    assert all(
        "To see the epsilon that a training would spend" in " ".join(text.split()) for text in asked_nothing.values()
    )
    assert not any("epsilon" in text for text in not_private.values())


def test_json_has_epsilon_unrounded_for_each_trial_and_each_group():
    summary = summary_of(spending("ghost", 8, SPENT), ended("dpsgd", 8, 32, "oom_host"))
    content = json.loads(sweep_json(summary))

    assert content["groups"][0]["privacy_spent"][0]["spent"]["epsilon"] == 1.83831
    assert [row["measured"]["epsilon"] for row in content["trials"]] == [1.83831, None]


def test_an_epsilon_that_is_not_known_is_a_dash_and_its_reason():
    text = texts(summary_of(spending("ghost", 8, replace(SPENT, epsilon=None, note="no epsilon holds"))))["terminal"]

    assert "Batch 8 of ghost: no epsilon holds." in text
    assert "–" in text


def test_a_bound_is_never_rounded_down():
    assert epsilon_text(1.0001) == "1.001"
    assert epsilon_text(0.123400001) == "0.1235"
    assert epsilon_text(123456.0) == "1.235e+05"
    assert epsilon_text(2.5) == "2.5"


def test_what_to_run_shows_the_epsilon_of_both_trials_that_it_recommends():
    summary = summary_of(
        ran("standard", 8, 32),
        spending("ghost", 16, replace(SPENT, epsilon=2.71823), gib=4, seconds=1.0),
        spending("ghost", 8, SPENT, gib=2, seconds=0.55),
    )
    for form, text in texts(summary).items():
        words = " ".join(text.replace("\\", "").split())
        assert words.index("2.719") < words.index("1.839"), form
    assert "epsilon" not in texts(summary_of(ran("standard", 8, 32)))["markdown"]


def test_of_trials_that_are_equally_fast_the_one_with_the_smaller_epsilon_is_recommended():
    larger = spending("ghost", 16, replace(SPENT, epsilon=2.5), seconds=1.0)
    (choice,) = summary_of(larger, spending("dpsgd", 8, SPENT, seconds=0.505)).groups[0].choices
    assert (choice.fastest.trainer, [cell.trainer for cell in choice.tied]) == ("dpsgd", ["ghost"])
    assert choice.verdict == (
        "no measurable difference between dpsgd batch 8 and ghost batch 16; "
        "none of them has a smaller epsilon than dpsgd batch 8"
    )

    (clear,) = summary_of(larger, spending("dpsgd", 8, SPENT, seconds=0.7)).groups[0].choices
    assert clear.fastest.trainer == "ghost"

    targeted = spending("dpsgd", 8, replace(SPENT, epsilon=2.4951), seconds=0.505)
    (searched,) = summary_of(larger, targeted).groups[0].choices
    assert searched.fastest.trainer == "ghost", "two searches for the same target end at slightly different values"

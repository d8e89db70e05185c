"""What a reader must be careful about stands in every form of the report, in the same words."""

import html
import json
from dataclasses import replace

import pytest

from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.records.privacy import Privacy, PrivacySpent
from flopwatch.records.trial import TrialSpec
from flopwatch.report.sweep.document import sweep_document, sweep_json
from support.few_results import ended, ran, summary_of
from testbeds.documents import document_text


def shaky(trainer, batch, seq, seconds, *, steps=10, retries=None, **more):
    """A trial with an unstable step time."""
    result = ran(trainer, batch, seq, seconds, spread=0.2, **more)
    times = replace(result.measured.steps, count=steps)
    memory = replace(result.measured.memory, alloc_retries=retries)
    return replace(result, measured=replace(result.measured, steps=times, memory=memory))


def spending(result, note):
    spent = PrivacySpent(None, 1e-5, 0.8, 0.01, 100, "prv", note)
    return replace(result, measured=replace(result.measured, privacy=spent))


NO_NOISE = "epsilon is unknown: the trainer declares no noise_multiplier"


def full_of_caveats():
    return summary_of(
        shaky("standard", 4, 512, 0.2, steps=5),
        shaky("standard", 8, 512, 0.5, steps=5),
        shaky("standard", 4, 1024, 1.0, retries=3, gib=1),
        spending(ran("ghost", 4, 512, 1.00, spread=0.01), NO_NOISE),
        spending(ran("dpsgd", 4, 512, 1.01, spread=0.2), NO_NOISE),
        spending(ran("ghost", 8, 512, 2.02, spread=0.2), NO_NOISE),
        spending(ran("dpsgd", 8, 512, 2.00, spread=0.01), NO_NOISE),
        ended("ghost", 2, 512, "oom_device"),
        missing=[TrialSpec("fast", "tiny", 4, 512)],
    )


def forms(summary):
    found = {
        "terminal": document_text(sweep_document(summary), 100),
        "markdown": to_markdown(sweep_document(summary)).replace("\\", ""),
        "page": html.unescape(to_page(sweep_document(summary))),
    }
    return {form: " ".join(text.split()) for form, text in found.items()}


@pytest.mark.parametrize(
    "caveat",
    [
        "2 of 2 step times are unstable, its own too",
        "2 of 4 step times are unstable",
        "it has no 95 % interval (fewer than 6 step times), so differences below 10 % do not count",
        "barely fits into memory: the allocator had to free its cache to make room",
        "no measurable difference between ghost batch 4 and dpsgd batch 8, dpsgd batch 4 and 1 more",
        "~10,240",
        "1 trial has no result yet; run the same sweep command again to resume",
        "A batch ran although a smaller one ran out of memory: the limit is unclear.",
        NO_NOISE,
        "Private trainers and others are chosen apart: a faster trainer does not replace a private one.",
        "~ marks an unstable step time: ignore small differences.",
    ],
)
def test_a_caveat_stands_in_every_form_of_the_report(caveat):
    without = [form for form, text in forms(full_of_caveats()).items() if caveat not in text]
    assert without == []


def test_every_caveat_of_every_choice_is_printed_and_is_in_the_json():
    summary = full_of_caveats()
    caveats = [caveat for choice in summary.groups[0].choices for caveat in choice.caveats]
    in_json = [one for choice in json.loads(sweep_json(summary))["groups"][0]["choices"] for one in choice["caveats"]]

    assert len(caveats) == 6
    assert in_json == caveats
    assert all(caveat in text for caveat in caveats for text in forms(summary).values())


def test_a_caveat_of_many_rows_is_printed_once_with_some_of_the_rows():
    summary = summary_of(*(shaky("standard", 4, 64 * k, 1.0 * k) for k in range(1, 10)))
    text = forms(summary)["terminal"]

    assert text.count("its step time is unstable") == 1
    assert "64 no DP, 128 no DP, 192 no DP, 256 no DP and 5 more: its step time is unstable" in text


def test_a_stable_choice_has_no_caveat():
    (choice,) = summary_of(ran("standard", 4, 64, 1.0), ran("standard", 8, 64, 1.2)).groups[0].choices
    assert (choice.verdict, choice.caveats) == ("the fastest of 2", ())


def test_no_warning_is_left_out_without_a_word():
    summary = replace(full_of_caveats(), warnings=tuple(f"warning number {place}" for place in range(23)))
    for form, text in forms(summary).items():
        assert "warning number 19" in text, form
        assert "3 more warnings: see the JSON report" in text, form


def declaring(trainer, batch, seconds, declared, **more):
    result = ran(trainer, batch, 32, seconds, **more)
    return replace(result, measured=replace(result.measured, declared_privacy=declared))


SHUFFLED = Privacy(1.0, 1.0, "shuffled")


@pytest.mark.parametrize(
    ("declared", "part"),
    [
        (SHUFFLED, "epsilon is unknown: the trainer declares the sampling 'shuffled'"),
        (Privacy(max_grad_norm=1.0), "epsilon is unknown: the trainer declares no noise_multiplier"),
        (Privacy(0.0, 1.0), "epsilon is infinite, because the noise multiplier is 0"),
    ],
)
def test_a_private_trainer_without_epsilon_is_recommended_only_with_that_said(declared, part):
    summary = summary_of(declaring("mine:Own", 4, 1.0, declared), declaring("mine:Own", 8, 9.0, declared))
    (choice,) = summary.groups[0].choices

    assert (choice.privacy, choice.fastest.batch_size, choice.candidates) == ("private", 4, 2)
    assert choice.caveats[0].startswith(part)
    for form, text in forms(summary).items():
        assert part in text, form


def test_a_trainer_with_epsilon_is_preferred_to_faster_ones_without():
    too_large = spending(ran("dpsgd", 2000, 32, 0.1), "a batch of 2000 is larger than the data set")
    summary = summary_of(declaring("mine:Own", 4, 0.1, SHUFFLED), ran("dpsgd", 4, 32, 2.0), too_large)
    (choice,) = summary.groups[0].choices

    assert (choice.fastest.trainer, choice.fastest.batch_size, choice.candidates) == ("dpsgd", 4, 1)
    for form, text in forms(summary).items():
        told = "left out, because their epsilon is unknown or infinite: mine:Own, dpsgd batch 2000"
        assert told in text, form


def test_all_trainers_that_are_left_out_are_named():
    names = [f"mine:Own{number}" for number in range(5)]
    results = [declaring(name, 4, 0.1, SHUFFLED, gib=1) for name in names]
    group = summary_of(*results, ran("dpsgd", 4, 32, 2.0, gib=2, name="known")).groups[0]

    assert group.choices[0].caveats[0].endswith(f"unknown or infinite: {', '.join(names)}")
    assert "the trainer declares the sampling 'shuffled'" in html.unescape(
        to_page(sweep_document(summary_of(*results)))
    )

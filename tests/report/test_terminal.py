"""The terminal report fits 80 columns, shows the answer first and lets no text of a trial steer the terminal."""

import pytest

from flopwatch.report.sweep.document import sweep_document
from flopwatch.text import plain
from support.few_results import ended, private_results, ran, summary_of
from support.hostile_sweep import hostile_results
from testbeds.documents import document_text
from testbeds.made_up_sweep import example_specs, make_result


def printed(summary, width=80, metrics=()):
    return document_text(sweep_document(summary, metrics), width)


@pytest.fixture(scope="module")
def example():
    return summary_of(*(make_result(spec) for spec in example_specs()))


def test_every_line_fits_80_columns(example):
    assert max(len(line) for line in printed(example).splitlines()) <= 80


def test_no_figure_is_cut_off_at_80_columns(example):
    assert "…" not in printed(example)


def test_the_answer_stands_before_matrices_and_matrices_before_failures(example):
    out = printed(example)
    places = [
        out.index(words) for words in ("What to run", "Trainers", "Peak memory", "What did not run", "Environment")
    ]
    assert places == sorted(places)


def test_only_the_metric_asked_for_is_printed(example):
    out = printed(example, metrics=["mfu"])
    assert "\n  MFU" in out
    assert "Peak memory" not in out


def test_an_empty_sweep_says_so():
    assert "The plan of this sweep has no trials" in printed(summary_of())


@pytest.mark.parametrize(
    "results",
    [
        [ran("standard", 4, 64, gib=1)],
        [ended("standard", 4, 64, "error"), ended("ghost", 4, 64, "oom_device")],
        [ran("ghost", 4, 64), ran("ghost", 8, 64)],
        [ended("standard", 4, 64, "ok")],
    ],
    ids=["one trial", "all failed", "one trainer", "nothing measured"],
)
def test_small_and_bare_sweeps_are_told(results):
    out = printed(summary_of(*results))
    assert out.splitlines()[1].startswith(f"{len(results)} trial")
    assert "None" not in out
    assert "nan" not in out


def test_all_failed_has_nothing_to_choose_from():
    assert "nothing to choose from" in " ".join(printed(summary_of(ended("standard", 4, 64, "error"))).split())


def test_no_text_of_a_trial_reaches_the_terminal_as_a_control_character():
    out = printed(summary_of(*hostile_results()))
    harmful = {
        character for character in out if character != "\n" and (ord(character) < 32 or ord(character) == 0x202E)
    }
    assert harmful == set()
    out.encode("utf-8")  # half characters are gone too
    assert "\\u202eevil" in out.replace("\n", "")


def test_a_progress_bar_shows_its_last_state():
    assert plain("10 %\r50 %\r100 %\r\nnext") == "100 %\nnext"


def test_more_columns_than_fit_are_printed_below_each_other():
    labels = [f"team_trainer_{letter}" for letter in "abcdefgh"]
    summary = summary_of(*(ran("mine:Own", 4, 64, 0.0123, gib=1, label=label, name=label) for label in labels))
    narrow, wide = printed(summary, width=80, metrics=["time"]), printed(summary, width=200, metrics=["time"])
    assert max(len(line) for line in narrow.splitlines()) <= 80
    assert narrow.count("12.3 ms ±1.0%") == wide.count("12.3 ms ±1.0%") == 8
    assert all(label in narrow for label in labels)


def test_no_word_is_broken_at_80_columns():
    summary = summary_of(*private_results())
    narrow, wide = printed(summary), printed(summary, width=200)
    assert max(len(line) for line in narrow.splitlines()) <= 80
    words = {word for word in narrow.split() if not word.startswith("─")}
    assert words - set(wide.split()) == set()
    for word in ("fastest", "standard", "private:DPLoop", "unknown", "0.2085"):
        assert word in words


def test_columns_in_which_nothing_is_said_are_left_out():
    same = printed(summary_of(ran("standard", 16, 128, 0.01, gib=2), ran("ghost", 16, 128, 0.02, gib=2)))
    assert "less memory, within" not in " ".join(same.split())
    other = " ".join(printed(summary_of(*private_results()), width=200).split())
    assert "less memory, within" in other
    assert "standard b8 1.00 GiB" in other

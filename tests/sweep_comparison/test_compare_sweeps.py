"""Two sweeps compared: pairs by configuration, ratios with their intervals, and only what measurement decides."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch.present.json_form import to_json
from flopwatch.present.markdown import to_markdown
from flopwatch.records.privacy import PrivacySpent
from flopwatch.records.trial import MemoryUse, TrialSpec
from flopwatch.report.capture import Capture
from flopwatch.report.compared import sweeps_compared
from flopwatch.report.comparison import Difference, compare_sweeps
from support.few_results import ended, ran
from support.hostile_sweep import hostile_results


def sweep_of(*results, missing=(), name="a-sweep"):
    planned = {f"missing_{place}": spec for place, spec in enumerate(missing)}
    return Capture(Path(name), {result.name: result for result in results}, planned)


def compared(a, b):
    return compare_sweeps(sweep_of(*a), sweep_of(*b))


def only_pair(a, b):
    (pair,) = compared([a], [b]).pairs
    return pair


def test_a_ratio_is_b_over_a_and_its_interval_is_what_both_intervals_allow():
    ratio = only_pair(ran("standard", 4, 64, 2.0, spread=0.01), ran("standard", 4, 64, 1.0, spread=0.02)).ratios["time"]
    assert ratio.ratio == 0.5
    assert ratio.low == pytest.approx(0.98 / 2.02)
    assert ratio.high == pytest.approx(1.02 / 1.98)
    assert ratio.verdict == "better"


@pytest.mark.parametrize(
    ("seconds", "spread", "verdict"),
    [
        (1.0, 0.0, "no measurable difference"),
        (1.039, 0.0, "no measurable difference"),  # 1.02 / 0.98 is 1.0408: within what two processes differ by
        (1.042, 0.0, "worse"),
        (0.961, 0.0, "no measurable difference"),
        (0.959, 0.0, "better"),
        (1.06, 0.02, "no measurable difference"),  # 4 % of the noise and 1 % and 2 % of the intervals
        (1.08, 0.02, "worse"),
    ],
)
def test_a_time_is_another_one_only_beyond_the_intervals_and_the_noise_of_processes(seconds, spread, verdict):
    a_spread = 0.01 if spread else 0.0
    pair = only_pair(ran("standard", 4, 64, 1.0, spread=a_spread), ran("standard", 4, 64, seconds, spread=spread))
    assert pair.ratios["time"].verdict == verdict


def test_five_steps_decide_nothing():
    def short(seconds):
        result = ran("standard", 4, 64, seconds, mfu=0.5 / seconds)
        return replace(result, measured=replace(result.measured, steps=replace(result.measured.steps, count=5)))

    ratios = only_pair(short(1.0), short(9.0)).ratios
    assert ratios["time"].verdict == ratios["mfu"].verdict == "too few steps"
    assert ratios["time"].ratio == 9
    assert ratios["time"].low is None


def test_an_unstable_time_is_marked_whatever_it_decides():
    found = compared([ran("standard", 4, 64, 1.0, spread=0.04)], [ran("standard", 4, 64, 2.0, spread=0.01)])
    (pair,) = found.pairs
    assert (pair.ratios["time"].verdict, pair.is_unstable) == ("worse", True)
    assert any("idle machine" in note for note in found.notes)
    assert r"**slower** \~" in to_markdown(sweeps_compared(found))
    assert not only_pair(ran("standard", 4, 64, 1.0), ran("standard", 4, 64, 2.0)).is_unstable


def test_memory_differs_from_one_percent_on_and_less_is_better():
    for gib, verdict in ((1.009, "no measurable difference"), (1.02, "worse"), (0.5, "better")):
        pair = only_pair(ran("standard", 4, 64, gib=1), ran("standard", 4, 64, gib=gib))
        assert pair.ratios["memory"].verdict == verdict


def test_mfu_varies_as_the_time_does_and_more_is_better():
    ratio = only_pair(
        ran("standard", 4, 64, 1.0, mfu=0.2, spread=0.01), ran("standard", 4, 64, 0.5, mfu=0.4, spread=0.01)
    ).ratios["mfu"]
    assert (ratio.ratio, ratio.verdict) == (2.0, "better")
    assert ratio.low == pytest.approx(2 * 0.99 / 1.01)
    assert ratio.high == pytest.approx(2 * 1.01 / 0.99)


def test_the_mfu_of_a_lower_bound_has_no_ratio():
    a = ran("standard", 4, 64, gib=1, mfu=0.2)
    b = replace(a, measured=replace(a.measured, cost=replace(a.measured.cost, is_lower_bound=True)))
    assert set(only_pair(a, b).ratios) == {"time", "samples_per_s", "memory"}


KINDS = (
    MemoryUse(reserved_bytes=2**30, host_bytes=2**31, host_method="samples"),
    MemoryUse(host_bytes=2**30, host_method="high_water"),
    MemoryUse(host_bytes=2**30, host_method="rss"),
)


@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
def test_memory_of_another_kind_is_not_divided_and_that_is_told(a, b):
    good = ran("standard", 4, 64)
    one, other = (replace(good, measured=replace(good.measured, memory=KINDS[kind])) for kind in (a, b))
    found = compared([one], [other])
    assert ("memory" in found.pairs[0].ratios) == (a == b)
    assert any("not compared" in note for note in found.notes) == (a != b)


def test_the_mean_is_geometric_so_that_twice_and_half_cancel():
    a = [ran("standard", batch, 64, 1.0) for batch in (1, 2, 4)]
    b = [ran("standard", batch, 64, seconds) for batch, seconds in ((1, 2.0), (2, 0.5), (4, 1.0))]
    found = compared(a, b).overall["time"]
    assert found.mean_ratio == pytest.approx(1.0)
    assert (found.pairs, found.better, found.worse, found.undecided) == (3, 1, 1, 1)


def test_a_setting_that_differs_throughout_is_told_and_does_not_keep_trials_apart():
    a = [ran("standard", batch, 64, options={"lr": 0.1}) for batch in (1, 2)]
    b = [ran("standard", batch, 64, dtype="bf16", steps=30, seed=1, nodes=2) for batch in (1, 2)]
    found = compared(a, b)
    assert len(found.pairs) == 2
    assert not found.only_a
    told = {one.what: (one.a, one.b) for one in found.settings}
    assert told == {
        "dtype": ("fp32", "bf16"),
        "steps": ("10", "30"),
        "seed": ("0", "1"),
        "nodes": ("1", "2"),
        "options.lr": ("0.1", None),
    }


def test_a_setting_that_is_an_axis_pairs_like_with_like():
    a = [ran("standard", 1, 64, 1.0, seed=seed, name=f"a{seed}") for seed in (0, 1)]
    b = [ran("standard", 1, 64, 2.0 + seed, seed=seed, name=f"b{seed}") for seed in (1, 2)]
    found = compared(a, b)
    (pair,) = found.pairs
    assert (pair.trial, pair.trial_b, pair.ratios["time"].ratio) == ("a1", "b1", 3.0)
    assert (found.only_a, found.only_b) == (("a0",), ("b2",))


@pytest.mark.parametrize("size", ["batch_size", "seq_len", "model"])
def test_trials_of_another_size_are_never_a_pair(size):
    a = ran("standard", 4, 64, name="x")
    b = replace(a, spec=replace(a.spec, **{size: "medium" if size == "model" else 8}))
    found = compared([a], [b])
    assert not found.pairs
    assert any(size in note for note in found.notes)


def test_true_one_and_one_point_nought_are_three_settings():
    values = (True, 1, 1.0)
    a = [
        ran("standard", 1, 64, float(place + 1), options={"x": value}, name=f"a{place}")
        for place, value in enumerate(values)
    ]
    b = [replace(result, name=f"b{result.name}") for result in reversed(a)]
    assert [(pair.trial, pair.trial_b) for pair in compared(a, b).pairs] == [
        ("a0", "ba0"),
        ("a1", "ba1"),
        ("a2", "ba2"),
    ]


def test_another_class_under_the_same_name_is_paired_and_told():
    a = [ran("standard", 1, 64), ran("old:T", 1, 64, 2.0, name="mine_bs1", label="mine")]
    b = [ran("standard", 1, 64), ran("new:T", 1, 64, 1.0, name="mine_bs1", label="mine")]
    pair = compared(a, b).pairs[1]
    assert [(one.what, one.a, one.b) for one in pair.differences] == [("trainer", "old:T", "new:T")]
    assert pair.ratios["time"].ratio == 0.5


def test_of_several_trials_with_the_same_settings_namesakes_pair():
    a = [ran("standard", 1, 64, name=name, label=name) for name in ("x", "y")]
    b = [ran("standard", 1, 64, name=name, label=name) for name in ("y", "x", "z")]
    found = compared(a, b)
    assert [(pair.trial, pair.trial_b) for pair in found.pairs] == [("x", "x"), ("y", "y")]
    assert found.only_b == ("z",)


def test_changed_outcomes_and_missing_trials_are_told_and_have_no_ratio():
    a = [ran("standard", 1, 64), ended("standard", 2, 64, "error", reason="KeyError")]
    b = [ended("standard", 1, 64, "oom_host", reason="too large"), ran("standard", 2, 64)]
    found = compare_sweeps(sweep_of(*a), sweep_of(*b, missing=[TrialSpec("standard", "tiny", 4, 64)]))
    assert [(pair.outcome_a, pair.outcome_b) for pair in found.pairs if pair.outcome_a != pair.outcome_b] == [
        ("ok", "oom_host"),
        ("error", "ok"),
    ]
    assert not found.overall
    assert found.only_b == ("missing_0",)
    assert any("ran to its end in both" in note for note in found.notes)


def test_what_changed_around_the_trials_is_told_with_the_user_s_own_code_and_the_peak():
    def at(environment, flops_per_s):
        result = ran("standard", 1, 64, mfu=0.5, environment=environment)
        cost = replace(result.measured.cost, peak={"flops_per_s": flops_per_s, "device": "x", "dtype": "fp32"})
        return replace(result, measured=replace(result.measured, cost=cost))

    a = at({"torch": "2.13.0", "host": "a", "sources": {"mine:T": "1111"}, "python": "3.11"}, 1e12)
    b = at({"torch": "2.14.0", "host": "a", "sources": {"mine:T": "2222"}, "python": "3.11"}, 2e12)
    told = {one.what: (one.a, one.b) for one in compared([a], [b]).environment}
    assert told.pop("peak of MFU")[0].startswith("1 TFLOP/s")
    assert told == {"torch": ("2.13.0", "2.14.0"), "code of mine:T": ("1111", "2222")}


@pytest.mark.parametrize("empty", ["a", "b", "both"])
def test_an_empty_sweep_is_told(empty):
    some = [ran("standard", 1, 64)]
    found = compared([] if empty in ("a", "both") else some, [] if empty in ("b", "both") else some)
    assert not found.pairs
    assert any("has no trials" in note for note in found.notes)
    to_markdown(sweeps_compared(found))
    json.loads(to_json(found))


def test_numbers_that_are_none_never_reach_a_ratio():
    odd = (math.nan, math.inf, -1.0, 0.0, 10**400, "fast", None)
    for value in odd:
        a = ran("standard", 1, 64, gib=1, mfu=0.5)
        steps = replace(a.measured.steps, median=value, low=value, high=value)
        cost, memory = replace(a.measured.cost, mfu=value), MemoryUse(reserved_bytes=value, host_bytes=value)
        measured = replace(a.measured, steps=steps, cost=cost, memory=memory, samples_per_s=value)
        found = compared([a], [replace(a, measured=measured)])
        assert found.pairs[0].ratios == {}, value
        json.loads(to_json(found))
    tiny, huge = ran("standard", 1, 64, 1e-300), ran("standard", 1, 64, 1e300)
    assert "time" not in only_pair(tiny, huge).ratios


def test_hostile_text_stays_text_in_markdown_and_json():
    found = compared(hostile_results(), [*hostile_results()[::-1], ran("<b>|", 1, 64, name="a|b `c` <i>")])
    text = to_markdown(sweeps_compared(found))
    assert "<script" not in text.replace("\\<script", "")
    assert "@somebody" not in text
    text.encode("utf-8")
    json.loads(to_json(found))


def test_only_what_differs_between_compared_trials_is_told():
    def at(trainer, batch, torch, flops_per_s):
        result = ran(trainer, batch, 64, mfu=0.5, environment={"torch": torch})
        cost = replace(result.measured.cost, peak={"flops_per_s": flops_per_s, "device": "x", "dtype": "fp32"})
        return replace(result, measured=replace(result.measured, cost=cost))

    alike = at("standard", 1, "2.13", 1e12)
    found = compared([alike, at("ghost", 1, "2.12", 3e12)], [alike, at("fast", 1, "2.14", 2e12)])
    assert (found.environment, found.notes) == ((), ())
    assert "The compared trials have the same settings" in to_markdown(sweeps_compared(found))


def test_a_pair_with_another_epsilon_is_told_and_is_no_pair_by_name():
    def spending(epsilon):
        result = ran("ghost", 1, 64)
        spent = PrivacySpent(epsilon, 1e-5, 0.8, 0.01, 100, "prv")
        return replace(result, measured=replace(result.measured, privacy=spent))

    found = compared([spending(1.83831)], [spending(2.5)])
    assert found.pairs[0].differences == (Difference("epsilon", "1.839", "2.5"),)
    assert found.notes == ()
    assert "epsilon 1.839 → 2.5" in to_markdown(sweeps_compared(found))
    assert only_pair(spending(2.5), spending(2.5)).differences == ()

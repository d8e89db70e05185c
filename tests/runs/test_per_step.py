"""Two runs by milliseconds per step: the parts add up exactly, and what changed is named first."""

import json

import pytest

from flopwatch.runs.comparison import compare
from flopwatch.runs.per_step import RunTime, compare_per_step
from support.ledgers import log_of

MEASURED = frozenset({"input_wait", "optimizer", "host"})
SECONDS = {"start_up": 4.0, "eval": 10.0, "input_wait": 2.0, "optimizer": 6.0, "host": 1.0, "passes": 77.0}


def run(steps=100, measured=MEASURED, **seconds):
    return RunTime({**SECONDS, **seconds}, steps, measured)


def named_first(a, b):
    return compare_per_step(a, b).parts[0].key


def parts_of(found):
    return {part.key: (part.a_ms, part.b_ms) for part in found.parts}


def test_every_part_is_its_seconds_over_the_steps_and_they_add_up():
    found = compare_per_step(run(), run(eval=40.0))
    assert parts_of(found)["eval"] == pytest.approx((100.0, 400.0))
    assert parts_of(found)["passes"] == pytest.approx((770.0, 770.0))
    assert (found.a_ms, found.b_ms) == pytest.approx((1000.0, 1300.0))
    assert found.parts[0].key == "eval"
    assert found.sentence == (
        "Per step, the whole run took 1.00 s in A and 1.30 s in B. Most of the change: "
        "evaluation grew from 100 ms to 400 ms."
    )


@pytest.mark.parametrize("key", ["start_up", "eval", "input_wait", "optimizer", "host", "passes"])
@pytest.mark.parametrize("grows", [True, False])
def test_the_part_that_changed_is_named_first(key, grows):
    shorter, longer = run(), run(**{key: SECONDS[key] + 30.0})
    assert named_first(*((shorter, longer) if grows else (longer, shorter))) == key


def test_pauses_are_not_named_first_where_steps_became_2_7_times_longer():
    """As in the trial of a user: 457 ms became 1.23 s, and the traced run had a pause that was 3.9 points."""
    a, b = run(passes=37.0), run(passes=115.0, pause=90.0)
    found = compare_per_step(a, b)
    assert [part.key for part in found.parts[:2]] == ["passes", "pause"]
    assert (
        "Most of the change: forward and backward pass grew from 370 ms to 1.15 s; next, pauses grew" in found.sentence
    )


def test_steps_that_doubled_are_not_named_first_where_a_checkpoint_costs_a_hundred_times_as_much():
    """As in a tiny training on a busy machine: 2.8 ms became 6.8 ms beside a checkpoint of 400 ms."""
    a = RunTime({"passes": 0.28}, 100, MEASURED)
    assert named_first(a, RunTime({"passes": 0.68, "checkpoint": 40.0}, 100, MEASURED)) == "checkpoint"


def test_faster_steps_are_not_named_first_where_a_pause_made_the_run_longer():
    found = compare_per_step(run(passes=37.0), run(passes=9.0, optimizer=2.0, pause=90.0))
    assert [part.key for part in found.parts[:2]] == ["pause", "passes"]


def test_what_a_run_does_once_does_not_look_longer_in_a_shorter_run():
    short = {key: seconds / 10 for key, seconds in SECONDS.items()} | {"start_up": 4.0}
    found = compare_per_step(run(), RunTime(short, 10, MEASURED))
    assert parts_of(found)["start_up"] == pytest.approx((40.0, 40.0))
    assert "A has 100 steps and B 10. What a run does once (start-up) is spread over 100 steps" in found.notes[-1]


@pytest.mark.parametrize(("key", "name"), [("input_wait", "input wait"), ("optimizer", "optimizer")])
def test_a_part_that_only_one_run_measured_is_folded_into_the_passes_of_both(key, name):
    # The other run spent the same time, but does not know on what.
    passes = SECONDS["passes"] + SECONDS[key]
    b = run(measured=MEASURED - {key}, passes=passes, **{key: 0.0})
    found = compare_per_step(run(), b)
    assert key not in parts_of(found)
    assert parts_of(found)["passes"] == pytest.approx((10 * passes, 10 * passes))
    assert found.notes == (f'Only A measured "{name}", so it is part of "forward and backward pass" in both.',)
    assert compare_per_step(b, run()).notes[0].startswith("Only B measured")


def test_an_input_wait_is_folded_into_the_time_between_the_passes_if_that_is_measured():
    measured = MEASURED | {"between"}
    b = run(measured=measured - {"input_wait"}, between=5.0, input_wait=0.0)
    found = compare_per_step(run(measured=measured, between=3.0), b)
    assert parts_of(found)["between"] == pytest.approx((50.0, 50.0))
    assert found.notes == ('Only A measured "input wait", so it is part of "between the passes" in both.',)


@pytest.mark.parametrize(("also", "place"), [({"between"}, "between the passes"), (set(), "forward and backward pass")])
def test_an_input_wait_that_nobody_measured_is_said_to_be_part_of_another_time(also, place):
    unknown = run(measured=(MEASURED - {"input_wait"}) | also)
    (note,) = compare_per_step(unknown, unknown).notes
    assert note == f'The input wait of both runs is unknown. After warm-up, it is part of "{place}", at most all of it.'


def test_an_unmeasured_wait_may_be_part_of_stalled_steps_of_either_run():
    measured = (MEASURED - {"input_wait"}) | {"between"}
    stalls, leaves_out = run(measured=measured, stall=9.0), run(measured=measured, outside=9.0)
    (note,) = compare_per_step(stalls, leaves_out).notes
    assert 'part of "between the passes" and "stalled steps" and "work between steps", at most all of it' in note
    *_, note = compare_per_step(run(measured=MEASURED | {"between"}), stalls).notes
    assert note == 'In B, some of the input wait may be part of "stalled steps" too.'


def test_where_only_one_run_timed_its_passes_the_time_between_them_is_part_of_both():
    untimed = {**LEDGER, **AT_PEAK}
    timed = {**untimed, "passes_timed": 900.0, "outside_passes": 100.0}
    (note,) = compare(log_of(untimed), log_of(timed)).per_step.notes
    assert note == 'Only B measured "between the passes", so it is part of "forward and backward pass" in both.'


def test_runs_without_a_step_cannot_be_compared():
    assert compare_per_step(run(), run(steps=0)) is None


def test_a_change_below_2_percent_is_not_put_into_words():
    sentence = compare_per_step(run(), run(eval=10.5)).sentence
    assert sentence.endswith("no part changed by 2 % of that or more.")


LEDGER = {
    "wall": 1600.0,
    "start_up": 30.0,
    "eval": 25.0,
    "train": 1545.0,
    "input_wait": 600.0,
    "divided": 900.0,
    "optimizer": 60.0,
    "host": 20.0,
}
AT_PEAK = {"model_at_peak": 490.0, "hardware_at_peak": 530.0, "recompute_at_peak": 40.0}


def test_milliseconds_are_the_same_with_and_without_a_peak():
    longer = {"wall": 2000.0, "eval": 425.0}
    found = {}
    for name, more, peak in (("peak", AT_PEAK, {}), ("none", {"unpriced": 900.0}, {"peak": None})):
        runs = [log_of({**LEDGER, **more, **each}, **peak) for each in ({}, longer)]
        found[name] = json.loads(json.dumps(compare(*runs).to_json()))["per_step"]
    with_peak, without = ({part["key"]: part for part in found[name]["parts"]} for name in ("peak", "none"))
    assert {key: part["a_ms"] for key, part in with_peak.items()} == pytest.approx(
        {key: part["a_ms"] for key, part in without.items()}
    )
    assert found["none"]["sentence"] == found["peak"]["sentence"]
    assert "evaluation grew from 25.0 ms to 425 ms" in found["none"]["sentence"]
    # Of 945 s in steps without input wait, the optimizer took 60 of the 900 in which it was timed.
    assert with_peak["optimizer"]["a_ms"] == pytest.approx(945 * 60 / 900)

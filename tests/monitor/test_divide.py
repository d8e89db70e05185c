"""Whatever the order of events: no time is negative, and all times add up to the time on the wall."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch.monitor.timing import tape
from flopwatch.monitor.timing.divide import TapeDivision, times_of

FACTS = {
    tape.START: st.booleans(),
    tape.END: st.booleans(),
    tape.OPTIMIZER: st.tuples(st.integers(1, 2), st.booleans()),
    tape.OPTIMIZER_END: st.tuples(st.integers(1, 2), st.booleans()),
    tape.UNTIMED: st.integers(1, 2),
    tape.WAIT_END: st.booleans(),
    tape.SPENT: st.tuples(st.just("eval"), st.sampled_from([0.0, 0.5])),
    tape.CALL: st.booleans(),
}
CODES = [code for code in range(24) if code != tape.FIRST]  # which says that the past was longer than the tape shows


@st.composite
def events(draw):
    """Events in any order, also one that no training has, and the time in phases, of which the tape nests none."""
    now, began, apart_seconds = 0.0, None, 0.0
    made = [(tape.START, now, now, True, now)]
    for code in [*draw(st.lists(st.sampled_from(CODES), max_size=60)), tape.PHASE_END, tape.END]:
        now += draw(st.sampled_from([0.0, 0.001, 0.01, 0.2, 3.0]))
        fact = draw(FACTS.get(code, st.none()))
        if code in (tape.PHASE, tape.PHASE_END) and (began is None) == (code == tape.PHASE_END):
            continue
        if code == tape.PHASE:
            began = now
        elif code == tape.PHASE_END:
            fact, began, apart_seconds = began, None, apart_seconds + now - began
        made.append((code, now, now, fact, now))
    return made, apart_seconds


def between(start, end):
    return end - start


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(events())
def test_no_time_is_negative_and_all_times_add_up_to_the_wall(drawn):
    recorded, apart_seconds = drawn
    divided = TapeDivision().divide(recorded)
    steps = [times_of(parts, between) for parts in divided.steps]
    for times in steps:
        assert all(seconds >= 0 for seconds in times.values() if seconds is not None)
        parts = [times[f"{part}_seconds"] for part in ("input_wait", "optimizer", "passes")]
        assert sum(seconds or 0.0 for seconds in parts) <= times["seconds"] + 1e-9
    assert all(seconds >= 0 for _, seconds in divided.spent)

    wall_seconds = recorded[-1][1] - recorded[0][1]
    in_steps, spent = sum(times["seconds"] for times in steps), sum(seconds for _, seconds in divided.spent)
    assert in_steps + spent + apart_seconds == pytest.approx(wall_seconds)


@settings(max_examples=100, deadline=None)
@given(events(), st.integers(0, 60))
def test_events_that_come_in_two_parts_are_divided_as_those_that_come_at_once(drawn, cut):
    recorded, _ = drawn
    whole, halves = TapeDivision().divide(recorded), TapeDivision()
    first, second = halves.divide(recorded[:cut]), halves.divide(recorded[cut:])

    assert first.steps + second.steps == whole.steps
    assert first.spent + second.spent == whole.spent

"""The rank that stands out is named, with its cause; where none does, none is."""

import random

import pytest

from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks.job_values import StragglerHistory, explain_straggler, find_straggler
from flopwatch.monitor.ranks.rank import BusyTime, profile_of
from flopwatch.monitor.ranks.reports import Profile, RankReport, merge, report_of
from flopwatch.monitor.timing.divide import TapeDivision
from flopwatch.monitor.timing.tape import HostTimer, Tape

pytestmark = pytest.mark.slow

STEP = 0.2


def window(profiles: dict[int, Profile]) -> RankReport:
    steps = [MeasuredStep(step, seconds=STEP) for step in range(10)]
    return merge([report_of(rank, steps, peak_flops_per_s=1.0, profile=p) for rank, p in profiles.items()])


def alike(ranks: int, seed: int = 0) -> dict[int, Profile]:
    chance = random.Random(seed)
    return {rank: Profile(0.005, 0.15 * chance.gauss(1, 0.01), 0.0) for rank in range(ranks)}


@pytest.mark.parametrize(
    ("cause", "late"),
    [
        ("input", Profile(0.025, 0.15, 0.0)),
        ("compute", Profile(0.005, 0.17, 0.0)),
        ("host", Profile(0.005, 0.15, 0.02)),
    ],
)
@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_ten_percent_of_the_step_on_one_rank_is_named_with_its_cause(cause, late, ranks):
    found = find_straggler(window({**alike(ranks), ranks - 1: late}))

    assert found is not None
    assert (found.rank, found.cause) == (ranks - 1, cause)
    assert found.excess_share == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("ranks", [2, 8, 64, pytest.param(1024, marks=pytest.mark.campaign)])
def test_ranks_that_differ_by_chance_are_not_named(ranks):
    assert [find_straggler(window(alike(ranks, seed))) for seed in range(50)] == [None] * 50


def test_a_rank_on_its_own_is_nobodys_straggler():
    assert find_straggler(window(alike(1))) is None


def test_ranks_spread_widely_have_no_single_straggler():
    spread = {rank: Profile(0.0, 0.1 + 0.01 * rank, 0.0) for rank in range(10)}

    assert find_straggler(window(spread)) is None


def test_a_straggler_is_chronic_when_it_is_found_in_most_windows():
    history = StragglerHistory()
    late, well = {**alike(4), 2: Profile(0.005, 0.19, 0.0)}, alike(4)
    seen = [history.judge(window(profiles)) for profiles in (late, late, late, well, late, late, well, well, late)]

    assert [None if s is None else s.chronic for s in seen] == [None, False, True, None, None, True, None, None, None]


def test_an_excess_is_told_when_it_is_there_twice_in_a_row():
    history = StragglerHistory()
    late, well = {**alike(4), 2: Profile(0.005, 0.17, 0.0)}, alike(4)
    other = {**alike(4), 1: Profile(0.005, 0.17, 0.0)}
    seen = [history.judge(window(profiles)) for profiles in (late, well, late, late, other, other, late)]

    assert [None if s is None else s.rank for s in seen] == [None, None, None, 2, None, 1, None]


def test_the_message_names_rank_amount_and_cause():
    found = find_straggler(window({**alike(4), 2: Profile(0.045, 0.15, 0.0)}))

    assert found is not None
    assert explain_straggler(found).startswith("rank 2 slows down the other ranks: it needs ")
    assert "waiting for its input" in explain_straggler(found)


def test_busy_time_is_processor_time_between_the_batch_and_the_end_of_the_step():
    now = [100.0]
    tape = Tape(HostTimer(lambda: now[0]), lambda: now[0], measures_busy_time=True)
    tape._cpu_seconds = lambda: now[0]
    for _ in range(3):
        now[0] += 7.0  # fetching a batch
        tape.start_step()
        now[0] += 2.0
        began = tape.begin_phase()
        now[0] += 50.0  # evaluation
        tape.end_phase(began)
        now[0] += 1.0
        tape.end_step()
        tape.begin_gap()

    assert [step.busy_seconds for step in TapeDivision().divide(tape.take()).steps] == [3.0] * 3


def test_the_typical_step_is_that_of_the_last_minute():
    own = BusyTime()
    for seconds in [5.0] * 100 + [1.0] * 40:
        own.add(seconds)

    assert own.typical_seconds(step_seconds=0.1) == 5.0  # 512 steps and more fit into a minute
    assert own.typical_seconds(step_seconds=1.0) == 1.0  # 60 do: 40 of the new kind
    assert own.typical_seconds(step_seconds=100.0) == 1.0  # at least 32


def test_what_is_left_of_a_step_is_waiting():
    assert profile_of(10, 2.0, 0.4, 0.1, 0.25) == Profile(0.04, 0.1, 0.04)
    assert profile_of(0, 0.0, 0.0, 0.0, 0.0) is None

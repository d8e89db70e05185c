"""Which steps are counted."""

import itertools

import pytest

from flopwatch.monitor.counting.schedule import SHARE_OF_TIME, Schedule

SECONDS, OF_A_COUNT = 0.1, 0.3
"""Of an ordinary step, and of one that is counted."""


def counted(schedule, steps, seconds=SECONDS, of_a_count=OF_A_COUNT):
    found = []
    for index in range(steps):
        if schedule.is_due(index):
            found.append(index)
            schedule.note_count(index, of_a_count)
        else:
            schedule.note_step(seconds)
    return found


def test_the_first_steps_are_counted_ever_more_rarely():
    assert counted(Schedule(), 48) == [0, 1, 2, 4, 7, 11, 17, 26, 36, 47]


def test_later_steps_are_drawn_at_random():
    assert counted(Schedule(), 2000) != counted(Schedule(), 2000)


def test_ranks_count_the_same_steps_however_long_theirs_take():
    quick, slow = (Schedule(is_alone=False) for _ in range(2))

    assert counted(quick, 5000) == counted(slow, 5000, seconds=7.0, of_a_count=20.0)


def test_a_gap_is_at_most_about_a_sixth_of_the_steps_so_far_while_counting_is_cheap():
    found = counted(Schedule(), 400, seconds=1e-4, of_a_count=2e-4)

    assert all(later - earlier <= 0.15 * earlier + 1 for earlier, later in itertools.pairwise(found) if earlier >= 47)


def test_counting_takes_its_share_of_the_time_and_no_more_in_a_long_run():
    steps = 200_000
    found = counted(Schedule(), steps)

    extra = len(found) * (OF_A_COUNT - SECONDS)
    assert 0.5 * SHARE_OF_TIME < extra / (steps * SECONDS) < 1.5 * SHARE_OF_TIME


def test_counts_never_stop():
    assert counted(Schedule(), 200_000)[-1] > 190_000


@pytest.mark.parametrize("every", [1, 5, 40])
def test_no_gap_is_longer_than_asked_for(every):
    found = counted(Schedule(every=every), 1000)

    assert max(later - earlier for earlier, later in itertools.pairwise(found)) <= every


def test_without_later_checks_only_the_first_steps_are_counted():
    assert counted(Schedule(stops=True), 1000)[-1] == 47


def test_new_steps_are_counted_in_addition_but_not_without_end():
    schedule = Schedule()
    while schedule.may_add(0):
        schedule.extra += 1

    assert schedule.extra == 32
    assert schedule.may_add(1000), "0.2 % of all steps"


def test_a_step_that_is_new_to_one_rank_is_counted_there_and_leaves_the_plan_of_all():
    usual, with_new = (Schedule(is_alone=False) for _ in range(2))
    for schedule in (usual, with_new):
        counted(schedule, 100)
    for index in range(100, with_new.next_index):
        assert with_new.may_add(index)
        with_new.extra += 1
        with_new.note_count(index, 1.0)

    assert with_new.next_index == usual.next_index
    assert counted(with_new, 5000) == counted(usual, 5000)

"""Windows of different ranks are added up where they end together."""

import pytest

from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks.layout import FAN_OUT, children
from flopwatch.monitor.ranks.rank import ends_window
from flopwatch.monitor.ranks.reports import RankReport, aligned, report_of


def windows(rank: int, *last_steps: int) -> list[RankReport]:
    firsts = [0, *(last + 1 for last in last_steps)]
    return [
        report_of(rank, [MeasuredStep(s, seconds=1.0, tokens=1) for s in range(a, b + 1)], peak_flops_per_s=1.0)
        for a, b in zip(firsts, last_steps, strict=False)
    ]


def ends(streams: list[list[RankReport]]) -> list[tuple[int, int, int]]:
    merged = list(aligned([iter(stream) for stream in streams]))
    return [(report.last_step, report.ranks, report.total("tokens").total) for report in merged]


def test_windows_that_end_together_are_added_up():
    assert ends([windows(0, 4, 9), windows(1, 4, 9)]) == [(4, 2, 10), (9, 2, 10)]


def test_a_rank_that_cuts_once_more_changes_nothing_for_the_others():
    assert ends([windows(0, 2, 4, 9), windows(1, 4, 9), windows(2, 4, 9)]) == [(4, 3, 15), (9, 3, 15)]


def test_a_cut_that_all_make_is_kept():
    assert ends([windows(0, 4, 6, 9), windows(1, 4, 6, 9)]) == [(4, 2, 10), (6, 2, 4), (9, 2, 6)]


def test_windows_end_where_a_multiple_is_passed_whatever_the_gaps():
    def cut(steps):
        return [step for before, step in zip([None, *steps], steps, strict=False) if ends_window(step, before, 50)]

    assert cut(range(120)) == [49, 99]
    assert cut(range(0, 480, 4)) == [52, 100, 152, 200, 252, 300, 352, 400, 452]
    assert cut([512, 1024, 1536]) == [1024, 1536]


def test_a_rank_that_numbers_its_steps_otherwise_is_left_out():
    resumed = [window for window in windows(0, 100, 149, 199) if window.first_step > 100]
    assert ends([resumed, windows(1, 49, 99, 149, 199)]) == [(149, 1, 49), (199, 2, 100)]


def test_a_rank_that_ends_early_is_missed_from_there_on():
    assert ends([windows(0, 4, 9, 14), windows(1, 4)]) == [(4, 2, 10), (9, 1, 5), (14, 1, 5)]


def test_a_rank_that_ends_inside_a_window_is_in_it_with_what_it_has():
    assert ends([windows(0, 4, 9), windows(1, 4, 6)]) == [(4, 2, 10), (9, 2, 7)]


@pytest.mark.parametrize(
    ("world_size", "per_host"),
    [(w, h) for w in (1, 2, 7, 12, 64, 128, 1000) for h in (1, 2, 4, 7, 8, 25, 64, 128) if w % h == 0],
)
def test_every_rank_but_the_root_is_below_one_other(world_size, per_host):
    for root in {0, world_size - 1, world_size // 2, world_size // 3}:
        below = {rank: children(rank, root, world_size, per_host) for rank in range(world_size)}
        told = [child for of_rank in below.values() for child in of_rank]
        assert sorted([*told, root]) == list(range(world_size))
        assert max(map(len, below.values())) <= 2 * FAN_OUT


def test_a_host_sends_one_report_to_other_hosts():
    world_size, per_host = 64, 8
    for root in (0, 13):
        below = {rank: children(rank, root, world_size, per_host) for rank in range(world_size)}
        told = [(child // per_host, rank // per_host) for rank, of_rank in below.items() for child in of_rank]
        leaving = [host for host, to in told if to != host]
        assert sorted(leaving) == [host for host in range(world_size // per_host) if host != root // per_host]


@pytest.mark.parametrize("per_host", [1, 8, 64])
def test_no_rank_hears_from_more_than_two_fan_outs_and_the_depth_grows_with_the_logarithm(per_host):
    world_size = 16_384
    below = {rank: children(rank, 0, world_size, per_host) for rank in range(world_size)}
    assert max(map(len, below.values())) <= (FAN_OUT if per_host == 1 else 2 * FAN_OUT)
    level, depth = [0], 0
    while level := [child for rank in level for child in below[rank]]:
        depth += 1
    assert depth <= 6

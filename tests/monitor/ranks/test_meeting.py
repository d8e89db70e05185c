"""The ranks of a job find each other by the job, wherever each of them would write its log."""

from pathlib import Path

import pytest

from support.torchrun import torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "ranks_apart.py"
STEPS, SAMPLES, RANKS = 60, 4, 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return torchrun(SCRIPT, str(tmp_path_factory.mktemp("apart")), ranks=RANKS)


def of_all_ranks(found):
    return found["values"]["total/samples"] == STEPS * SAMPLES * RANKS


@pytest.mark.parametrize("run", ["own_folders", "own_disks"])
def test_ranks_with_log_paths_of_their_own_are_added_up(results, run):
    found = results[0][run]

    assert found["values"]["ranks/reporting"] == RANKS
    assert of_all_ranks(found), found
    assert "ranks_late" not in found["notices"]
    assert "ranks_missing" not in found["notices"]


@pytest.mark.parametrize("run", ["own_folders", "own_disks", "rehearsal"])
def test_they_share_the_peak_of_the_cpu_they_share(results, run):
    assert results[0][run]["peak"] == pytest.approx(results[0]["whole_cpu"] / RANKS)


@pytest.mark.parametrize("run", ["rehearsal", "rehearsal_own_folders"])
def test_a_monitor_that_only_one_rank_has_had_does_not_keep_the_next_one_from_the_others(results, run):
    assert of_all_ranks(results[0][run]), results[0][run]


def test_a_monitor_that_only_one_rank_has_is_not_mixed_up_with_the_one_of_all_ranks(results):
    found = results[0]["second"]

    assert of_all_ranks(found["training"]), found["training"]
    assert found["second"]["values"]["total/samples"] == STEPS * SAMPLES
    assert found["second"]["values"]["perf/exact"] == 0

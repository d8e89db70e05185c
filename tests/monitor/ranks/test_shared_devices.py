"""Ranks that share a device share its peak."""

import os
from pathlib import Path

import pytest
import torch

from flopwatch.monitor.ranks.layout import device_identity, ranks_by_launcher, shared_peak
from flopwatch.records.flops import Peak
from support.torchrun import torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "shared_cpu.py"


def test_a_peak_that_the_user_gave_is_each_ranks_own():
    given = Peak(1e12, "a CPU", "fp32", "given", "override", "high")
    assert shared_peak(given, 4) is given


@pytest.mark.parametrize("told", [{}, {"LOCAL_WORLD_SIZE": ""}, {"LOCAL_WORLD_SIZE": "many"}])
def test_without_a_launcher_a_rank_is_taken_to_be_alone(told):
    assert ranks_by_launcher("cpu", told) == 1


def test_processes_on_the_same_cores_compute_on_the_same_device():
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    cpu = torch.device("cpu")
    whole = device_identity(cpu)
    try:
        os.sched_setaffinity(0, {min(cores)})
        part = device_identity(cpu)
    finally:
        os.sched_setaffinity(0, cores)
    assert device_identity(cpu) == whole != part


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return torchrun(SCRIPT, str(tmp_path_factory.mktemp("shared")), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["as_launched", "nobody_tells"])
def test_two_ranks_on_one_cpu_have_half_of_it_each(outcomes, run):
    found = outcomes[0][run]
    assert found["peaks"] == pytest.approx([found["whole"] / 2] * len(found["peaks"]))
    assert len(found["peaks"]) >= 2
    assert found["source"].endswith("shared by 2 ranks")


@pytest.mark.slow
def test_ranks_on_cores_of_their_own_share_nothing(outcomes):
    if outcomes[0]["cores"] < 2:
        pytest.skip("needs two cores")
    found = outcomes[0]["pinned"]
    assert found["peaks"][-1] == pytest.approx(found["whole"])
    assert "shared" not in found["source"]

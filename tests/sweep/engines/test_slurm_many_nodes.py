"""Trials over two nodes of a real Slurm: the supervisor on the first, srun starts the agent on the second."""

import pytest

from flopwatch.sweep.engines.slurm import SlurmEngine
from support.engines import many_nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm")]


def test_one_trial_over_two_nodes_measures_and_one_loses_a_process(tmp_path, monkeypatch):
    many_nodes.one_measures_and_one_loses_a_process(SlurmEngine(), tmp_path, monkeypatch, "fsdp")

"""Trials over two nodes of a real Slurm: the supervisor on the first, srun starts the agent on the second."""

import pytest

from flopwatch.sweep.engines.slurm import SlurmEngine
from sweep.engines import many_nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm")]


def test_the_job_over_two_nodes_has_the_flops_of_the_whole_batch(tmp_path):
    many_nodes.the_job_over_two_nodes_has_the_flops_of_the_whole_batch(SlurmEngine(), tmp_path)


def test_a_process_killed_on_the_second_node_is_a_crash_and_leaves_nothing(tmp_path, monkeypatch):
    many_nodes.a_process_killed_on_the_second_node_is_a_crash_and_leaves_nothing(SlurmEngine(), tmp_path, monkeypatch)

"""Trials over two nodes of a Ray cluster: a placement group, the supervisor on its first, an agent on the other."""

from types import SimpleNamespace

import pytest

from flopwatch.errors import InputError
from flopwatch.sweep.engines.ray import RayEngine
from support.engines import many_nodes
from testbeds.real_ray import ray_cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as cluster:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster


@pytest.mark.campaign  # a minute
def test_one_trial_over_two_nodes_measures_and_one_loses_a_process(cluster, tmp_path, monkeypatch):
    engine = RayEngine(address=cluster.address)
    many_nodes.one_measures_and_one_loses_a_process(engine, tmp_path, monkeypatch, "ddp")


def test_a_ray_of_one_node_says_that_it_has_no_two():
    engine = RayEngine()
    engine._cluster = SimpleNamespace(listen=lambda seconds: None, silent_since=None, resources=lambda: [{"CPU": 8}])
    with pytest.raises(InputError, match="needs 2 nodes"):
        engine.room(many_nodes.spec(nodes=2, layout="ddp"))

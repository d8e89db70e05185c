"""A real Ray of one node, or of several, on loopback of this machine."""

import os
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest

from flopwatch.optional import require
from flopwatch.sweep.engines.ray_task import local_environment, start_local


def need_ray():
    """Skips without Ray; fails where it was promised to be there."""
    if find_spec("ray") is None:
        message = "no Ray here; the extra `ray` brings it"
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS") == "1":
            pytest.fail(message)
        pytest.skip(message)


@contextmanager
def real_ray(cpus=4, gpus=2):
    """One node with GPUs that do not exist; a RayEngine made meanwhile uses it and leaves it running."""
    need_ray()
    with patch.dict(os.environ, local_environment()):
        ray = require("ray", "ray")
        start_local(ray, cpus, gpus)
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def ray_cluster():
    """A head without resources to which nodes are added: `cluster.add_node(num_cpus=1)`. Address: `cluster.address`."""
    need_ray()
    # Nodes are found dead within seconds instead of a minute.
    quick = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000"}
    quick |= {"RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "500"}
    with patch.dict(os.environ, {**local_environment(), **quick}):
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.1"},
        )
        try:
            yield cluster
        finally:
            cluster.shutdown()


@contextmanager
def ray_head(cpus, port=None):
    """A head with Ray's own timeouts, on the port of an earlier head if given; `kill_gcs` ends its control service."""
    need_ray()
    with patch.dict(os.environ, local_environment()):
        from ray.cluster_utils import Cluster

        settings = {"num_cpus": cpus, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
        cluster = Cluster(initialize_head=True, head_node_args={**settings, "gcs_server_port": port})
        try:
            yield cluster
        finally:
            cluster.shutdown()


def kill_gcs(cluster):
    cluster.head_node.all_processes["gcs_server"][0].process.kill()

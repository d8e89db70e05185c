"""A real Ray cluster on loopback of this machine, with ports and a folder of its own."""

import os
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without this variable, Ray listens on all interfaces, at the address of the network card.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray runs its workers at nice 15, and so the trials too.
    "RAY_worker_niceness": "0",
    # Without this variable, it would depend on a token in the home folder whether anybody can connect.
    "RAY_AUTH_MODE": "disabled",
}
_QUICK = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
}
"""Nodes are found dead within seconds instead of a minute."""


def need_ray():
    """Skips without Ray; fails where it was promised to be there."""
    if find_spec("ray") is None:
        message = "no Ray here; the extra `ray` brings it"
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS") == "1":
            pytest.fail(message)
        pytest.skip(message)


@contextmanager
def ray_cluster(cpus=0, gpus=0, port=None):
    """A head with these resources, at `cluster.address`; others join by `cluster.add_node(num_cpus=1)`.

    The GPUs do not exist. `port` is that of an earlier head.
    """
    need_ray()
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        patch.dict(os.environ, _ENVIRONMENT | _QUICK),
    ):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": cpus, "num_gpus": gpus, "gcs_server_port": port, "temp_dir": folder}
        head |= {"include_dashboard": False, "node_ip_address": "127.0.0.1"}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield cluster
        finally:
            cluster.shutdown()


def kill_gcs(cluster):
    cluster.head_node.all_processes["gcs_server"][0].process.kill()


def kill_raylet(node):
    node.all_processes["raylet"][0].process.kill()

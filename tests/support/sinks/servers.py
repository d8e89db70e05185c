"""Real servers on free ports of this machine, each in a process group of its own so that all of it can be ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

MLFLOW = Path(__file__).parents[3] / ".servers-venv" / "bin" / "mlflow"
PROMETHEUS = shutil.which("prometheus")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, what, seconds=60):
    """Polls until the condition holds and returns what it returned."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds} s in vain until {what}"
        time.sleep(0.05)
    return found


def get_json(url, **query):
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as response:
        return json.load(response)


def post_json(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def need(is_there, name):
    """Skips without the server; fails where it was promised to be there."""
    if not is_there:
        message = f"no {name} here; tests/servers/install brings it"
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS") == "1":
            pytest.fail(message)
        pytest.skip(message)


@contextmanager
def running(command, log, health, **environment):
    """Runs a server until the block ends; `health` is the address that tells it is up."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers(health) or process.poll() is not None, f"{health} answers", seconds=120)
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        kill(process)


def kill(process):
    """At once and with all its children, as a machine that goes down."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


@contextmanager
def mlflow_server(folder, port=None):
    """Yields its address and its process."""
    need(MLFLOW.exists(), "MLflow server")
    address = f"http://127.0.0.1:{port or free_port()}"
    command = [
        *(str(MLFLOW), "server", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")),
    ]
    # Without job execution it does not start eight more processes.
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with running(command, folder / "mlflow.log", f"{address}/health", **quiet) as process:
        yield address, process


@contextmanager
def prometheus_server(folder, target):
    """Scrapes `target` five times a second; yields its address."""
    need(PROMETHEUS, "Prometheus")
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "scrape_configs: [{job_name: flopwatch, scrape_interval: 200ms, scrape_timeout: 200ms, "
        f'static_configs: [{{targets: ["{target}"]}}]}}]'
    )
    command = [
        *(PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    address = f"http://127.0.0.1:{port}"
    with running(command, folder / "prometheus.log", f"{address}/-/ready"):
        yield address


@contextmanager
def tensorboard_server(python, log_dir, folder, *more):
    """Yields its address."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        *(python, "-m", "tensorboard.main", "--logdir", str(log_dir), "--host", "127.0.0.1", "--port", str(port)),
        *more,
    ]
    with running(command, folder / "tensorboard.log", f"{address}/data/logdir"):
        yield address

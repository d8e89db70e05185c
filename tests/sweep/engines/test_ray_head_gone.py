"""A sweep on an existing Ray cluster whose head dies for longer than Ray's own patience of 60 s."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from flopwatch.records.sweep_results import read_results
from flopwatch.sweep.engines.ray import Cluster
from flopwatch.sweep.runner.observing import find_runner
from support.sweeping import left_behind
from testbeds.real_ray import kill_gcs, ray_head
from testbeds.wait_until import wait_until

pytestmark = pytest.mark.slow

# Trials 1 and 2 end while the head is away. Trial 3 is running when Ray gives up, so it needs a second attempt. The
# others are queued.
TRIAL = """
echo begin $FLOPWATCH_BATCH_SIZE >> "$LEDGER"
case $FLOPWATCH_BATCH_SIZE in
  1|2) sleep 15;;
  3) test $(grep -c "begin 3" "$LEDGER") = 2 || sleep 1000;;
esac
echo end $FLOPWATCH_BATCH_SIZE >> "$LEDGER"
"""


@pytest.mark.parametrize("seconds", [75, pytest.param(300, marks=pytest.mark.campaign)])
def test_a_sweep_outlives_a_head_that_is_away_and_runs_nothing_finished_again(tmp_path, seconds):
    sweep, ledger = tmp_path / "sweep", tmp_path / "ledger"
    (tmp_path / "trial.sh").write_text(TRIAL)
    with ray_head(cpus=3) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        environment = {**os.environ, "LEDGER": str(ledger)}
        command = ["sweep", "--engine", "ray", "--engine-option", f"address={cluster.address}", "-o", str(sweep)]
        command += ["--command", f"sh {tmp_path}/trial.sh", "--batch-size=1,2,3,4,5,6", "--seq-len=8"]
        runner = subprocess.Popen([sys.executable, "-m", "flopwatch", *command], env=environment, cwd=tmp_path)
        try:
            wait_until(lambda: {"begin 1", "begin 2", "begin 3"} <= lines(ledger).keys(), "three trials run", 120)
            kill_gcs(cluster)
            away_since = time.monotonic()
            wait_until(lambda: {"end 1", "end 2"} <= lines(ledger).keys(), "two trials end without the head", 60)
            wait_until(lambda: "not answered" in find_runner(sweep)[0].engine_state, "the live table says so", 60)
            wait_until(lambda: len(read_results(sweep)) >= 2, "their results are taken up meanwhile", 60)
            time.sleep(max(0.0, away_since + seconds - time.monotonic()))
            assert runner.poll() is None, "the runner ended"
        except BaseException:
            runner.kill()
            raise
    try:
        with ray_head(cpus=3, port=port):
            assert runner.wait(180) == 0
    finally:
        runner.kill()
    results = read_results(sweep)
    assert sorted(result.outcome for result in results.values()) == ["ok"] * 6
    assert lines(ledger) == {**{f"{what} {n}": 1 for what in ("begin", "end") for n in range(1, 7)}, "begin 3": 2}
    (attempt,) = results["Command_bs3_seq8"].earlier_attempts
    assert attempt["outcome"] == "lost"
    assert left_behind(sweep) == []


RAY_OF_ANOTHER_CLUSTER = """
class AuthenticationError(Exception):
    pass

def init(**settings):
    pass

def remote(**settings):
    return lambda function: function

def nodes():
    raise AuthenticationError("WrongClusterID: Perhaps the client is accessing GCS after it has restarted.")

def shutdown():
    pass
"""


def test_a_head_that_starts_again_as_a_new_cluster_counts_as_away_and_its_driver_process_is_ended(
    tmp_path, monkeypatch
):
    (tmp_path / "ray.py").write_text(RAY_OF_ANOTHER_CLUSTER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    cluster = Cluster("10.0.0.1:6379", None, None)
    try:
        wait_until(lambda: cluster.listen(0.1) or cluster.silent_since is not None, "the driver has asked", 60)
        assert "new cluster" in cluster.outage()
        wait_until(lambda: cluster.listen(0.1) or cluster.stage == "ended", "the engine starts another one")
    finally:
        cluster.close()


def lines(ledger):
    return Counter(ledger.read_text().splitlines() if ledger.exists() else ())

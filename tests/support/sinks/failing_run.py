"""A run of which one part fails, in a process of its own: python failing_run.py SCENARIO FOLDER

Prints what a monitor would have learnt, as JSON. Whether the process then ends by itself, quietly and with status 0, is
for the test to see.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from flopwatch.sinks.jsonl import JsonlSink
from flopwatch.sinks.mlflow import MlflowSink
from flopwatch.sinks.prometheus import PrometheusSink
from flopwatch.sinks.tensorboard import TensorBoardSink
from flopwatch.sinks.thread import SinkThread
from flopwatch.sinks.wandb import WandbSink
from flopwatch.testing import RecordingSink
from support.sinks.sample_run import ORIGIN, START, basic_row, summary

ROWS = 400
_PATIENCE_SECONDS = 200


@dataclass
class Scenario:
    """The sinks that get into trouble, what happens in the middle of the run, and what happens before its end."""

    sinks: list
    halfway: object = None
    at_the_end: object = None


def disk_full(folder):
    return Scenario([JsonlSink(folder / "full" / "log.jsonl"), TensorBoardSink(folder / "full" / "tensorboard")])


def disk_full_for_a_while(folder):
    sink = JsonlSink(folder / "full" / "log.jsonl")
    told = []
    sink.tell = told.append

    def free(threads):
        wait_for(lambda: told)
        subprocess.run(["mount", "-o", "remount,size=4m", str(folder / "full")], check=True)

    return Scenario([sink], halfway=free)


def folder_deleted(folder):
    logs = folder / "logs"
    sinks = [JsonlSink(logs / "log.jsonl"), TensorBoardSink(logs / "tensorboard")]

    def delete(threads):
        assert all(thread.flush(_PATIENCE_SECONDS) for thread in threads)
        shutil.rmtree(logs)

    return Scenario(sinks, halfway=delete)


def signal_wandb(threads, number):
    assert threads[0].flush(_PATIENCE_SECONDS), threads[0].failed
    children = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
    assert children, "W&B runs no process of its own any more, so there is nobody to kill"
    for child in children:
        child.send_signal(number)
    return children


def kill_wandb(threads):
    psutil.wait_procs(signal_wandb(threads, signal.SIGKILL), timeout=60)


def wandb_killed_halfway(folder):
    return Scenario([WandbSink(folder)], halfway=kill_wandb)


def wandb_killed_at_the_end(folder):
    return Scenario([WandbSink(folder)], at_the_end=kill_wandb)


def wandb_killed_while_it_finishes(folder):
    """Stopped first, so that the end of the run is under way and waiting when the kill comes."""

    def stop_then_kill(threads):
        children = signal_wandb(threads, signal.SIGSTOP)
        threading.Timer(2.0, lambda: [child.kill() for child in children]).start()

    return Scenario([WandbSink(folder)], at_the_end=stop_then_kill)


def mlflow_down_from_the_start(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"

    # Loading mlflow alone can outlast the wait for closing. MLflow's own client would need 247 s, longer than we wait.
    return Scenario([MlflowSink(folder, nobody)], at_the_end=lambda threads: wait_for(lambda: threads[0].failed))


def mlflow_dies_halfway(folder):
    address, group = (folder / "server").read_text().split()

    def kill(threads):
        assert threads[0].flush(_PATIENCE_SECONDS), threads[0].failed
        os.killpg(int(group), signal.SIGKILL)

    def notice_it(threads):
        for step in range(ROWS + 1, ROWS + 1000):
            if threads[0].failed:
                return
            threads[0].put(basic_row(step))
            time.sleep(0.05)

    # A dead server refuses at once; a busy one may take its time to start a run.
    sink = MlflowSink(folder, address, send_seconds=0.1, timeout_seconds=120, patience_seconds=0.5)
    return Scenario([sink], halfway=kill, at_the_end=notice_it)


def prometheus_port_taken(folder):
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()

    def give_back(threads):
        wait_for(lambda: threads[0].failed)
        taken.close()

    return Scenario([PrometheusSink(taken.getsockname()[1])], at_the_end=give_back)


def sink_raises(folder):
    return Scenario([RecordingSink("bad", raises=ValueError("out of paper"), fails_after=100)])


def sink_hangs(folder):
    return Scenario([RecordingSink("bad", hangs=True, fails_after=100)])


def sink_is_slow(folder):
    return Scenario([RecordingSink("bad", seconds_per_record=0.05)])


def wait_for(condition):
    end = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited {_PATIENCE_SECONDS} s in vain"
        time.sleep(0.01)


def main(scenario, folder):
    good = [RecordingSink("good"), JsonlSink(folder / "good.jsonl")]
    failures = []
    threads = [
        SinkThread(
            sink,
            lambda name, error: failures.append((name, str(error))),
            queue_size=100 if sink.name == "bad" else 2 * ROWS,
        )
        for sink in (*scenario.sinks, *good)
    ]

    def put(record):
        for thread in threads:
            thread.put(record)

    put(START)
    put(ORIGIN)
    for step in range(1, ROWS + 1):
        put(basic_row(step))
        if step == ROWS // 2 and scenario.halfway:
            scenario.halfway(threads)
    if scenario.at_the_end:
        scenario.at_the_end(threads)
    put(summary())
    # The good ones first and with time; one that never ends is given up at once.
    closed = {thread.name: thread.close(0.2 if thread.name == "bad" else 30) for thread in reversed(threads)}
    report = {
        "failures": failures,
        "closed": closed,
        "dropped": {thread.name: thread.dropped_rows for thread in threads},
        "good": [record.step for record in good[0].records if record.type == "row"],
    }
    sys.stdout.write(f"report: {json.dumps(report)}\n")


if __name__ == "__main__":
    main(globals()[sys.argv[1]](Path(sys.argv[2])), Path(sys.argv[2]))

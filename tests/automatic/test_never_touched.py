"""Whatever a training keeps, and wherever it keeps it: with flopwatch it is what it is without.

Each loop of `testbeds.stateful` runs in processes of its own, alone and with flopwatch: by `with monitor.step(batch)`,
by `log_step`, and unchanged under `flopwatch run`. All that its owner can see is compared: what it printed, weights,
gradients and buffers, its own state, the random generators of Python, numpy and torch, how often each `forward` ran,
what is still alive after `del`, and the settings of torch and of the process.
"""

import json
import os
import re
from functools import cache
from importlib.util import find_spec

import pytest

from support.warm_python import TORCH, start_warm
from testbeds.stateful import LOOPS
from testbeds.stateful.doors import SETTINGS

DOORS = ("step", "log_step", "run")
QUICK = {
    ("queue_as_a_plain_object", "step"),
    ("numpy_usage_of_codes", "step"),
    ("layer_drop_by_own_random", "step"),
    ("deque_of_features", "log_step"),
    ("finalizers_of_batches", "log_step"),
    ("random_flips_in_the_loop", "run"),
    ("list_outside_the_model", "run"),
    ("models_one_after_the_other", "run"),
}
"""In `make test`; the others are slow."""

WITH_ALL_SINKS = (
    "queue_as_a_plain_object",
    "random_flips_in_the_loop",
    "layer_drop_by_numpy",
    "dropout_and_noise",
    "models_one_after_the_other",
)
ALL_SINKS = ("console", "tensorboard", "prometheus", "wandb", "mlflow")

AT_ONCE = "import atexit, os, sys; atexit._run_exitfuncs(); sys.stdout.flush(); os._exit(0)"
"""What is to be done at the end is done, the log among it; the end of an interpreter that has torch takes half a second
more, and is not what these tests are about."""
SCRIPT = "import runpy; runpy.run_module('testbeds.stateful', run_name='__main__', alter_sys=True)"
COMMAND = "from flopwatch.cli import main\ntry: main()\nexcept SystemExit as end: assert not end.code, end.code"


def start(loop, door, folder, sinks=(), env=None):
    """A process in which the loop runs through this door; `run` is the real command."""
    environment = {**os.environ, **(env or {})}
    modules = (*TORCH, "testbeds.stateful")
    if door == "run":
        others = ",".join(sink for sink in sinks if sink != "console")
        options = ["--output-dir", str(folder), "--log-every", "4", "--peak-tflops", "1"]
        options += ["--sinks", others, "--config", str(settings_of_sinks(folder))] if others else []
        options += [] if "console" in sinks else ["--quiet"]
        command = ("run", *options, "-m", "testbeds.stateful", loop)
        end = "" if others else AT_ONCE  # they are opened and closed in their own time
        return start_warm(f"{COMMAND}\n{end}", *command, env=environment, modules=modules)
    command = (loop, "--door", door, "--folder", str(folder), "--sinks", ",".join(sinks))
    return start_warm(f"{SCRIPT}\n{AT_ONCE}", *command, env=environment, modules=modules)


def settings_of_sinks(folder):
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(SETTINGS))
    return path


def seen_by_its_owner(process):
    """What it observed and the lines it printed, or how it failed."""
    out, err = process.communicate()
    if process.returncode != 0:
        return {"failed": [line for line in err.splitlines() if line and not line.startswith("wandb:")][-3:]}
    printed, _, observed = out.rpartition("OBSERVED ")
    return {**json.loads(observed.splitlines()[0]), "printed": printed.splitlines()}


@cache
def seen_alone(loop):
    seen = seen_by_its_owner(start(loop, "plain", os.devnull))
    assert "failed" not in seen, seen
    return seen


NOT_COMPARED = {"step": (), "log_step": (), "run": ("hooks",)}
"""Hooks are compared when the monitor is closed, but `flopwatch run` watches until the process ends."""


LEFT_ON = {"torch modes": ("0", "1")}
"""Under `flopwatch run` nothing says that a training has ended, so that a count of its next step may be under way."""
ALLOWED = {
    "hooks_of_the_optimizer": ("run",),  # one more hook of the optimizer, which ends steps
    "function_mode_of_the_loop": DOORS,  # the mode sees that shapes of batches are read
}
"""Loops that see flopwatch in their `state`, as docs/exactness.md says."""


def unexpected(loop, alone, seen, door):
    """What is not the same and not in docs/exactness.md, "Exceptions"."""
    found = differences(alone, seen, door)
    if door == "run" and found.get("settings") == LEFT_ON:
        del found["settings"]
    if door in ALLOWED.get(loop, ()):
        found.pop("state", None)
    return found


def differences(alone, seen, door):
    """By name, what is not the same; lines of flopwatch itself are left out."""
    if "failed" in seen:
        return seen
    own = set(alone["printed"])
    seen = {**seen, "printed": [line for line in seen["printed"] if line in own]}
    return {
        name: unequal(alone[name], value)
        for name, value in seen.items()
        if value != alone[name] and name not in NOT_COMPARED[door]
    }


def unequal(alone, seen):
    """Both values, or only those of the keys that differ."""
    if not (isinstance(alone, dict) and isinstance(seen, dict)):
        return alone, seen
    return {key: (alone.get(key), seen.get(key)) for key in {**alone, **seen} if alone.get(key) != seen.get(key)}


def each_loop_and_door():
    """CI runs each loop through one of the doors, `make campaign` through all."""
    for number, loop in enumerate(LOOPS):
        for place, door in enumerate(DOORS):
            marks = [] if (loop, door) in QUICK else [pytest.mark.slow]
            marks += [pytest.mark.campaign] if marks and place != number % len(DOORS) else []
            yield pytest.param(loop, door, id=f"{loop}-{door}", marks=marks)


@pytest.mark.parametrize(("loop", "door"), list(each_loop_and_door()))
def test_a_training_is_what_it_is_without_flopwatch(loop, door, tmp_path):
    quiet = start(loop, door, tmp_path / "quiet")
    with_console = start(loop, door, tmp_path / "console", ("console",))
    alone = seen_alone(loop)

    assert unexpected(loop, alone, seen_by_its_owner(quiet), door) == {}
    assert unexpected(loop, alone, seen_by_its_owner(with_console), door) == {}
    assert list(tmp_path.rglob("training_log.jsonl"))


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("loop", WITH_ALL_SINKS)
def test_a_training_is_what_it_is_without_flopwatch_whatever_the_sinks(loop, door, tmp_path):
    needed = {"tensorboard": "tensorboard", "prometheus": "prometheus_client", "wandb": "wandb", "mlflow": "mlflow"}
    sinks = [sink for sink in ALL_SINKS if sink not in needed or find_spec(needed[sink])]
    env = {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }

    seen = seen_by_its_owner(start(loop, door, tmp_path / "run", sinks, env))

    assert len(sinks) == len(ALL_SINKS)
    found = unexpected(loop, seen_alone(loop), seen, door)
    found.get("settings", {}).pop("warnings", None)  # importing some of them adds filters
    assert {name: value for name, value in found.items() if value} == {}
    log = (tmp_path / "run" / "training_log.jsonl").read_text()
    assert re.findall('"sink_failed".*', log) == []
    written = {path.name for path in (*tmp_path.iterdir(), *(tmp_path / "run").iterdir())}
    assert {"tensorboard", "wandb", "mlflow"} <= written  # so all of them were opened


def test_every_kind_of_state_is_tried():
    assert len(LOOPS) >= 60
    assert {loop for loop, _ in QUICK} | set(WITH_ALL_SINKS) | set(ALLOWED) <= set(LOOPS)

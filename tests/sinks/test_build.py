import json
import subprocess
import sys

import pytest

from flopwatch.errors import InputError
from flopwatch.sinks.thread import SINK_NAMES, build_sinks
from flopwatch.testing import RecordingSink


def test_every_name_makes_its_sink(tmp_path):
    sinks, failures = build_sinks(SINK_NAMES, tmp_path, {"prometheus": {"port": 9477}, "wandb": {"project": "x"}})
    assert [sink.name for sink in sinks] == list(SINK_NAMES)
    assert failures == {}
    assert list(tmp_path.iterdir()) == []


def test_objects_are_taken_as_they_are_and_classes_by_their_path(tmp_path):
    mine = RecordingSink("mine")
    options = {"flopwatch.testing:RecordingSink": {"name": "made here"}}
    sinks, failures = build_sinks([mine, "flopwatch.testing:RecordingSink"], tmp_path, options)
    assert sinks[0] is mine
    assert (sinks[1].name, failures) == ("made here", {})


def test_an_unknown_name_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(InputError, match=r"no sink 'tensorbord'; did you mean 'tensorboard'\? Use one of console"):
        build_sinks(["console", "tensorbord"], tmp_path, {})


@pytest.mark.parametrize(
    ("bad", "options", "why"),
    [
        ("prometheus:x", {}, "is not a port"),
        ("tensorboard", {"tensorboard": {"colour": "red"}}, "colour"),
        ("no_such_module:Sink", {}, "no_such_module"),
        ("flopwatch.testing:NoSuchSink", {}, "NoSuchSink"),
        ("flopwatch.testing:FakeClock", {}, "lacks write, flush, close"),
    ],
)
def test_one_that_cannot_be_made_does_not_lose_the_others(tmp_path, bad, options, why):
    sinks, failures = build_sinks(["console", bad, "wandb"], tmp_path, options)
    assert [sink.name for sink in sinks] == ["console", "wandb"]
    assert list(failures) == [bad]
    assert why in failures[bad]


def test_an_object_that_is_no_sink_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a sink, because it lacks write, flush, close"):
        build_sinks([object()], tmp_path, {})


def test_making_sinks_loads_none_of_the_packages_behind_them():
    code = """
import json, sys
from pathlib import Path
from flopwatch.sinks.thread import SINK_NAMES, build_sinks
import flopwatch.sinks.jsonl, flopwatch.sinks.thread
build_sinks(SINK_NAMES, Path("nowhere"), {"prometheus": {"port": 9477}})
print(json.dumps(sorted({"torch", "tensorboard", "wandb", "mlflow", "prometheus_client", "numpy"} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []

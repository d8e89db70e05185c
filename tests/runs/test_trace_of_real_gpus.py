"""Traces of real GPUs give what an independent reading gives: steps, idle time, communication, and what kernels are."""

import gzip
import json
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from flopwatch.runs.traces import read_trace
from flopwatch.runs.traces.uses import use_of_kernel
from testbeds.trace_oracle import Trace, use_by_op

EXCERPTS = Path(__file__).parents[1] / "data" / "gpu_traces"
NAMES = sorted(path.name.partition(".")[0] for path in EXCERPTS.glob("*.gz"))


def excerpt(name):
    return EXCERPTS / f"{name}.json.gz"


@cache
def independent(name):
    return Trace(excerpt(name))


@pytest.mark.parametrize("name", NAMES)
def test_steps_idle_time_and_exposed_communication_are_those_of_an_independent_reading(name):
    split, truth = read_trace(excerpt(name)), independent(name).truth()
    assert split.steps == truth.steps
    assert split.seconds == pytest.approx(truth.length / 1e9, rel=1e-9)
    assert split.idle_seconds == pytest.approx(truth.idle / 1e9, rel=1e-9)
    assert split.exposed_communication_seconds == pytest.approx(truth.exposed_communication / 1e9, rel=1e-9)
    assert split.hidden_communication_seconds == pytest.approx(truth.hidden_communication / 1e9, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "milliseconds"), [("tl_mi300_resnet_ac", 18.84), ("tl_h100_qwen", 34.89), ("tl_mi300_qwen", 33.13)]
)
def test_where_the_host_runs_ahead_a_step_is_as_long_as_the_device_works_on_it(name, milliseconds):
    """The milliseconds are those from the first to the last kernel that the steps have launched (perstep.py).

    In the two of Qwen the device waits for the host before the first kernel, and this time belongs to the step.
    """
    split, truth = read_trace(excerpt(name)), independent(name).truth()
    waits_at_first = max(truth.first_kernel_begin - truth.begin, 0) / 1e6
    assert split.seconds / split.steps * 1e3 - waits_at_first == pytest.approx(milliseconds, rel=1e-3)
    assert waits_at_first < 0.02 * milliseconds


@pytest.mark.parametrize("name", NAMES)
def test_by_its_name_a_kernel_is_nearly_always_what_the_op_is_that_launched_it(name):
    """In `hta_mi250`, 6 % of the kernels' time is kernels of a convolution whose names do not say so."""
    judged, wrong = 0, 0
    for kernel in independent(name).kernels:
        truth = use_by_op(kernel) if kernel.category == "kernel" else None
        judged += (kernel.end - kernel.start) * (truth is not None)
        wrong += (kernel.end - kernel.start) * (truth not in (None, use_of_kernel(kernel.name, kernel.category)))
    assert judged > 0
    assert wrong <= (0.07 if name == "hta_mi250" else 0.01) * judged


def test_microseconds_since_1970_lose_nothing(tmp_path):
    """The same trace with the times shifted to zero, where a float has all digits, gives the same split."""
    content = json.loads(gzip.decompress(excerpt("hta_ns").read_bytes()), parse_float=Decimal)
    first = min(event["ts"] for event in content["traceEvents"])
    assert first > 1.6e15
    for event in content["traceEvents"]:
        event["ts"], event["dur"] = float(event["ts"] - first), float(event["dur"])
    path = tmp_path / excerpt("hta_ns").name
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert read_trace(path) == read_trace(excerpt("hta_ns"))

"""Traces of real GPUs give what an independent reading gives: steps, idle time, communication, and what kernels are."""

import gzip
import json
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from flopwatch.errors import InputError
from flopwatch.runs.traces import read_trace
from flopwatch.runs.traces.device import DeviceWork
from flopwatch.runs.traces.events import interval_of, read_events
from testbeds.trace_oracle import Trace, use_by_op

EXCERPTS = Path(__file__).parents[1] / "data" / "gpu_traces"
WITHOUT_STEPS = ["hta_alexnet", "tl_b200_eager", "tl_triton"]
WITH_STEPS = sorted({path.name.partition(".")[0] for path in EXCERPTS.glob("*.gz")} - set(WITHOUT_STEPS))


def excerpt(name):
    return EXCERPTS / f"{name}.json.gz"


@cache
def independent(name):
    return Trace(excerpt(name))


@pytest.mark.parametrize("name", WITH_STEPS)
def test_steps_idle_time_and_exposed_communication_are_those_of_an_independent_reading(name):
    split, trace = read_trace(excerpt(name)), independent(name)
    truth = trace.truth_between_optimizer_steps() if name == "param_linear" else trace.truth()
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


@pytest.mark.parametrize("name", [*WITH_STEPS, *WITHOUT_STEPS])
def test_a_kernel_is_what_the_op_is_that_launched_it(name):
    """Layout copies within a convolution are the convolution's."""
    work = DeviceWork()

    def take(event):
        interval = interval_of(event)
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.add_kernel(event, *interval)
        elif event["cat"] == "cpu_op":
            work.add_op(event)

    read_events(excerpt(name), take)
    judged, wrong = 0, 0
    for (use, start, end), kernel in zip(work.works(), independent(name).kernels, strict=True):
        assert (start, end) == (kernel.start, kernel.end)
        truth = use_by_op(kernel) if kernel.category == "kernel" else None
        judged += (end - start) * (truth is not None)
        wrong += (end - start) * (truth not in (None, use))
    assert judged > 0
    assert wrong <= 0.01 * judged


@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_a_trace_without_any_mark_of_a_step_is_refused_and_says_what_it_has(name):
    with pytest.raises(InputError) as refused:
        read_trace(excerpt(name))
    assert "does not mark its steps" in str(refused.value)
    told = {"hta_alexnet": "measure|forward]' (2)", "tl_b200_eager": "execute_context", "tl_triton": "CompiledFxGraph"}
    assert told[name] in str(refused.value)
    assert "pass --mark with its name" in str(refused.value)


def test_the_user_can_name_the_annotation_that_is_a_step():
    split = read_trace(excerpt("hta_alexnet"), "measure|forward")
    trace = independent("hta_alexnet")
    outer, _ = trace.marks(lambda name: "measure|forward" in name)  # the second one is inside of the first
    truth = trace.between([outer])
    assert (split.steps, split.marked_by) == (1, "[param|pytorch.model.alex_net|N|N|N|measure|forward]")
    assert split.seconds == pytest.approx(truth.length / 1e9, rel=1e-9)
    with pytest.raises(InputError, match=r"has no annotation with 'nothing' in its name. Its annotations are"):
        read_trace(excerpt("hta_alexnet"), "nothing")


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

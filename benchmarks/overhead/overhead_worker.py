"""Run one part of the cost table in this process; started by `overhead.py`, in the environment the part needs.

    python overhead_worker.py '{"part": "rivals", "size": ..., "schedule": {"repeats": 10, "steps": 15}, "folder": ...}'

prints one JSON object.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.models.presets import Preset
from flopwatch.monitor.counters import device as device_counters
from flopwatch.testing import FakeCounters
from overhead.contenders import rival_monitors as rival_monitors
from overhead.contenders.documents import documents
from overhead.contenders.watched import ALL_SINKS, Call, Watched, flopwatch
from overhead.harm import harm
from overhead.training_loop import Contender, Schedule, Size, Training, interleave

Part = Callable[[Training, Path, Mapping[str, Any]], Mapping[str, Any]]

DOCUMENTS_EVERY = 10
"""The smallest interval the documents recommend for debugging; production would be 100."""

CALLS_IN_A_ROW: Mapping[str, Call] = {"mask_in_a_row": "attention_mask", "batch_in_a_row": "batch"}


def free(training: Training, folder: Path, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Bare against our monitor with three sinks; the call timed in that loop, and apart from it."""
    schedule = Schedule(**plan["schedule"])
    watched = Watched(training, folder / "mask", sinks=ALL_SINKS)
    timings = interleave(training, {"flopwatch": watched.contender}, schedule)
    calls = {"mask_in_the_loop": watched.calls_in_the_loop()}
    with_batch = Watched(training, folder / "batch", call="batch")
    a_quarter = replace(schedule, repeats=max(2, schedule.repeats // 4))
    interleave(training, {"flopwatch": with_batch.contender}, a_quarter)
    calls["batch_in_the_loop"] = with_batch.calls_in_the_loop()
    for name, call in CALLS_IN_A_ROW.items():
        in_a_row = Watched(training, folder / name, call=call)
        calls[name] = in_a_row.calls_in_a_row(plan.get("calls", 5_000))
        in_a_row.monitor.close()
    return {**asdict(timings), **watched.figures(), "calls": calls}


def hybrid(training: Training, folder: Path, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Bare against mode hybrid with fake counters, so that the cost of a driver is not in it."""
    source = FakeCounters("fake", [{"tensor_active": 0.4, "sm_clock_mhz": 1500.0, "power_watts": 300.0}])

    def sampler(device: DeviceIdentity, notify: Callable[[str], object]) -> CounterSampler:
        return CounterSampler(device, notify, open_source=source.open)

    cast(Any, device_counters).CounterSampler = sampler
    watched = Watched(training, folder / "hybrid", mode="hybrid")
    timings = interleave(training, {"flopwatch": watched.contender}, Schedule(**plan["schedule"]))
    return {**asdict(timings), **watched.figures(), "readings": source.sampled, "calls": {}}


def frequency(training: Training, folder: Path, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Each way to measure, at one measuring frequency."""
    every = plan["every"]
    ways: dict[str, Callable[[], Contender]] = {
        mode: partial(flopwatch, training, folder / mode, mode=mode, every=every)
        for mode in ("estimate", "smart", "profiler")
    }
    ways["documents"] = partial(documents, training, every)
    if plan["rivals"]:
        ways["deepspeed"] = partial(rival_monitors.deepspeed, training, folder, every)
    return asdict(interleave(training, ways, Schedule(**plan["schedule"])))


def rivals(training: Training, folder: Path, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every monitor as people use it."""
    return asdict(interleave(training, everybody(training, folder), Schedule(**plan["schedule"])))


def everybody(training: Training, folder: Path) -> dict[str, Callable[[], Contender]]:
    return {
        "flopwatch": partial(flopwatch, training, folder / "flopwatch", sinks=ALL_SINKS),
        "lightning": partial(rival_monitors.lightning, training, folder),
        "composer": partial(rival_monitors.composer, training, folder),
        "traceml": partial(rival_monitors.traceml, training, folder),
        "mfu_tracker": partial(rival_monitors.mfu_tracker, training, folder),
        "documents": partial(documents, training, DOCUMENTS_EVERY),
        "deepspeed": partial(rival_monitors.deepspeed, training, folder, DOCUMENTS_EVERY),
    }


def harm_of_one(training: Training, folder: Path, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """What one of them does to a training besides watching it."""
    return harm(training.size, lambda new: everybody(new, folder)[plan["tool"]](), is_compiled=plan["is_compiled"])


PARTS: Mapping[str, Part] = {
    "free": free,
    "hybrid": hybrid,
    "frequency": frequency,
    "rivals": rivals,
    "harm": harm_of_one,
}


def main() -> None:
    plan = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the tools print; stdout is for the answer
    torch.set_num_threads(1)
    size = plan["size"]
    training = Training(Size(Preset(**size["sizes"]), size["seq_len"], size["batch_size"]))
    answer = PARTS[plan["part"]](training, Path(plan["folder"]), plan)
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Cuts excerpts of real GPU traces for the tests: the first steps, and of each event only what a reader needs.

PYTHONPATH=benchmarks:. python benchmarks/traces/excerpts.py FOLDER tests/data/gpu_traces

FOLDER has the whole traces, with the names that `tests/data/gpu_traces/SOURCES.md` gives.
"""

import gzip
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

STEPS = {
    "hta_alexnet": 0,
    "hta_mi250": 0,
    "hta_nccl": 1,
    "hta_negq": 1,
    "hta_ns": 2,
    "param_linear": 3,
    "tl_b200_eager": 0,
    "tl_h100_qwen": 0,
    "tl_h100_vit": 0,
    "tl_mi300_qwen": 0,
    "tl_mi300_resnet_ac": 0,
    "tl_triton": 0,
}
"""How many steps of each trace the excerpt has; 0 is all of them."""
_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
_ARGUMENTS = ("External id", "correlation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_NAME = 400
_EARLIER_WORKS = 20
"""Kernels on each stream, of those that were launched before the trace, that an excerpt keeps."""


def main(source: Path, target: Path) -> None:
    for name, steps in STEPS.items():
        with gzip.open(source / f"{name}.json.gz", "rt", errors="replace") as file:
            content = json.load(file, parse_float=Decimal)
        events = [each for each in content["traceEvents"] if each.get("ph") == "X"]
        about = {key: content[key] for key in ("baseTimeNanoseconds", "distributedInfo") if key in content}
        kept = sorted((_stripped(each) for each in _needed(_cut(events, steps))), key=lambda each: each["cat"])
        # With the time and the name left out, the same trace gives the same file.
        with (target / f"{name}.json.gz").open("wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as packed:
            text = json.dumps(
                {**about, "traceEvents": kept}, separators=(",", ":"), default=lambda number: f"@{number}@"
            )
            packed.write(re.sub(r'"@([\d.]+)@"', r"\1", text).encode())
        print(
            f"{name}: {len(kept)} of {len(events)} events, {(target / f'{name}.json.gz').stat().st_size / 1e3:.0f} kB"
        )


def _cut(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Without what the host did, or launched, after the first steps."""
    if not steps:
        return events
    prefix = "ProfilerStep#" if any(each["name"].startswith("ProfilerStep#") for each in events) else "Optimizer.step#"
    marks = [each for each in events if each.get("cat") == "user_annotation" and each["name"].startswith(prefix)]
    last = sorted(each["ts"] + each["dur"] for each in marks)[steps - 1]
    launched = {each["args"]["correlation"]: each["ts"] for each in events if _is_launch(each)}
    return [each for each in events if _host_time(each, launched) <= last]


def _host_time(event: dict[str, Any], launched: dict[int, Decimal]) -> Decimal:
    """When the host had done it, or launched it."""
    if event.get("cat") in _DEVICE:
        return launched.get(event["args"].get("correlation"), Decimal(0))
    return Decimal(event["ts"] + (event["dur"] if event.get("cat") == "user_annotation" else 0))


def _is_launch(event: dict[str, Any]) -> bool:
    return str(event.get("cat")).endswith(("_runtime", "_driver")) and "correlation" in event.get("args", {})


def _needed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Work of the device, its launches, annotations, and the innermost op around each launch."""
    worked = {each["args"].get("correlation") for each in events if each.get("cat") in _DEVICE}
    launches = [each for each in events if _is_launch(each) and each["args"]["correlation"] in worked]
    kept = {id(each) for each in (*launches, *_innermost_ops(events, launches))}
    known = {each["args"]["correlation"] for each in launches}
    earlier = [each for each in events if each.get("cat") in _DEVICE and each["args"].get("correlation") not in known]
    dropped: set[int] = set()
    for stream in {each["tid"] for each in earlier}:
        works = sorted((each for each in earlier if each["tid"] == stream), key=lambda each: each["ts"])
        dropped |= {id(each) for each in works[:-_EARLIER_WORKS]}
    annotations = (*_DEVICE, "user_annotation", "gpu_user_annotation")
    return [each for each in events if id(each) in kept or (each.get("cat") in annotations and id(each) not in dropped)]


def _innermost_ops(events: list[dict[str, Any]], launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ops: dict[Any, list[dict[str, Any]]] = {}
    for each in events:
        if each.get("cat") == "cpu_op":
            ops.setdefault((each["pid"], each["tid"]), []).append(each)
    found = []
    for launch in launches:
        around = [
            op for op in ops.get((launch["pid"], launch["tid"]), ()) if op["ts"] <= launch["ts"] <= op["ts"] + op["dur"]
        ]
        found += sorted(around, key=lambda op: op["ts"])[-1:]
    return found


def _stripped(event: dict[str, Any]) -> dict[str, Any]:
    short = {key: event[key] for key in _KEYS}
    short["name"] = short["name"][:_LONGEST_NAME]
    about = event.get("args", {})
    if _is_launch(event):  # of a launch, nobody reads how long it took
        return {**short, "name": "launch", "dur": 0, "args": {"correlation": about["correlation"]}}
    return {**short, "args": {key: about[key] for key in _ARGUMENTS if key in about}}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

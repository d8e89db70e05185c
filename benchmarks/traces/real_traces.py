"""Reads real GPU traces, and holds steps, idle time, communication and kernel classes against an independent reading.

PYTHONPATH=benchmarks:. python benchmarks/traces/real_traces.py FOLDER [--write]

FOLDER has traces as `.json.gz`; `docs/traces.md` names their sources. With `--write`, the table goes into that page.
"""

import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

from flopwatch.errors import InputError
from flopwatch.runs.traces import TraceSplit, read_trace
from flopwatch.runs.traces.device import KERNELS, DeviceWork
from flopwatch.runs.traces.events import interval_of, read_events
from flopwatch.runs.traces.steps import PROFILER_STEP
from testbeds.trace_oracle import Trace, Truth, use_by_op

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"
MARKERS = ("<!-- table: python benchmarks/traces/real_traces.py FOLDER --write -->", "<!-- end -->")
_HEAD = (
    "trace",
    "steps",
    "step, ms",
    "idle, ms",
    "exposed communication, ms",
    "hidden communication, ms",
    "largest difference",
    "first to last kernel, ms",
    "kernel time with a known op",
    "of it in another class",
    "by name alone",
)


class Classes(NamedTuple):
    """Nanoseconds of kernels: all, those whose op tells what they are, and of these, those in another class."""

    all: int
    judged: int
    wrong: int
    wrong_by_name: int


def main(folder: Path, *, write: bool) -> None:
    rows = [_row(path) for path in sorted(folder.glob("*.json.gz"))]
    text = "\n".join(_lines(rows))
    print(text)
    if write:
        page = PAGE.read_text(encoding="utf-8")
        begin = page.index(MARKERS[0]) + len(MARKERS[0])
        end = page.index(MARKERS[1], begin)
        text = f"\nRun on {date.today()}:\n\n{text}\n"
        PAGE.write_text(page[:begin] + text + page[end:], encoding="utf-8")


def _row(path: Path) -> tuple[str, ...]:
    trace, name = Trace(path), path.name.removesuffix(".json.gz")
    classes = _classes(path, trace)
    share = (_percent(classes.judged, classes.all), _percent(classes.wrong, classes.judged))
    of_classes = (*share, _percent(classes.wrong_by_name, classes.judged))
    try:
        split = read_trace(path)
    except InputError:
        return (f"`{name}`", "refused: no mark of a step", *[""] * 6, *of_classes)
    by_profiler = split.marked_by == PROFILER_STEP
    truth = trace.truth() if by_profiler else trace.truth_between_optimizer_steps()
    steps = f"{split.steps}" if by_profiler else f"{split.steps}, by `{split.marked_by}`"
    return (f"`{name}`", steps, *_times(split, truth), *of_classes)


def _times(split: TraceSplit, truth: Truth) -> Iterator[str]:
    pairs = (
        (split.seconds, truth.length),
        (split.idle_seconds, truth.idle),
        (split.exposed_communication_seconds, truth.exposed_communication),
        (split.hidden_communication_seconds, truth.hidden_communication),
    )
    if split.steps != truth.steps:
        raise SystemExit(f"{split.file}: {split.steps} steps, and {truth.steps} by the independent reading")
    yield from (f"{found / split.steps * 1e3:.2f}" for found, _ in pairs)
    differences = [abs(found - true / 1e9) / (true / 1e9) if true else found for found, true in pairs]
    yield _percent(max(differences), 1)
    yield f"{(truth.end - truth.first_kernel_begin) / truth.steps / 1e6:.2f}"


def _classes(path: Path, trace: Trace) -> Classes:
    with_ops, by_name = DeviceWork(), DeviceWork()

    def take(event: dict[str, object]) -> None:
        interval = interval_of(event)
        if interval is not None and event["cat"] in KERNELS:
            with_ops.add_kernel(event, *interval)
            by_name.add_kernel(event, *interval)
        elif event.get("cat") == "cpu_op":
            with_ops.add_op(event)

    read_events(path, take)
    lengths = [0, 0, 0, 0]
    for (use, start, end), (named, _, _), kernel in zip(with_ops.works(), by_name.works(), trace.kernels, strict=True):
        if kernel.category == "kernel":
            truth = use_by_op(kernel)
            counts = (True, truth is not None, truth not in (None, use), truth not in (None, named))
            lengths = [total + (end - start) * counted for total, counted in zip(lengths, counts, strict=True)]
    return Classes(*lengths)


def _percent(part: float, whole: int) -> str:
    return f"{part / whole:.2%}".replace("%", " %") if whole else ""


def _lines(rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(_HEAD)} |"
    yield f"| --- | --- |{' ---: |' * (len(_HEAD) - 2)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), write="--write" in sys.argv)

"""Runs `flopwatch doctor`: looks at the machine, counts one step, and prints what was found. Loads torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch

from flopwatch.cli import print_json
from flopwatch.cli.doctor import machine
from flopwatch.cli.doctor.machine import Device, Extra, Problem
from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.flops.count import count_flops
from flopwatch.numbers import flop_rate
from flopwatch.present import document as doc
from flopwatch.present.terminal import print_document
from flopwatch.text import first_line, plural

Outcome = Literal["passed", "failed", "not possible"]
MARKS: Mapping[str, doc.Cell] = {
    "passed": doc.Cell("ok", "ok"),
    "failed": doc.Cell("FAIL", "failed"),
    "not possible": doc.Cell("–", "soft"),
}
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check has found, in which time; `figures` are the numbers behind the sentence."""

    outcome: Outcome
    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


class NotPossibleError(Exception):
    """A check cannot be made on this machine; the message says why."""


def passed_if(is_right: bool, said: str, **figures: Any) -> CheckResult:
    return CheckResult("passed" if is_right else "failed", said, figures)


def run_check(name: str, check: Callable[[], CheckResult], clock: Clock = monotonic_seconds) -> CheckResult:
    """Run a check. Whatever it raises is its result: an exception that says so means that it is not possible."""
    began = clock()
    try:
        found = check()
    except NotPossibleError as reason:
        found = CheckResult("not possible", first_line(reason, _LONGEST))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong on this machine is the result of the check
        found = CheckResult("failed", f"{type(error).__name__}: {first_line(error, _LONGEST)}")
    return replace(found, name=name, seconds=clock() - began)


def counted_step() -> CheckResult:
    """A linear layer's FLOPs: 2 x samples x inputs x outputs forward, and as many for the weights' gradient."""
    counted, expected = count_flops(torch.nn.Linear(64, 32), torch.randn(8, 64)).model_flops, 2 * (2 * 8 * 64 * 32)
    said = f"{counted:,} FLOPs counted, {expected:,} by hand"
    return passed_if(counted == expected, said, counted_flops=counted, expected_flops=expected)


@dataclass(frozen=True, slots=True)
class Examined:
    """All that `flopwatch doctor` has found on a machine."""

    versions: Mapping[str, str]
    devices: Sequence[Device]
    counters: str
    counted_step: CheckResult
    extras: Sequence[Extra]
    problems: Sequence[Problem]

    @property
    def is_working(self) -> bool:
        return not any(problem.is_failure for problem in self.problems)


def examine() -> Examined:
    step = run_check("one counted step", counted_step)
    problems = machine.problems()
    if step.outcome == "failed":
        problems.insert(0, Problem(f"{step.name}: {step.said}", is_failure=True))
    return Examined(machine.versions(), machine.devices(), machine.counters(), step, machine.extras(), problems)


def show_machine(*, as_json: bool) -> int:
    """Print what `flopwatch doctor` finds; returns its exit status."""
    found = examine()
    if as_json:
        print_json({"is_working": found.is_working, **asdict(found)})
    else:
        print_document(_document(found))
    return int(not found.is_working)


def _document(found: Examined) -> doc.Document:
    step = found.counted_step
    devices = [*_devices(found.devices), doc.Text(f"Hardware counters: {found.counters}")]
    sections = [
        doc.Section("Versions", [doc.Facts([*found.versions.items()])]),
        doc.Section("Devices", devices),
        doc.Section("One counted step", [doc.Grid([""] * 2, [(MARKS[step.outcome], doc.Cell(step.said))])]),
        doc.Section("Extras", [doc.Grid([""] * 3, [*map(_row, found.extras)])]),
        # The end of the output is what a terminal shows.
        doc.Section("Problems", [*chain.from_iterable(map(_problem, found.problems)), _verdict(found)]),
    ]
    return doc.Document("", sections)


def _devices(devices: Sequence[Device]) -> Iterator[doc.Part]:
    for device in devices:
        facts = device.facts
        parts = [facts.kind, "" if facts.memory_gib is None else f"{facts.memory_gib:.1f} GiB"]
        several = f"{device.count} x " if device.count > 1 else ""
        yield doc.Text(f"{several}{facts.name} ({', '.join(filter(None, parts))})", "strong")
        if not device.peaks:
            yield doc.Text(device.why_unknown.partition("\n")[0], "warn")
        of_source: dict[tuple[str, str], list[str]] = {}
        for peak in device.peaks:
            of_source.setdefault((peak.kind, peak.source), []).append(f"{peak.dtype} {flop_rate(peak.flops_per_s)}")
        sources = (((kind, ", ".join(peaks)), ("from", source)) for (kind, source), peaks in of_source.items())
        yield doc.Facts([*chain.from_iterable(sources)])


def _row(extra: Extra) -> tuple[doc.Cell, ...]:
    is_only = len(extra.versions) == 1
    said = ", ".join(own if is_only else f"{package} {own}" for package, own in extra.versions.items())
    name = doc.Cell(extra.name)
    return name, doc.Cell(extra.command) if extra.command else doc.Cell(said), doc.Cell(extra.use, "soft")


def _problem(problem: Problem) -> Iterator[doc.Part]:
    yield doc.Text(f"{problem.what}{':' if problem.command else '.'}", "failed" if problem.is_failure else "warn")
    if problem.command:
        yield doc.Text(problem.command, "command")


def _verdict(found: Examined) -> doc.Text:
    failures = sum(problem.is_failure for problem in found.problems)
    if failures:
        return doc.Text(f"With {plural(failures, 'problem')}, flopwatch does not work as it should here.", "failed")
    limits = f", with {plural(len(found.problems), 'limit')}" if found.problems else ""
    return doc.Text(f"flopwatch works here{limits}.", "ok")

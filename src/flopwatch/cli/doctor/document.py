"""What `flopwatch doctor` shows, as a document."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from flopwatch.cli.doctor.findings import CheckResult, Part, Problem
from flopwatch.cli.doctor.machine import Device
from flopwatch.numbers import duration, flop_rate
from flopwatch.present import document as doc
from flopwatch.text import plural

_MARKS: Mapping[str, doc.Cell] = {
    "there": doc.Cell("ok", "ok"),
    "missing": doc.Cell("absent", "soft"),
    "unusable": doc.Cell("unusable", "warn"),
    "broken": doc.Cell("FAIL", "failed"),
    "passed": doc.Cell("ok", "ok"),
    "failed": doc.Cell("FAIL", "failed"),
    "not possible": doc.Cell("–", "soft"),
}


@dataclass(frozen=True, slots=True)
class Examined:
    """All that `flopwatch doctor` has found on a machine."""

    versions: Mapping[str, str]
    limits: Mapping[str, str]
    devices: Sequence[Device]
    counters: Sequence[Part]
    extras: Sequence[Part]
    programs: Sequence[Part]
    problems: Sequence[Problem]
    checks: Sequence[CheckResult]

    @property
    def failures(self) -> list[str]:
        """The names of what is installed and does not work."""
        broken = [part.name for part in self.extras if part.state == "broken"]
        failed = [check.name for check in self.checks if check.outcome == "failed"]
        return [*failed, *broken, *(problem.what for problem in self.problems if problem.is_failure)]


_WORTH_A_TIME = 0.1
_NO_COUNTERS = "No source of hardware counters knows this device."


def examined_document(found: Examined) -> doc.Document:
    sections = [
        doc.Section("Versions", [doc.Facts([*found.versions.items(), *found.limits.items()])]),
        doc.Section("Devices", list(_devices(found.devices))),
        doc.Section("Hardware counters", list(_parts(found.counters, if_none=_NO_COUNTERS * (not found.counters)))),
        doc.Section("Extras", list(_parts(found.extras))),
        doc.Section("Programs", list(_parts(found.programs))),
    ]
    if found.problems:
        sections.append(doc.Section("Known problems", [part for each in found.problems for part in _problem(each)]))
    # The end of the output is what a terminal shows.
    checks = doc.Section("Checks", [checks_grid(found.checks), _verdict(found.failures)])
    return doc.Document("", [*sections, checks])


def _verdict(failures: Sequence[str]) -> doc.Text:
    if not failures:
        return doc.Text("Everything that is installed works.", "ok")
    return doc.Text(f"{plural(len(failures), 'part')} of this installation failed: {', '.join(failures)}", "failed")


def _problem(problem: Problem) -> Iterator[doc.Part]:
    yield doc.Text(f"{problem.what}:" if problem.command else problem.what, "warn")
    if problem.command:
        yield doc.Text(problem.command, "command")


def checks_grid(checks: Sequence[CheckResult], *, with_seconds: bool = False) -> doc.Grid:
    columns: list[doc.Head | str] = ["", "", "", *(doc.numbers("") if with_seconds else ())]
    rows: list[tuple[doc.Cell | str, ...]] = []
    for check in checks:
        took = duration(check.seconds) if check.seconds >= _WORTH_A_TIME else ""
        rows.append((_MARKS[check.outcome], check.name, doc.Cell(check.said), *([took] if with_seconds else [])))
    return doc.Grid(columns, rows)


def _devices(devices: Sequence[Device]) -> Iterator[doc.Part]:
    for device in devices:
        yield doc.Text(_name(device), "strong")
        if not device.peaks:
            yield doc.Text(device.why_unknown.partition("\n")[0], "warn")
            continue
        of_source: dict[tuple[str, str], list[str]] = {}
        for peak in device.peaks:
            of_source.setdefault((peak.kind, peak.source), []).append(f"{peak.dtype} {flop_rate(peak.flops_per_s)}")
        facts = (((kind, ", ".join(peaks)), ("from", source)) for (kind, source), peaks in of_source.items())
        yield doc.Facts([*chain.from_iterable(facts)])


def _name(device: Device) -> str:
    facts = device.facts
    parts = [facts.kind, "" if facts.memory_gib is None else f"{facts.memory_gib:.1f} GiB"]
    several = f"{device.count} x " if device.count > 1 else ""
    return f"{several}{facts.name} ({', '.join(filter(None, parts))})"


def _parts(parts: Sequence[Part], if_none: str = "") -> Iterator[doc.Part]:
    rows: list[tuple[doc.Cell | str, ...]] = []
    for part in parts:
        said = doc.Cell(part.said, "soft" if part.state == "missing" else "")
        brings = said if part.said else doc.Cell(part.command)
        rows.append((_MARKS[part.state], doc.Cell(part.name), brings, doc.Cell(part.use, "soft")))
    has_use = any(part.use for part in parts)
    yield doc.Grid([""] * (4 if has_use else 3), rows if has_use else [row[:3] for row in rows], note=if_none)
    for part in parts:
        if part.said and part.command:
            yield doc.Text(part.command, "command")


def gpu_document(device: str, results: Sequence[CheckResult], path: str, issues: str) -> doc.Document:
    failed = [result.name for result in results if result.outcome == "failed"]
    possible = [result for result in results if result.outcome != "not possible"]
    verdict = doc.Text(f"{len(possible) - len(failed)} of {plural(len(possible), 'check')} passed on {device}.", "ok")
    if failed:
        verdict = doc.Text(f"{plural(len(failed), 'check')} failed on {device}: {', '.join(failed)}", "failed")
    told = (
        f"Written to {path}. It has no names of hosts or users, no paths, addresses or serial numbers; look into it "
        "before you send it. flopwatch was written without a GPU, so every result, good or bad, is news. To send it:"
    )
    shown: list[doc.Part] = [
        checks_grid(results, with_seconds=True),
        verdict,
        doc.Text(told),
        doc.Text(issues, "command"),
    ]
    return doc.Document("", [doc.Section("Checks", shown)])

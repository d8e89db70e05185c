"""Explain how an MFU in a log was computed: FLOPs, seconds, peak, and the division.

The MFU belongs to one step or to one logging window. The numbers of a window are sums over those of its steps that are
timed, are not warm-up, and have known FLOPs.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any

from flopwatch.decode import Stored
from flopwatch.language import Said, Templates, commas, semicolons
from flopwatch.records.run import Number, Provenance, Row, RunStart
from flopwatch.runs import RunLog, provenance_at, step_cells
from flopwatch.text import one_line


@dataclass(frozen=True, slots=True)
class Quotient:
    """An MFU or HFU: `share` is `flops / (seconds * peak_flops_per_s * device_count)`.

    `peak_flops_per_s` is the peak of one device. `logged` is the share in the log; None if the log has none.
    """

    flops: int
    seconds: float
    peak_flops_per_s: float
    device_count: int
    share: float
    logged: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation(Stored):
    """Every number from which the MFU of a step or a window was computed. Unknown values are None.

    Attributes:
        step: Number of the step, or of the last step of the window.
        is_window: True if the numbers are sums over the logging window, False if they belong to one step.
        session: Which session (start or resumption of the run) ran the step, counted from 1.
        steps: The steps whose numbers are added up.
        left_out: The other steps of the window, each with the reason why it is left out.
        model_flops: The numerator of MFU.
        hardware_flops: The numerator of HFU.
        recompute_flops: The part of `hardware_flops` that activation checkpointing computed a second time.
        seconds: Step time, including the wait for the batch.
        input_wait_seconds: The part of `seconds` spent waiting for the batch.
        is_warm_up: True for a single warm-up step, which does not count towards the MFU of its window.
        exact: Whether the FLOPs of the window are exact; `notes` say why not.
        unknown: For each unknown value, the reason why it is unknown.
        torn_lines: Number of lines of the log that could not be read.
        earlier_step: The last step of an earlier run in the same log, which is left out; None if there is none.
        peak_was_logged: False if the peak was given or measured after the run, so that the log has no MFU at it.
        world_size: Number of ranks. The steps in a log are those of one rank, the one that writes the log.
        all_ranks_mfu: MFU of the window over all ranks; None if there is only one rank.
        what_ran: Script, arguments, folder, git commit, user, job and packages of the session, in words.
    """

    log: str
    step: int
    window: tuple[int, int]
    is_window: bool
    session: int
    sessions: int
    steps: tuple[int, ...]
    left_out: Mapping[int, str]
    model_flops: int | None
    hardware_flops: int | None
    recompute_flops: int | None
    seconds: float | None
    input_wait_seconds: float | None
    is_warm_up: bool
    provenance: Provenance | None
    mfu: Quotient | None
    hfu: Quotient | None
    unknown: Mapping[str, str]
    torn_lines: int
    world_size: int = 1
    all_ranks_mfu: float | None = None
    exact: bool | None = None
    notes: tuple[str, ...] = ()
    what_ran: Mapping[str, str] = field(default_factory=dict)
    earlier_step: int | None = None
    peak_was_logged: bool = True


Cells = Mapping[str, Any]


def explain_step(log: RunLog, step: int) -> Explanation:
    """Explain the MFU of one step; raises InputError if it is not in the log."""
    found = step_cells(log, step)
    return _explained(log, found.row, [found.cells], {}, is_window=False)


def explain_window(log: RunLog, row: Row, logged: Row | None = None) -> Explanation:
    """Explain the MFU of a logging window, which the log has as `perf/mfu`.

    If the peak was given after the run, `logged` is the row as the log has it.
    """
    cells = [step_cells(log, number).cells for number in row.steps.get("step", ())]
    needs_flops = any("model_flops" in cell for cell in cells)
    left_out = {cell["step"]: reason for cell in cells if (reason := _why_left_out(cell, needs_flops=needs_flops))}
    counted = [cell for cell in cells if cell["step"] not in left_out]
    return _explained(log, row, counted, left_out, is_window=True, logged=logged)


_NOT_KNOWN = Said("FLOPs not known")


def _why_left_out(cells: Cells, *, needs_flops: bool) -> str | None:
    if cells.get("seconds") is None:
        return Said("not timed")
    if cells.get("warm_up"):
        return Said("warm-up, or counted as they ran")
    return _NOT_KNOWN if needs_flops and "model_flops" not in cells else None


def _explained(
    log: RunLog,
    row: Row,
    steps: Sequence[Cells],
    left_out: Mapping[int, str],
    *,
    is_window: bool,
    logged: Row | None = None,
) -> Explanation:
    numbers = row.steps.get("step") or [row.step]
    step = row.step if is_window else steps[0]["step"]
    provenance = _with_peak_of(row, provenance_at(log, step))
    # The last session that ran the step: its values replace those of earlier sessions.
    began = [start.resumed_after_step is None or start.resumed_after_step < step for start in log.starts]
    session = max((number for number, is_before in enumerate(began, 1) if is_before), default=1)
    columns = {name: [cells.get(name) for cells in steps] for name in _SUMMED}
    # Unknown if one step does not have it, because a partial sum would be wrong.
    sums: dict[str, Any] = {
        name: sum(column) if column and None not in column else None for name, column in columns.items()
    }
    world_size = max((start.world_size for start in log.starts), default=1)
    # With several ranks, the logged MFU is over all ranks but the logged steps are those of one rank.
    values = row.values if logged is None else logged.values
    comparable = values if is_window and world_size == 1 else {}
    return Explanation(
        log=str(log.path),
        step=step,
        window=(numbers[0], numbers[-1]),
        is_window=is_window,
        session=session,
        what_ran=dict(what_ran(log.starts[session - 1])) if log.starts else {},
        sessions=max(len(log.starts), 1),
        steps=tuple(cells["step"] for cells in steps),
        left_out=left_out,
        **sums,
        is_warm_up=not is_window and bool(steps[0].get("warm_up")),
        provenance=provenance,
        mfu=_division(steps, "model_flops", provenance, comparable.get("perf/mfu")),
        hfu=_division(steps, "hardware_flops", provenance, comparable.get("perf/hfu")),
        unknown=_unknown(sums, provenance, left_out, log),
        torn_lines=log.torn_lines,
        earlier_step=log.earlier_step,
        peak_was_logged=values.get("perf/mfu") == row.values.get("perf/mfu"),
        world_size=world_size,
        all_ranks_mfu=row.values.get("perf/mfu") if world_size > 1 else None,
        exact=row.exact,
        notes=tuple(row.notes),
    )


def _with_peak_of(row: Row, provenance: Provenance | None) -> Provenance | None:
    """Replace the peak of the run by the peak of this row, which depends on the dtypes of its steps."""
    if provenance is None or row.exact is None:
        return provenance
    if row.peak is None or provenance.peak is None:
        return replace(provenance, peak=None)
    if isclose(row.peak["flops_per_s"], provenance.peak["flops_per_s"], rel_tol=1e-9):
        return provenance
    source = Said(
        "mean of the peaks of these steps' dtypes, weighted by FLOPs; {source}", source=str(provenance.peak["source"])
    )
    return replace(provenance, peak={**provenance.peak, **row.peak, "source": source})


_SUMMED = (*("model_flops", "hardware_flops", "recompute_flops", "seconds", "input_wait_seconds"),)


def _division(
    steps: Sequence[Cells], name: str, provenance: Provenance | None, logged: Number | None
) -> Quotient | None:
    if provenance is None or provenance.peak is None:
        return None
    known = [step for step in steps if step.get(name) is not None and step.get("seconds") is not None]
    flops, seconds = sum(step[name] for step in known), sum(step["seconds"] for step in known)
    if not known or seconds <= 0:
        return None
    peak, devices = float(provenance.peak["flops_per_s"]), provenance.device_count
    return Quotient(flops, seconds, peak, devices, flops / (seconds * peak * devices), logged)


def _unknown(sums: Cells, provenance: Provenance | None, left_out: Mapping[int, str], log: RunLog) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if sums["model_flops"] is None:
        reasons["model_flops"] = _why_no_flops(provenance, left_out)
    if sums["seconds"] is None:
        reasons["seconds"] = (
            Said("no step of the window was timed outside warm-up")
            if left_out
            else Said(
                "the start of the step was not measured: wrap the step in `with monitor.step():` to time the first one"
            )
        )
    if provenance is None or provenance.peak is None:
        device = next((start.environment.get("device") for start in reversed(log.starts)), None)
        reasons["peak"] = Said(
            "flopwatch has no peak FLOP/s for {device}: give it now with --peak-tflops, or measure it with `flopwatch "
            "peak --measure`",
            device=str(device) if device else Said("this device"),
        )
    return reasons


def _why_no_flops(provenance: Provenance | None, left_out: Mapping[int, str]) -> str:
    if left_out and provenance is not None and provenance.method is not None and _NOT_KNOWN not in left_out.values():
        return Said("all steps of the window are left out: {why}", why=commas(sorted(set(left_out.values()))))
    why = Said("the shape of the batch was not logged, or its FLOPs could not be counted")
    if provenance is None or provenance.method is None:
        why = Said("FLOPs were not yet counted when this was logged")
    notes = semicolons(provenance.notes) if provenance is not None else ""
    return Said("{why} ({notes})", why=why, notes=notes) if notes else why


WHAT_RAN: Templates = {
    "script": "script",
    "arguments": "arguments",
    "working folder": "working folder",
    "git commit": "git commit",
    "user": "user",
    "job": "job",
    "packages": "packages",
}
_SHORT_COMMIT = 12
_LONGEST = 2000


def what_ran(start: RunStart | None) -> list[tuple[str, str]]:
    """Label and text of each fact that the log has; empty if the run was told to log none of them.

    >>> git = {"commit": "0123456789abcdef", "branch": "main", "dirty": True}
    >>> what_ran(RunStart("a", 0.0, "out", what_ran={"script": "t.py", "arguments": ["--lr", "1 2"], "git": git}))
    [('script', 't.py'), ('arguments', "--lr '1 2'"), ('git commit', '0123456789ab (main), with changes')]
    """
    facts = {} if start is None else start.what_ran
    git, commit, arguments = facts.get("git"), "", facts.get("arguments")
    if isinstance(git, Mapping):
        branch = f" ({git['branch']})" if git.get("branch") else ""
        commit = f"{str(git.get('commit'))[:_SHORT_COMMIT]}{branch}"
        commit = commas([commit, Said("with changes") if git.get("dirty") else ""])
    found = {
        "script": facts.get("script"),
        "arguments": shlex.join(map(str, arguments)) if isinstance(arguments, list | tuple) else "",
        "working folder": facts.get("folder"),
        "git commit": commit,
        "user": facts.get("user"),
        "job": _pairs(facts.get("job")),
        "packages": _pairs(facts.get("packages")),
    }
    return [
        (label, text if isinstance(text, Said) else one_line(str(text), _LONGEST))
        for label, text in found.items()
        if text
    ]


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if isinstance(values, Mapping) else ""

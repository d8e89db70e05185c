"""Prints one line per logging window, with a progress bar below it. Unknown values are left out, not shown as 0."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console, Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from flopwatch.language import Said, Templates, _, commas, counted, semicolons
from flopwatch.numbers import count, duration, energy, flop_rate, flops, number, percent, step_time
from flopwatch.records.run import Notice, Provenance, Record, Row, RunStart, Summary
from flopwatch.sinks.protocol import Sink
from flopwatch.text import cells

LONG_WAIT_PERCENT = 10.0
"""If waiting for input takes more than this share of the step time, the printed line shows the share."""

LONG_COUNT_SECONDS = 1.0
"""If counting FLOPs takes longer than this, the summary shows how long it took."""


def row_parts(row: Row, step_width: int = 0) -> list[tuple[str, str, str]]:
    """Label, number and unit of each part of a row, the most important first; `~` marks MFU and HFU that are not exact.

    >>> row_parts(Row(20, 0.0, {"training/loss": 2.5, "perf/step_time": 0.213}))
    [('step', '20', ''), ('loss', ' 2.5000', ''), ('', '213', ' ms/step')]
    """
    values = row.values
    parts: list[tuple[str, str, str]] = [(Said("step"), f"{row.step:>{step_width},}", "")]
    if "training/loss" in values:
        parts.append((Said("loss"), f"{_loss(values['training/loss']):>7}", ""))
    for label, key in (("MFU", "perf/mfu_percent"), ("HFU", "perf/hfu_percent")):
        if key in values:
            about = "~" if row.exact is False else ""
            parts.append((label, f"{about + _percent(values[key]):>6}", ""))
    if values.get("perf/input_wait_percent", 0) > LONG_WAIT_PERCENT:
        parts.append((Said("input wait"), _percent(values["perf/input_wait_percent"]), ""))
    if "perf/tokens_per_second" in values:
        parts.append(("", f"{count(values['perf/tokens_per_second']):>5}", Said(" tok/s")))
    elif "perf/samples_per_second" in values:
        parts.append(("", f"{count(values['perf/samples_per_second']):>5}", Said(" samples/s")))
    if "perf/step_time" in values:
        figure, _, unit = step_time(values["perf/step_time"]).partition(" ")
        parts.append(("", f"{figure:>3}", Said(" {unit}/step", unit=unit)))
    return parts


def start_line(start: RunStart) -> str:
    parts = [Said("flopwatch: logging to {folder}", folder=start.output_dir)]
    if start.total_steps is not None:
        parts.append(Said("{steps:,} steps planned", steps=start.total_steps))
    if start.resumed_after_step is not None:
        parts.append(Said("resumed after step {step:,}", step=start.resumed_after_step))
    return commas(parts)


def provenance_line(origin: Provenance) -> str:
    """A line that tells how FLOPs are counted and which peak is used.

    >>> provenance_line(Provenance(1, "smart", "step", True, "full"))
    'FLOPs counted as steps run, attention full; no peak known, so no MFU'
    """
    counted = []
    if origin.method is None:
        counted.append(Said("FLOPs not known yet"))
    elif origin.method == "step":
        counted.append(Said("FLOPs counted as steps run, attention {attention}", attention=origin.attention))
    else:
        how = Said("FLOPs of model(batch) by {method}, attention {attention}")
        counted.append(how.filled(method=origin.method, attention=origin.attention))
    if origin.coverage is not None and origin.coverage < 1:
        counted.append(Said("{share} of the ops counted", share=percent(origin.coverage)))
    if origin.peak is None:
        return semicolons([commas(counted), Said("no peak known, so no MFU")])
    device, rate = origin.peak["device"], flop_rate(origin.peak["flops_per_s"])
    if origin.peak.get("kind") == "measured":
        device = Said("{device} (measured)", device=device)
    peak = Said(
        "peak {rate} {dtype} of {device}",
        rate=rate if origin.device_count == 1 else f"{origin.device_count} x {rate}",
        dtype=origin.peak["dtype"],
        device=device,
    )
    return semicolons([commas(counted), peak])


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Label and text of each line of the table that is printed at the end of a run."""
    values = summary.values
    about = "~" if summary.exact is False else ""
    counting, wait = values.get("time/count_seconds", 0), values.get("perf/input_wait_percent", 0)

    def of(key: str, shown: Callable[[float], str]) -> str | None:
        return shown(values[key]) if key in values else None

    lines = [
        (Said("steps"), of("total/steps", "{:,}".format)),
        (Said("time in steps"), of("time/train_seconds", duration)),
        (
            Said("counting FLOPs"),
            Said("{seconds}, not in the time in steps", seconds=duration(counting))
            if counting > LONG_COUNT_SECONDS
            else None,
        ),
        (Said("loss"), of("training/loss", _loss)),
        ("MFU", of("perf/mfu_percent", lambda value: about + _percent(value))),
        ("HFU", of("perf/hfu_percent", lambda value: about + _percent(value))),
        (Said("not exact"), semicolons(summary.notes) or None),
        (
            Said("input wait"),
            Said("{share} of the time in steps", share=_percent(wait)) if wait > LONG_WAIT_PERCENT else None,
        ),
        (Said("tokens"), of("total/tokens", count)),
        (Said("tokens/s"), of("perf/tokens_per_second", count)),
        (Said("model FLOPs"), of("total/model_flops", flops)),
        (Said("energy"), of("total/energy_joules", energy)),
        (Said("notices"), _notices(summary.notices) or None),
        *(
            (Said("{sink} lost", sink=sink), counted(rows, "{n} row", "{n} rows"))
            for sink, rows in summary.dropped_rows.items()
            if rows
        ),
        *((Said("{part} failed", part=part), why) for part, why in summary.failed_parts.items()),
    ]
    return [(label, text) for label, text in lines if text is not None]


def _notices(times: Mapping[str, int]) -> str:
    """How often each notice was due; the table would become as wide as the longest code if these were labels.

    >>> _notices({"stalled": 3, "not_exact": 1})
    'stalled (3 times), not_exact'
    """
    often = Said("{code} ({due:,} times)")
    return commas(code if due == 1 else often.filled(code=code, due=due) for code, due in times.items())


def _loss(value: float) -> str:
    return number(value, digits=5)


def _percent(value: float) -> str:
    return percent(value / 100)


_ERASE_LINE = "\r\x1b[2K"
_WIDEST = 100
_NOTICE_STYLES = {"info": "cyan", "warning": "yellow", "error": "red"}
_LEVELS: Templates = {"info": "info", "warning": "warning", "error": "error"}


class ConsoleSink(Sink):
    r"""Shows the progress of a run as text.

    A terminal gets colours, and a progress bar with the time left if the number of steps is known. A file or a pipe
    gets plain lines. The cursor is not hidden and `sys.stdout` is not replaced, so a killed run leaves the terminal
    intact.

    Args:
        stream: Where it writes; a name is that of a stream of `sys`, looked up at the first record, so that the sink
            can be sent to a process that trains.
        is_plain: True shows no progress bar, and no notices, which `logging` prints too.

    >>> import io
    >>> stream = io.StringIO()
    >>> sink = ConsoleSink(stream)
    >>> sink.write(Row(20, 0.0, {"training/loss": 2.5, "perf/mfu_percent": 41.2}))
    >>> stream.getvalue()
    'step 20  loss  2.5000  MFU 41.2 %\n'
    """

    name = "console"
    gather_seconds = 0.0

    def __init__(self, stream: TextIO | str | None = None, *, is_plain: bool = False) -> None:
        self._stream = "stdout" if stream is None else stream
        self._is_plain = is_plain
        self.shows_rows = True
        self._start: RunStart | None = None
        self._first_row: Row | None = None
        self._last_row: Row | None = None
        self._bar_is_drawn = False
        self._has_said_why = False
        """Whether a row without rates was already explained."""

    def write(self, record: Record) -> None:
        if isinstance(record, RunStart):
            self._start, self._first_row, self._last_row = record, None, None
            self._show(Text(_(start_line(record)), style="dim"))
        elif isinstance(record, Provenance):
            self._show(Text(_(provenance_line(record)), style="dim"))
        elif isinstance(record, Notice):
            if not self._is_plain:
                style = _NOTICE_STYLES[record.level]
                where = Said("{level} at step {step:,}:") if record.step is not None else Said("{level}:")
                begin = _(where.filled(level=Said(_LEVELS[record.level]), step=record.step or 0)) + " "
                self._show(Text.assemble((begin, f"bold {style}"), (_(record.message), style)))
        elif isinstance(record, Row):
            if self.shows_rows:
                self._first_row, self._last_row = self._first_row or record, record
                self._show(self._line(record))
        else:
            self._last_row = None
            self._show(_end(record))
            has_log = "jsonl" not in record.failed_parts  # without the local log there is nothing to read
            if self._start is not None and has_log and record.values.get("total/steps"):
                command = f"flopwatch why {shlex.quote(str(self._start.output_dir))}"
                self._show(_(Said("Next: {step}", step=command)))  # as it is, because a wrapped path cannot be copied

    def close(self) -> None:
        """End the line of the progress bar; the bar stays visible."""
        if self._bar_is_drawn:
            self._bar_is_drawn = False
            self._console.file.write("\n")
            self._console.file.flush()

    def _show(self, content: str | Text | Group) -> None:
        """Print in a single write, because other threads may print at the same time."""
        console = self._console
        if isinstance(content, Text) and not console.is_terminal:
            content = content.plain  # lines in a file are not wrapped
        written = f"{content}\n"
        if not isinstance(content, str):
            with console.capture() as captured:
                console.print(content)
            written = captured.get() if console.is_terminal else re.sub(r" +$", "", captured.get(), flags=re.MULTILINE)
        bar = self._bar()
        console.file.write((_ERASE_LINE if self._bar_is_drawn else "") + written + bar)
        console.file.flush()
        self._bar_is_drawn = bool(bar)

    @cached_property
    def _console(self) -> Console:
        stream = getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream
        return Console(file=stream, highlight=False, force_jupyter=False)

    def _paint(self, text: str, style: str) -> str:
        """Add colour to a text without rich's layout, which takes a millisecond per line."""
        console = self._console
        if not text or not console.is_terminal or console.color_system is None or console.no_color:
            return text
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)

    def _line(self, row: Row) -> str:
        total = self._start.total_steps if self._start else None
        room = self._console.width + 2 if self._console.is_terminal else sys.maxsize
        parts: list[str] = []
        found = row_parts(row, step_width=len(f"{total:,}") if total else 0)
        if not self._has_said_why and "perf/step_time" not in row.values and all(row.steps.get("warm_up", [False])):
            self._has_said_why = True
            found.append(("", "", Said("no rates yet, because these steps were counted or are warm-up")))
        for name, figure, what in found:
            label, unit = f"{_(name)} " if name else "", _(what)
            room -= cells(label + figure + unit) + 2
            if room < 0:
                break
            parts.append(self._paint(label, "dim") + self._paint(figure, "bold") + self._paint(unit, "dim"))
        return "  ".join(parts)

    def _bar(self) -> str:
        """The progress bar; empty if the number of steps is unknown or the output is not a terminal."""
        console, start, first, last = self._console, self._start, self._first_row, self._last_row
        if self._is_plain or not (start and start.total_steps and first and last):
            return ""
        if not console.file.isatty() or console.is_dumb_terminal:
            return ""
        total, seconds_left = start.total_steps, _seconds_left(first, last, start.total_steps)
        share = f"  {percent(last.steps_done / total, decimals=0)}"
        steps = f"  {_(Said('{done:,} of {total:,}', done=last.steps_done, total=total))}"
        left = "" if seconds_left is None else f"  {_(Said('{time} left', time=duration(seconds_left, rough=True)))}"
        # The last column stays free, because a full line would wrap, and `_ERASE_LINE` erases only one line.
        width = max(min(console.width - 1, _WIDEST) - cells(share + steps + left), 0)
        done = round(width * min(last.steps_done / total, 1))
        sign = "-" if console.options.ascii_only else "━"
        drawn = self._paint(sign * done, "cyan") + self._paint(sign * (width - done), "dim bright_black")
        return drawn + self._paint(share, "bold") + self._paint(steps, "dim") + self._paint(left, "cyan")


def _seconds_left(first: Row, last: Row, total_steps: int) -> float | None:
    """Seconds until the run ends, estimated from the time per step since the first row; None if unknown."""
    steps_left = max(total_steps - last.steps_done, 0)
    if last.step > first.step:
        return steps_left * (last.unix_time - first.unix_time) / (last.step - first.step)
    seconds = last.values.get("perf/step_time")
    return None if seconds is None else steps_left * seconds


def _end(summary: Summary) -> Group:
    where = Said("before the first row") if summary.step is None else Said("at step {step:,}", step=summary.step)
    cause = "Ctrl-C" if summary.ended_by == "KeyboardInterrupt" else (summary.ended_by or "").rstrip(".")
    ended = Said("The run ended {where}.")
    if summary.ended_by is not None:
        ended = Said("The run was ended {where} by {cause}.")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold")
    for label, text in summary_lines(summary):
        style = "red" if label.endswith((" failed", " lost")) else ""
        table.add_row(_(label), Text(_(text), style=style))
    return Group(Text("\n" + _(ended.filled(where=where, cause=cause)), style="bold"), table)

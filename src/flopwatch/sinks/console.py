"""A line per logging window in the terminal, with a progress bar below where there is one to draw on."""

import re
import sys
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console, Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from flopwatch.run_records import Notice, Provenance, Record, Row, RunStart, Summary
from flopwatch.sinks import console_text

_ERASE_LINE = "\r\x1b[2K"
_WIDEST = 100
_NOTICE_STYLES = {"info": "cyan", "warning": "yellow", "error": "red"}


class ConsoleSink:
    r"""Tells a person how the run is going.

    A terminal gets colours, and a progress bar with the time left when the number of steps is known. A file or a pipe
    gets plain lines. The cursor is not hidden and `sys.stdout` not replaced, so a run that is killed leaves the
    terminal as it was.

    >>> import io
    >>> stream = io.StringIO()
    >>> sink = ConsoleSink(stream)
    >>> sink.write(Row(20, 0.0, {"training/loss": 2.5, "perf/mfu_percent": 41.2}))
    >>> stream.getvalue()
    'step 20  loss  2.5000  MFU 41.2%\n'
    """

    name = "console"
    gather_seconds = 0.0

    def __init__(self, stream: TextIO | None = None) -> None:
        """Writes to `stream`; if None, to what `sys.stdout` is when the first record comes."""
        self._stream = stream
        self._console: Console | None = None
        self._start: RunStart | None = None
        self._first_row: Row | None = None
        self._last_row: Row | None = None
        self._bar_is_drawn = False

    def write(self, record: Record) -> None:
        if isinstance(record, RunStart):
            self._start, self._first_row, self._last_row = record, None, None
            self._show(Text(console_text.start_line(record), style="dim"))
        elif isinstance(record, Provenance):
            self._show(Text(console_text.provenance_line(record), style="dim"))
        elif isinstance(record, Notice):
            self._show(_notice(record))
        elif isinstance(record, Row):
            self._first_row = self._first_row or record
            self._last_row = record
            self._show(self._line(record))
        else:
            self._last_row = None
            self._show(_end(record))

    def flush(self) -> None:
        """Every record is shown at once."""

    def close(self) -> None:
        """Ends the bar's line; what is drawn stays."""
        if self._bar_is_drawn:
            self._bar_is_drawn = False
            print(file=self._stream, flush=True)

    def _show(self, content: str | Text | Group) -> None:
        """One write for all of it: other threads print too."""
        console = self._open()
        if isinstance(content, str):
            shown = f"{content}\n"
        elif isinstance(content, Text) and not console.is_terminal:
            shown = f"{content.plain}\n"  # a file's lines are not wrapped
        else:
            with console.capture() as captured:
                console.print(content)
            shown = captured.get() if console.is_terminal else re.sub(r" +$", "", captured.get(), flags=re.MULTILINE)
        bar = self._bar()
        console.file.write((_ERASE_LINE if self._bar_is_drawn else "") + shown + bar)
        console.file.flush()
        self._bar_is_drawn = bool(bar)

    def _open(self) -> Console:
        if self._console is None:
            self._stream = self._stream or sys.stdout
            self._console = Console(file=self._stream, highlight=False, force_jupyter=False)
        return self._console

    def _paint(self, text: str, style: str) -> str:
        """Rows and bar are painted here: laid out by rich, they would take a millisecond each time."""
        console = self._open()
        if not text or not console.is_terminal or console.color_system is None or console.no_color:
            return text
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)

    def _line(self, row: Row) -> str:
        total = self._start.total_steps if self._start else None
        room = self._open().width if self._open().is_terminal else sys.maxsize
        parts: list[str] = []
        for label, figure, unit in console_text.row_parts(row, step_width=len(f"{total:,}") if total else 0):
            label = f"{label} " if label else ""
            room -= len(label) + len(figure) + len(unit) + (2 if parts else 0)
            if room < 0:
                break
            parts.append(self._paint(label, "dim") + self._paint(figure, "bold") + self._paint(unit, "dim"))
        return "  ".join(parts)

    def _bar(self) -> str:
        """Empty where there is none to draw."""
        start, first, last = self._start, self._first_row, self._last_row
        console = self._open()
        if not (start and start.total_steps and first and last and console.file.isatty()) or console.is_dumb_terminal:
            return ""
        total = start.total_steps
        seconds_left = _seconds_left(first, last, total)
        share, steps = f"  {last.steps_done / total:.0%}", f"  {last.steps_done:,} of {total:,}"
        left = "" if seconds_left is None else f"  {console_text.duration(seconds_left)} left"
        # One column is left free: a line that fills the terminal would need two erasures.
        width = max(min(console.width - 1, _WIDEST) - len(share + steps + left), 0)
        done = round(width * min(last.steps_done / total, 1))
        sign = "-" if console.options.ascii_only else "━"
        return (
            self._paint(sign * done, "cyan")
            + self._paint(sign * (width - done), "dim bright_black")
            + self._paint(share, "bold")
            + self._paint(steps, "dim")
            + self._paint(left, "cyan")
        )


def _seconds_left(first: Row, last: Row, total_steps: int) -> float | None:
    """By the time since the first row, so that evaluation and checkpoints count too."""
    steps_left = max(total_steps - last.steps_done, 0)
    if last.step > first.step:
        return steps_left * (last.unix_time - first.unix_time) / (last.step - first.step)
    step_time = last.values.get("perf/step_time")
    return None if step_time is None else steps_left * step_time


def _notice(notice: Notice) -> Text:
    style = _NOTICE_STYLES[notice.level]
    where = "" if notice.step is None else f" at step {notice.step:,}"
    return Text.assemble((f"{notice.level}{where}: ", f"bold {style}"), (notice.message, style))


def _end(summary: Summary) -> Group:
    where = "before the first row" if summary.step is None else f"at step {summary.step:,}"
    ended = f"ended {where}" if summary.ended_by is None else f"was ended {where} by {_cause(summary.ended_by)}"
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold")
    for label, text in console_text.summary_lines(summary):
        table.add_row(label, Text(text, style="red" if label.endswith(("failed", "lost")) else ""))
    return Group(Text(f"\nThe run {ended}.", style="bold"), table)


def _cause(ended_by: str) -> str:
    return "Ctrl-C" if ended_by == "KeyboardInterrupt" else ended_by.rstrip(".")

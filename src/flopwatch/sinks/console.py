"""A line per logging window in the terminal, with a progress bar below where there is one to draw on."""

import re
import sys
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
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

    def _show(self, content: RenderableType) -> None:
        """One write for all of it: other threads print too."""
        console = self._open()
        bar = self._bar()
        with console.capture() as captured:
            console.print(content, soft_wrap=not console.is_terminal and isinstance(content, Text))
            if bar is not None:
                console.print(bar, end="")
        erase = _ERASE_LINE if self._bar_is_drawn else ""
        # Rich ends a bar with a line break; the next erasure must find the cursor on the bar's own line.
        lines = captured.get().rstrip("\n") + ("\n" if bar is None else "")
        console.file.write(erase + (lines if console.is_terminal else re.sub(r" +$", "", lines, flags=re.MULTILINE)))
        console.file.flush()
        self._bar_is_drawn = bar is not None

    def _open(self) -> Console:
        if self._console is None:
            self._stream = self._stream or sys.stdout
            self._console = Console(file=self._stream, highlight=False, force_jupyter=False)
        return self._console

    def _line(self, row: Row) -> Text:
        total = self._start.total_steps if self._start else None
        parts = console_text.row_parts(row, step_width=len(f"{total:,}") if total else 0)
        line = Text()
        for label, figure, unit in parts:
            part = Text.assemble((f"{label} " if label else "", "dim"), (figure, "bold"), (unit, "dim"))
            gap = "  " if line else ""
            if self._open().is_terminal and line.cell_len + len(gap) + part.cell_len > self._open().width:
                break
            line.append(gap).append_text(part)
        return line

    def _bar(self) -> Table | None:
        start, first, last = self._start, self._first_row, self._last_row
        console = self._open()
        if not (start and start.total_steps and first and last and console.file.isatty()) or console.is_dumb_terminal:
            return None
        total = start.total_steps
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        table.width = min(console.width - 1, _WIDEST)
        table.add_column(ratio=1)
        for _ in range(3):
            table.add_column(justify="right", no_wrap=True)
        seconds_left = _seconds_left(first, last, total)
        table.add_row(
            ProgressBar(total, min(last.step, total), complete_style="cyan", finished_style="cyan"),
            Text(f"{last.step / total:.0%}", style="bold"),
            Text(f"{last.step:,} of {total:,}", style="dim"),
            Text("" if seconds_left is None else f"{console_text.duration(seconds_left)} left", style="cyan"),
        )
        return table


def _seconds_left(first: Row, last: Row, total_steps: int) -> float | None:
    """By the time since the first row, so that evaluation and checkpoints count too."""
    steps_left = max(total_steps - last.step, 0)
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
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold")
    for label, text in console_text.summary_lines(summary):
        table.add_row(label, Text(text, style="red" if label.endswith(("failed", "lost")) else ""))
    return Group(Text(f"\nThe run ended {where}.", style="bold"), table)

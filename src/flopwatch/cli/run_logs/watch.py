"""`flopwatch watch`: shows a run live, from its log."""

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flopwatch.cli import RUNS_FOLDER, flag
from flopwatch.cli.run_logs import PEAK_TFLOPS, RunDir, chosen_run, peak_to_use, show
from flopwatch.errors import InputError
from flopwatch.numbers import number, percent
from flopwatch.present.document import Cell, Document, Grid, Most, english_numbers
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.runs.log_file import find_log, runs_below
from flopwatch.runs.reading import read_around
from flopwatch.runs.state import OVER, WatchedRun, WatchFeed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


_ALL_ROWS = Most(10_000, 10_000, 10_000)


def watch(
    run_dir: RunDir = None,
    once: Annotated[bool, flag("Print the view once and exit.", "--once")] = False,
    as_list: Annotated[bool, flag("List the runs of the folder RUN_DIR, the newest last.", "--list")] = False,
    refresh: Annotated[float, flag("Seconds between two reads of the log.")] = 1.0,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Watch a run until it ends: progress, loss, MFU, use of time and FLOPs; or the trials of a sweep.

    Ctrl-C does not stop the run or the sweep.
    """
    from rich.console import Console

    if not refresh > 0:
        raise InputError(f"--refresh must be a positive number of seconds, got {refresh:g}")
    if as_list:
        show(_list_of_runs(run_dir or RUNS_FOLDER))
        return
    if run_dir is not None and is_sweep_folder(Path(run_dir).expanduser()):
        from flopwatch.cli.trials.sweep_screens import watch_sweep

        watch_sweep(Path(run_dir).expanduser(), once=once)
        return
    console = Console(highlight=False)
    feed = WatchFeed(chosen_run(run_dir), time.time, peak_to_use(peak_tflops))
    if once or not console.is_terminal:
        feed.look(must_exist=True)
        console.print(_frame(feed, console))
    else:
        _refuse_typing_error(feed.place)
        _watch_live(feed, console, refresh)


def _refuse_typing_error(place: str) -> None:
    """Raise InputError for a path that does not exist, unless it is in a named folder that does: it may come."""
    path = Path(place).expanduser()
    if not path.exists() and (path.parent == Path() or not path.parent.is_dir()):
        raise InputError(
            f"there is no {str(path.absolute())!r}: name the folder of a run or its log file, and start the training "
            "before you watch it"
        )


def _list_of_runs(folder: str) -> Document:
    places = runs_below(folder)
    if not places:
        raise InputError(f"there are no runs in the subfolders of {folder!r}; name a folder of runs")
    rows = []
    for place in places:
        run, log = WatchedRun(), read_around(find_log(place))
        ended = () if log.summary is None else (log.summary,)
        for record in (*log.starts, *log.rows, *ended):
            run.add(record)
        mfu, loss = run.value("perf/mfu_percent"), None if run.loss is None else run.loss[1]
        rows.append(
            (
                Cell(os.path.relpath(place, os.path.expanduser(folder))),
                run.state(time.time()),
                "" if run.row is None else f"{run.row.step:,}",
                "" if loss is None else number(loss, digits=4),
                "" if mfu is None else percent(mfu / 100),
                "" if run.row is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.heard_unix_time)),
            )
        )
    return Document(
        "", [Grid(("run", "state", *english_numbers("step", "loss", "MFU", "last record")), rows, most=_ALL_ROWS)]
    )


def _watch_live(feed: WatchFeed, console: "Console", refresh_seconds: float) -> None:
    from rich.live import Live

    # SIGTERM raises KeyboardInterrupt like Ctrl-C, so that `Live` restores the normal screen of the terminal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with console.status(f"Reading the log in {feed.place}"):  # a log of gigabytes takes seconds
            feed.look()
        if _is_over(feed):
            console.print(_frame(feed, console))
            return
        with Live(_frame(feed, console), console=console, screen=True, auto_refresh=False) as live:
            while not _is_over(feed):
                time.sleep(refresh_seconds)
                feed.look()
                live.update(_frame(feed, console), refresh=True)
            # A signal from now on would interrupt `Live` while it restores the normal screen.
            _ignore_signals()
    except KeyboardInterrupt:
        _ignore_signals()
    # `Live` erased its screen, so the last frame is printed once more.
    console.print(_frame(feed, console))


def _ignore_signals() -> None:
    for late in (signal.SIGTERM, signal.SIGINT):
        signal.signal(late, signal.SIG_IGN)


def _is_over(feed: WatchFeed) -> bool:
    return feed.run.state(feed.unix_time()) in OVER


def _frame(feed: WatchFeed, console: "Console") -> "RenderableType":
    from rich.console import Group

    from flopwatch.cli.run_logs.watch_screen import draw_frame

    width, height = console.size
    return Group(*draw_frame(feed.run, feed.place, feed.unix_time(), width=width, height=height))

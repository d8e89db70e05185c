"""`flopwatch watch`: a live view of a run, from its log alone."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from flopwatch.runs.state import WatchFeed


def watch(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or its log file.")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    refresh: Annotated[float, typer.Option(help="Seconds between two looks at the log.")] = 1.0,
) -> None:
    """Watch a run until it ends: progress, loss, MFU, where time and FLOPs go. Ctrl-C does not affect the run."""
    from rich.console import Console

    from flopwatch.errors import InputError
    from flopwatch.runs.state import WatchFeed

    if not refresh > 0:
        raise InputError(f"--refresh is a positive number of seconds, got {refresh:g}")
    console = Console(highlight=False)
    feed = WatchFeed(run_dir, time.time)
    if once or not console.is_terminal:
        feed.look(must_exist=True)
        console.print(_frame(feed, console))
    else:
        _watch_live(feed, console, refresh)


def _watch_live(feed: "WatchFeed", console: "Console", refresh_seconds: float) -> None:
    import signal

    from rich.live import Live

    # SIGTERM raises KeyboardInterrupt too, so that the terminal returns from the alternate screen.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with console.status(f"Reading the log in {feed.place}"):  # takes seconds for gigabytes
            feed.look()
        if _is_over(feed):
            console.print(_frame(feed, console))
            return
        with Live(_frame(feed, console), console=console, screen=True, auto_refresh=False) as live:
            while not _is_over(feed):
                time.sleep(refresh_seconds)
                feed.look()
                live.update(_frame(feed, console), refresh=True)
            # A signal from here on would interrupt the return to the normal screen.
            _ignore_signals()
    except KeyboardInterrupt:
        _ignore_signals()
    # The last frame stays on the normal screen.
    console.print(_frame(feed, console))


def _ignore_signals() -> None:
    import signal

    for late in (signal.SIGTERM, signal.SIGINT):
        signal.signal(late, signal.SIG_IGN)


def _is_over(feed: "WatchFeed") -> bool:
    from flopwatch.cli.watch_screen import LAST_STATES

    return feed.run.state(feed.unix_time()) in LAST_STATES


def _frame(feed: "WatchFeed", console: "Console") -> "RenderableType":
    from rich.console import Group

    from flopwatch.cli.watch_screen import draw_frame

    width, height = console.size
    in_colour = console.color_system is not None and not console.no_color
    return Group(*draw_frame(feed.run, feed.place, feed.unix_time(), width=width, height=height, in_colour=in_colour))

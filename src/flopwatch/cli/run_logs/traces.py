"""`flopwatch trace`: takes a trace of a training that runs, and prints how its time was spent."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from flopwatch.cli import RUNS_FOLDER, argument, flag, print_json, say
from flopwatch.cli.run_logs import chosen_run, show
from flopwatch.errors import InputError
from flopwatch.numbers import duration, percent, step_time
from flopwatch.present.document import Document, Grid, Part, Section, Text, numbers
from flopwatch.records.time_uses import OF_TRACES
from flopwatch.runs.state import OVER, WatchFeed
from flopwatch.runs.traces import TraceSplit, read_trace
from flopwatch.runs.traces.files import newest_files, splits_of, traces_of, write_request
from flopwatch.runs.traces.slow_rank import SlowRank, can_compare, slow_rank
from flopwatch.text import plural

_POLL_SECONDS = 0.3
_OTHER_RANKS_SECONDS = 5.0
"""How long to wait for the traces of other ranks; ranks on machines without a shared folder never write one here."""
_LEAST_IDLE_SHARE = 0.1
_REFUSED = "trace_not_taken"


def trace(
    place: Annotated[
        str | None,
        argument(
            "A run (folder or log file), or a trace file; of a folder of runs, the newest. Default: flopwatch-runs.",
            "[RUN_DIR]",
        ),
    ] = None,
    steps: Annotated[int, flag("Steps to trace, at most 10.")] = 3,
    as_json: Annotated[bool, flag("Print JSON instead of a table.", "--json")] = False,
) -> None:
    """Trace the next steps of a training that runs, and print how their time was spent.

    If the training has ended, print its newest trace. Ctrl-C ends the waiting, and the training writes the trace
    all the same. Given a trace file, print that trace.
    """
    path = Path(place or RUNS_FOLDER).expanduser()
    if path.exists() and not path.is_dir() and path.suffix != ".jsonl":  # a trace, or neither file nor folder
        splits: Sequence[TraceSplit] = [read_trace(path)]
    else:
        feed = WatchFeed(chosen_run(place), time.time)
        feed.look(must_exist=True)
        splits = _of_run(feed, steps)
    if as_json:
        print_json({"traces": [split.to_json() for split in splits]})
    else:
        show(_document(splits))


def _of_run(feed: WatchFeed, steps: int) -> Sequence[TraceSplit]:
    place, folder = feed.place, traces_of(feed.place)
    if feed.run.state(feed.unix_time()) in OVER:
        files = newest_files(folder)
        if not files:
            raise InputError(
                f"the run in {place!r} has ended and left no trace; call monitor.capture_trace() in the training, "
                "or run `flopwatch trace` while it trains"
            )
        say("The run has ended; this is its newest trace.", err=True)
        return splits_of(files.values())
    before = {path: path.stat().st_mtime_ns for path in newest_files(folder).values()}
    write_request(folder, steps)
    if sys.stderr.isatty():
        say(f"Waiting until {place} has traced {steps} steps; Ctrl-C ends the waiting, not the training.", err=True)
    return splits_of(_wait_for_traces(feed, folder, before).values())


def _wait_for_traces(feed: WatchFeed, folder: Path, before: dict[Path, int]) -> dict[int, Path]:
    start = feed.run.start
    ranks = 1 if start is None else start.world_size
    logging_rank = 0 if start is None else int(start.config.get("logging_rank") or 0) % ranks
    refused = _refusals(feed)
    deadline: float | None = None
    while True:
        files = _new_files(folder, before)
        if logging_rank in files:
            deadline = deadline or time.monotonic() + _OTHER_RANKS_SECONDS
            if len(files) >= ranks or time.monotonic() >= deadline:
                return files
        else:
            _check(feed, folder, before, refused)
        time.sleep(_POLL_SECONDS)


def _new_files(folder: Path, before: dict[Path, int]) -> dict[int, Path]:
    return {rank: path for rank, path in newest_files(folder).items() if before.get(path) != path.stat().st_mtime_ns}


def _refusals(feed: WatchFeed) -> list[str]:
    return [notice.message for notice in feed.run.notices if notice.code == _REFUSED]


def _check(feed: WatchFeed, folder: Path, before: dict[Path, int], refused: list[str]) -> None:
    """Raise InputError if there will be no trace: the run has ended, is silent, or could not take it."""
    feed.look()
    newer = _refusals(feed)
    if len(newer) > len(refused):
        raise InputError(newer[-1])
    state = feed.run.state(feed.unix_time())
    if state in OVER and not _new_files(folder, before):
        raise InputError(
            f"the run in {feed.place!r} ended before it took the trace; ask earlier, or call monitor.capture_trace()"
        )
    if state == "silent":
        raise InputError(
            f"the run in {feed.place!r} has logged nothing for {duration(feed.run.silent_seconds(feed.unix_time()))}: "
            "it evaluates, hangs, or has ended on another machine. The request is written, and if the run goes on, "
            f"the trace will be in {folder}"
        )


def _document(splits: Sequence[TraceSplit]) -> Document:
    parts: list[Part] = [Section("", list(_parts(split))) for split in splits]
    if can_compare(splits):
        parts.append(Section("", [Text(_slow_rank_text(slow_rank(splits)), "strong")]))
    return Document("", parts)


def _parts(split: TraceSplit) -> Iterator[Part]:
    steps, average = plural(split.steps, "step"), step_time(split.seconds / split.steps)
    yield Text(split.file, "soft")
    yield Text(f"{steps} of {average} on average (rank {split.rank}, {split.device})", "strong")
    spent = [(use.name, getattr(split, field)) for field, use in OF_TRACES.items()]
    rows = [
        (name, step_time(seconds / split.steps), percent(seconds / split.seconds)) for name, seconds in spent if seconds
    ]
    yield Grid(("", *numbers("", "")), rows)
    if split.idle_seconds > _LEAST_IDLE_SHARE * split.seconds:
        yield Text("Idle time includes waiting for batches; `flopwatch why` tells the two apart.", "soft")
    if split.hidden_communication_seconds:
        hidden = step_time(split.hidden_communication_seconds / split.steps)
        yield Text(f"Another {hidden} per step of communication ran behind computation and cost no time.")


def _slow_rank_text(slow: SlowRank | None) -> str:
    if slow is None:
        return "No rank slows down the others in these steps by 5 % or more."
    excess, share = step_time(slow.excess_seconds), percent(slow.excess_share)
    how = "idle, waiting for its input or its host" if slow.is_idle else "computing"
    return (
        f"Rank {slow.rank} slows down the other ranks: it needs {excess} per step ({share}) longer than they do, most "
        f"of it {how}."
    )

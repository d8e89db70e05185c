"""One runner per folder, without locks: each runner takes the next number in `runners/`, and the highest holds it.

    runners/3.runner    who took number 3: host, process, command
    runners/3.beat      its sign of life

A number is taken by an exclusive file, so of two that see the same dead holder only one takes its place. Numbers are
never given back: somebody who looked long ago cannot take one that was another's.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.file_reading import read_json
from flopwatch.sweep.claims import (
    BEAT_SECONDS,
    SignOfLife,
    Watcher,
    has_ended,
    is_alive_here,
    make_exclusively,
    own_identity,
    visible_seconds,
)
from flopwatch.sweep_reading import RUNNERS

_LOOK_SECONDS = 0.5


@contextlib.contextmanager
def hold(sweep: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Be the one runner of this folder.

    Args:
        sweep: The sweep's folder.
        tell: Is told in a line why this takes time.

    Raises:
        InputError: Another lives, or may live.
    """
    folder = sweep / RUNNERS
    number = _take(folder, sweep, tell)
    ended = threading.Event()
    sign = SignOfLife(_sign(folder, number), {"number": number})
    sign.beat()
    beater = threading.Thread(target=_beat, args=(folder, number, sign, ended), name="flopwatch-holder", daemon=True)
    beater.start()
    try:
        yield
    finally:
        ended.set()
        beater.join(BEAT_SECONDS)
        sign.end()


def _take(folder: Path, sweep: Path, tell: Callable[[str], None]) -> int:
    number = _highest(folder)
    while True:
        if number:
            _refuse_if_alive(folder, number, sweep, tell)
        facts = {**own_identity(), "unix_time": time.time(), "command": sys.argv[:20]}
        if make_exclusively(_claim(folder, number + 1), facts):
            return number + 1
        number += 1  # somebody was quicker, or its file is not in sight yet


def _refuse_if_alive(folder: Path, number: int, sweep: Path, tell: Callable[[str], None]) -> None:
    """Returns when the holder of this number is gone. One of another host is watched for its sign of life."""
    watcher, began, is_told = Watcher(), time.monotonic(), False
    while True:
        holder: Any = read_json(_claim(folder, number))
        is_seen = isinstance(holder, dict)
        here = is_alive_here(holder) if is_seen else None
        if here is False or has_ended(_sign(folder, number)):
            return
        if here or watcher.has_beaten(_sign(folder, number)):
            raise InputError(
                f"another sweep is running in {sweep} ({_who(holder)}); "
                "wait for it, or choose another folder with --output"
            )
        if time.monotonic() - began > visible_seconds():
            return
        if not is_told:
            tell(f"{_who(holder)} held {sweep} last; watching for {visible_seconds():.0f} s whether it still lives")
            is_told = True
        time.sleep(_LOOK_SECONDS)


def _who(holder: Any) -> str:
    if not isinstance(holder, dict):
        return "a runner that has just begun"
    return f"pid {holder.get('pid')} on {holder.get('host')}"


def _beat(folder: Path, number: int, sign: SignOfLife, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        successor = _highest(folder)
        if successor > number and not ended.is_set():
            # As if killed: nothing may be written, placed or cancelled by two runners.
            who = _who(read_json(_claim(folder, successor)))
            os.write(2, f"flopwatch: {who} took over this sweep while this runner was silent; it ends here\n".encode())
            os._exit(1)
        sign.beat()


def _highest(folder: Path) -> int:
    with contextlib.suppress(OSError):
        names = [name.removesuffix(".runner") for name in os.listdir(folder) if name.endswith(".runner")]
        return max((int(name) for name in names if name.isdecimal()), default=0)
    return 0


def _claim(folder: Path, number: int) -> Path:
    return folder / f"{number}.runner"


def _sign(folder: Path, number: int) -> Path:
    return folder / f"{number}.beat"

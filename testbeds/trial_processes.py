"""Finds processes that outlived their trial."""

import os
from pathlib import Path


def left_behind(folder: Path | str) -> list[tuple[int, bytes]]:
    """Process id and command line of every process that carries the mark of a trial of this sweep."""
    mark = f"FLOPWATCH_TRIAL_DIR={Path(folder).resolve()}/".encode()
    found: list[tuple[int, bytes]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and any(part.startswith(mark) for part in environment.split(b"\0")):
            found.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return found

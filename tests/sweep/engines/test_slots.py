"""Slots of a machine that others use too."""

import errno
import os
import stat
from contextlib import closing

from flopwatch.sweep.engines.local import SlotPool


def test_every_user_of_the_machine_may_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    before = os.umask(0o077)
    try:
        with closing(SlotPool((), 1, tmp_path)) as pool:
            pool.take(0)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "slots").iterdir()}
    assert modes == {0o666}


def test_a_slot_folder_without_locks_is_named_as_what_the_sweep_waits_for(tmp_path, monkeypatch):
    """As on a network's file system; flock says the same there."""

    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refuse)
    with closing(SlotPool(("0",), 1, tmp_path)) as pool:
        assert pool.take(1.0) is None
        assert pool.waits_for == "gpu 0 (its lock file: No locks available)"

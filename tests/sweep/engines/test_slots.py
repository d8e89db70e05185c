"""Slots of a machine that others use too."""

import errno
import os
import stat
from contextlib import closing

import pytest

from flopwatch.errors import InputError
from flopwatch.sweep.engines.local import SlotPool, gpu_uuids, visible_gpus

UUIDS = {"0": "GPU-aaaa-1111", "1": "GPU-bbbb-2222"}


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Answers as the real one does; there is no GPU here."""
    lines = "".join(f"echo '{index}, {uuid}'\n" for index, uuid in UUIDS.items())
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    return tmp_path


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


def test_a_device_is_the_same_by_number_and_by_name(nvidia_smi):
    assert gpu_uuids(["0", "GPU-bbbb", "MIG-unknown"]) == {
        "0": UUIDS["0"], "GPU-bbbb": UUIDS["1"], "MIG-unknown": "MIG-unknown",
    }  # fmt: skip
    pools = SlotPool(("0",), 1, nvidia_smi / "a"), SlotPool((UUIDS["0"],), 1, nvidia_smi / "b")
    with closing(pools[0]) as by_number, closing(pools[1]) as by_name:
        assert by_number.take(1.0) is not None
        assert by_name.take(1.0) is None
        assert str(nvidia_smi / "a") in by_name.waits_for


def test_without_nvidia_smi_a_device_is_what_it_is_called(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_uuids(["0", "3"]) == {"0": "0", "3": "3"}


def test_amds_own_variable_is_read_and_set(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    assert visible_gpus() == ("2", "3")
    with closing(SlotPool(visible_gpus(), 1, tmp_path)) as pool:
        slot = pool.take(1.0)
    assert slot.environment["HIP_VISIBLE_DEVICES"] == "2"


def test_a_slot_folder_without_locks_is_told_instead_of_waited_for(tmp_path, monkeypatch):
    """As on a network's file system; flock says the same there."""

    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refuse)
    with closing(SlotPool(("0",), 1, tmp_path)) as pool, pytest.raises(InputError, match="FLOPWATCH_SLOT_DIR"):
        pool.take(1.0)

import shutil
import tempfile
from pathlib import Path

import pytest

from testbeds.real_slurm import need_slurm, real_slurm


@pytest.fixture(scope="session")
def slurm_environment():
    """One Slurm for all tests of this process. Not in pytest's folder: the database's user may not enter that."""
    need_slurm()
    folder = Path(tempfile.mkdtemp(prefix="flopwatch-slurm-"))
    try:
        with real_slurm(folder) as environment:
            yield environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(slurm_environment, monkeypatch):
    for name, value in slurm_environment.items():
        monkeypatch.setenv(name, value)

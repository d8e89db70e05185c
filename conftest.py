"""For the tests in tests/ and the short campaigns in benchmarks/."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Child processes find the modules that `pythonpath` in pyproject.toml gives to this one."""
    folders = [str(ROOT / folder) for folder in config.getini("pythonpath")]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*inherited, *folders])))

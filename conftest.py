"""What holds for every test, in tests/ and beside the benchmarks."""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Child processes find the modules that `pythonpath` in pyproject.toml gives to this one, and take Ctrl-C."""
    folders = [str(ROOT / folder) for folder in config.getini("pythonpath")]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*inherited, *folders])))
    # A shell that starts pytest in the background makes it ignore SIGINT, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, and every fixture it is the first to need, starts in a process in which nothing was compiled.

    The monitor calls a step compiled, and not exact, from the first compilation in its process on.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and (dynamo.utils.counters or dynamo.eval_frame.cached_backends):
        dynamo.reset()
        dynamo.utils.counters.clear()

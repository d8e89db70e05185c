"""What holds for every test, in tests/ and beside the benchmarks."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
LONGEST = (
    "tests/sweep/test_endings.py",
    "tests/flops/tracing/test_replay.py",
    "tests/flops/test_variants.py",
    "tests/flops/test_law.py",
    "tests/monitor/test_loops.py",
    "tests/integrations/test_hugging_face_harmless.py",
    "tests/integrations/test_hugging_face.py",
    "tests/integrations/test_hugging_face_resume.py",
    "tests/integrations/test_fabric.py",
    "tests/sweep/engines/test_slurm.py",
    "tests/sweep/engines/test_ray.py",
    "tests/integrations/test_lightning.py",
    "tests/sweep/test_page.py",
    "tests/test_docs.py",
    "tests/integrations/test_lightning_harmless.py",
    "tests/flops/test_every_architecture.py",
    "tests/flops/test_sharded.py",
    "tests/integrations/test_many_ranks.py",
    "tests/monitor/ranks/test_never_in_the_way.py",
    "benchmarks/overhead/test_monitor_overhead.py",
    "benchmarks/ranks/test_elastic_job.py",
    "benchmarks/ranks/test_straggler_ranks.py",
    "tests/monitor/test_layouts.py",
    "tests/sweep/test_preflight.py",
    "tests/sweep/test_fit.py",
    "tests/sweep/test_private_images.py",
    "tests/sweep/engines/test_slurm_many_nodes.py",
    "tests/sweep/engines/test_ray_nodes.py",
    "tests/cli/test_selftest.py",
)
"""The files that take longest by `pytest --durations=0`. They start first, so that the workers end together."""


def pytest_configure(config: pytest.Config) -> None:
    """Child processes find the modules that `pythonpath` in pyproject.toml gives to this one, and take Ctrl-C."""
    folders = [str(ROOT / folder) for folder in config.getini("pythonpath")]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*inherited, *folders])))
    # A shell that starts pytest in the background makes it ignore SIGINT, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_ALL_SLOW = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import files in which every test is slow, because the frameworks they import take long."""
    leaves_out_slow = "not slow" in (config.option.markexpr or "")
    if leaves_out_slow and collection_path.suffix == ".py" and _ALL_SLOW.search(collection_path.read_text("utf-8")):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, and every fixture it is the first to need, starts in a process in which nothing was compiled.

    The monitor calls a step compiled, and not exact, from the first compilation in its process on.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and (dynamo.utils.counters or dynamo.eval_frame.cached_backends):
        dynamo.reset()
        dynamo.utils.counters.clear()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then those with slow tests: the quick ones fill what is left of both workers' time."""
    rank = {str(ROOT / name): number for number, name in enumerate(LONGEST)}
    slow = {str(item.path) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: rank.get(str(item.path), len(rank) + (str(item.path) not in slow)))

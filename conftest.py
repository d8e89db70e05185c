"""What holds for every test, in tests/ and beside the benchmarks."""

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
LONGEST = (
    "tests/flops/test_law.py",
    "tests/monitor/test_loops.py",
    "tests/automatic/test_never_touched.py",
    "tests/monitor/test_late_changes.py",
    "tests/sweep/test_endings.py",
    "tests/monitor/test_exact.py",
    "tests/flops/test_sharded.py",
    "tests/integrations/test_trl.py",
    "tests/integrations/test_hugging_face_harmless.py",
    "tests/monitor/test_sharded.py",
    "tests/sweep/test_page.py",
    "benchmarks/ranks/test_elastic_job.py",
    "tests/monitor/test_harmless.py",
    "tests/portable/test_without_unix.py",
    "tests/flops/test_variants.py",
    "tests/test_docs.py",
    "tests/sweep/engines/test_ray.py",
    "tests/integrations/test_hugging_face.py",
    "benchmarks/overhead/test_monitor_overhead.py",
    "tests/sinks/test_failures.py",
    "benchmarks/ranks/test_teardowns.py",
    "tests/monitor/ranks/test_never_in_the_way.py",
    "tests/integrations/test_same_numbers.py",
    "benchmarks/reliability/test_ray_outages.py",
    "tests/sweep/engines/test_ray_nodes.py",
    "tests/integrations/test_lightning.py",
    "tests/flops/test_padding.py",
    "tests/flops/test_every_architecture.py",
    "tests/integrations/test_input_wait.py",
    "tests/sweep/engines/test_slurm.py",
    "benchmarks/reliability/test_endurance.py",
    "tests/cli/test_endings_shown.py",
    "tests/cli/trials/test_sweep.py",
    "tests/sinks/test_wandb.py",
    "tests/sweep/test_private_images.py",
    "tests/cli/test_doctor_gpu.py",
    "tests/cli/test_doctor.py",
    "tests/sinks/test_mlflow.py",
)
"""The files that take longest by `pytest --durations=0`. They start first, so that the workers end together."""
CAMPAIGN = ROOT / "tests" / "campaign.txt"
"""Tests that `make test-all` leaves to `make campaign`, by their ids, because others show the same in less time."""


def pytest_configure(config: pytest.Config) -> None:
    """Child processes find the modules that `pythonpath` in pyproject.toml gives to this one, and take Ctrl-C."""
    folders = [str(ROOT / folder) for folder in config.getini("pythonpath")]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["FLOPWATCH_LANG"] = "en"  # whatever the developer's locale is
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*inherited, *folders])))
    with suppress(ImportError):  # the portable suite runs without it
        from hypothesis import settings

        settings.register_profile("flopwatch", deadline=None)  # a time that depends on what else the machine does
        settings.load_profile("flopwatch")
    # A shell that starts pytest in the background makes it ignore SIGINT, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_LISTED = {line for line in CAMPAIGN.read_text("utf-8").splitlines() if line and not line.startswith("#")}
_ONE_OF = {line.partition(" 1/")[0]: int(line.partition(" 1/")[2]) for line in _LISTED if " 1/" in line}
_seen_cases: Counter[str] = Counter()
_ALL_SLOW = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import files in which every test is slow, because the frameworks they import take long.

    `-m portable` imports only files with portable tests: the others need packages of the dev group.
    """
    chosen = config.option.markexpr or ""
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text("utf-8")
    if ("not slow" in chosen and _ALL_SLOW.search(text)) or (_only_portable(config) and "mark.portable" not in text):
        return True
    return None


def _only_portable(config: pytest.Config) -> bool:
    return "portable" in (config.option.markexpr or "") and "not portable" not in config.option.markexpr


@pytest.fixture(scope="session", autouse=True)
def _what_this_torch_lacks(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> Iterator[None]:
    """`make matrix` shows in its table which private names of torch failed their check in the portable suite."""
    yield
    if _only_portable(request.config):
        record_testsuite_property("missing", "\t".join(what_this_torch_lacks()))


def what_this_torch_lacks() -> list[str]:
    from flopwatch.torch_internals import untested_release, why_not_countable

    return list(filter(None, (why_not_countable(), untested_release())))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, and every fixture it is the first to need, starts in a process in which nothing was compiled.

    The monitor calls a step compiled, and not exact, from the first compilation in its process on.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and (dynamo.utils.counters or dynamo.eval_frame.cached_backends):
        dynamo.reset()
        dynamo.utils.counters.clear()
    live = sys.modules.get("flopwatch.flops.tracing.live")
    if live is not None:
        live._has_compiled.clear()
        live.regions.state.missed = None
        # A monitor leaves its hook when code was compiled beside it, and torch warns of it in the next compiling test.
        sys.modules["torch"].nn.modules.module._global_forward_pre_hooks.clear()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the list.

    A line names a file, a function, or one case of it. With `1/4`, every fourth of its other cases stays.
    """
    file, function = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
    is_left_out = not _LISTED.isdisjoint((file, function, item.nodeid))
    if function in _ONE_OF and not is_left_out and not item.get_closest_marker("campaign"):
        is_left_out = _seen_cases[function] % _ONE_OF[function] > 0
        _seen_cases[function] += 1
    if is_left_out:
        item.add_marker(pytest.mark.campaign)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, then those with slow tests: the quick ones fill what is left of both workers' time.

    With other versions of torch and the frameworks, warnings are not errors: every release brings its own.
    """
    if _only_portable(config):
        for item in items:
            item.add_marker(pytest.mark.filterwarnings("default"))
    if "FLOPWATCH_LONG" not in os.environ:
        for item in items:
            if item.get_closest_marker("campaign"):
                item.add_marker(pytest.mark.skip(reason="in `make campaign`; set FLOPWATCH_LONG=1 to run it"))
    rank = {str(ROOT / name): number for number, name in enumerate(LONGEST)}
    slow = {str(item.path) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: rank.get(str(item.path), len(rank) + (str(item.path) not in slow)))

"""Pairs of real trainings with one change each: `flopwatch compare` names the change first, in both directions."""

import json
from functools import cache
from pathlib import Path

import pytest

from flopwatch.runs import find_log, read_log
from flopwatch.runs.comparison import compare
from support.warm_python import start_warm
from testbeds.changed_training import CHANGES, WIDTH

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "testbeds" / "changed_training.py"
AS_A_COMMAND = "from flopwatch.cli import main; main()"
BY_PROCESSOR_TIME = """
import functools, time
from flopwatch import TrainingMonitor
TrainingMonitor.__init__ = functools.partialmethod(TrainingMonitor.__init__, clock=time.process_time)
"""
"""For changes of the amount of work: what else the machine does makes no step longer by this clock."""
WIDE = 192
WRITTEN_IN = ("logging", "between steps", "checkpoint", "pause")
"""Changes that only a monitor in the script can tell apart."""


def trained(folder, change, width, *, is_written_in):
    if is_written_in:
        process = start_warm(SCRIPT, change, str(width), str(folder))
    else:
        command = ["run", "--quiet", "--output-dir", str(folder), str(SCRIPT), change, str(width)]
        process = start_warm((BY_PROCESSOR_TIME if width == WIDE else "") + AS_A_COMMAND, *command)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out.split("RESULT ")[1]), read_log(find_log(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The training without a change, once for all pairs with the same width."""

    @cache
    def plain(width, is_written_in):
        return trained(tmp_path_factory.mktemp("plain") / "run", "", width, is_written_in=is_written_in)

    return plain


SIZES = {
    "recomputation": ("layer_calls", 3.0),
    "more padding per batch": ("tokens", 4.0),
    "smaller batch": ("tokens", 1 / 8),
}
"""What else than time a change changes by the script's own count, and by which factor at least."""


def has_changed(change, before, after):
    if change not in SIZES:
        return after["injected_ms_per_step"] >= 300 and before["injected_ms_per_step"] == 0
    name, factor = SIZES[change]
    return after[name] >= factor * before[name] if factor > 1 else after[name] <= factor * before[name]


@pytest.mark.parametrize("change", CHANGES)
def test_the_change_is_named_first(change, plain, tmp_path):
    is_written_in = change in WRITTEN_IN
    width = WIDE if change in SIZES else WIDTH  # where time is injected, all else should be short on a busy machine
    before, a = plain(width, is_written_in)
    after, b = trained(tmp_path / "run", change, width, is_written_in=is_written_in)
    assert has_changed(change, before, after), (before, after)
    found = compare(a, b).per_step
    told = f"{found.sentence} {before} {after}"
    assert found.parts[0].key == CHANGES[change], told
    assert compare(b, a).per_step.parts[0].key == CHANGES[change], told
    if change not in SIZES:
        part = next(part for part in found.parts if part.key == CHANGES[change])
        assert part.b_ms >= 0.8 * after["injected_ms_per_step"], told

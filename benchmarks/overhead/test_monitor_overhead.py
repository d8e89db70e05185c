"""The cost table can be made again by its command, and its figures are numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUMBER = r"\d+\.\d+"


@pytest.mark.slow
def test_a_quick_run_prints_the_ratio_with_its_interval_and_a_small_own_time() -> None:
    command = [sys.executable, str(Path(__file__).with_name("monitor_overhead.py")), "--quick", "--parts", "free"]
    environment = {**os.environ, "COLUMNS": "150"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ratio = _only(rf"ratio of medians +({NUMBER}) \(({NUMBER}) to ({NUMBER})\)", done.stdout)
    value, low, high = map(float, ratio)
    assert 0 < low <= value <= high
    (share,) = _only(rf"the same in CPU time.*= ({NUMBER}) % of the step", done.stdout)
    assert float(share) <= 4  # of a step of about 50 ms
    calls = re.findall(rf"`(?:attention_mask|batch)=`.* {NUMBER} µs +{NUMBER} µs +{NUMBER} µs", done.stdout)
    assert len(calls) == 4


def _only(pattern: str, text: str) -> tuple[str, ...]:
    found = re.findall(pattern, text)
    assert len(found) == 1, text
    return found[0] if isinstance(found[0], tuple) else (found[0],)

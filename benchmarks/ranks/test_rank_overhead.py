"""The cost of watching two ranks can be measured again by its command, and its figures are numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, str(Path(__file__).with_name("rank_overhead.py")), "--quick"]
RATIO = r"(\d+\.\d+) \((\d+\.\d+) to (\d+\.\d+)\)"


@pytest.mark.slow
@pytest.mark.campaign
def test_a_quick_run_prints_the_ratio_and_the_cpu_time_of_each_rank():
    done = subprocess.run([*COMMAND, "--repeats", "4"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        rf"^\| ([01]) \| .* ms \| 80 \| 1 \| {RATIO} \| {RATIO} \| .* \| (\d+\.\d+) % \|$", done.stdout, re.M
    )
    assert [row[0] for row in rows] == ["0", "1"], done.stdout
    for _, ratio, low, high, *_, share in rows:
        assert 0 < float(low) <= float(ratio) <= float(high)
        assert 0 < float(share) < 100

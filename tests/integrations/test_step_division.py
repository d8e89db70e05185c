"""The frameworks' optimizers are timed without code of the user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "testbeds" / "unchanged" / "frameworks"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["hf_trainer", "lightning_module", "accelerate_loop"])
def test_under_flopwatch_run_the_optimizer_of_a_framework_is_a_part_of_its_steps(script, tmp_path):
    # Lightning runs both passes inside of the optimizer's step, and Accelerate passes `closure=None`.
    command = [sys.executable, "-m", "flopwatch", "run", "--quiet", "--output-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(SCRIPTS / f"{script}.py"), str(tmp_path / "own")],
        check=True,
        capture_output=True,
        env=environment,
        timeout=300,
    )
    lines = (tmp_path / "run" / "training_log.jsonl").read_text().splitlines()
    values = json.loads(lines[-1])["values"]

    # Both passes take most of a step, so a time that contained them would be larger than half.
    assert 0 < values["time/optimizer_seconds"] < values["time/divided_seconds"] / 2

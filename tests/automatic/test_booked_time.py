"""`flopwatch run` books slow input as input wait, or says that it was not measured and how long it can be."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from flopwatch.runs.advice import verdict_of
from flopwatch.runs.reading import read_log
from flopwatch.runs.waterfall import seconds_of, waterfall_of
from testbeds.unchanged.scripts import FOLDER
from testbeds.unchanged.slow_input.train import PLACES

CANNOT_BE_DIVIDED = ("compiled",)
"""Where compiled code runs in several parts, or torch is too old, nothing tells a pass from what is between two."""


@pytest.fixture(scope="module", params=[place.__name__ for place in PLACES])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "flopwatch", "run", "--quiet", "--output-dir", "run"]
    done = subprocess.run(
        [*command, str(FOLDER / "slow_input" / "train.py"), request.param],
        cwd=folder,
        env={**os.environ, "FLOPWATCH_PEAK_TFLOPS": "0.05"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    slept = next(json.loads(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("SLEPT"))
    log = read_log(folder / "run" / "training_log.jsonl")
    return request.param, slept, waterfall_of(log), log


@pytest.mark.slow
def test_the_verdict_names_slow_input_or_says_that_it_was_not_measured(trained):
    place, _, waterfall, log = trained
    # As if it had trained for a minute: start-up and counting are left out, and the other losses take their points.
    left = [loss for loss in waterfall.losses if loss.key not in ("start_up", "count")]
    scale = (100 - waterfall.mfu_percent) / sum(loss.points for loss in left)
    in_steps = replace(waterfall, losses=tuple(replace(loss, points=loss.points * scale) for loss in left))
    verdict = verdict_of(log, in_steps, least_seconds=0.0)
    is_told = re.search("such as fetching its batch|input wait .* was not measured", verdict.sentence)
    assert verdict.key == "input_wait" or is_told, verdict
    assert verdict.key in ("input_wait", "between", *(["below_peak"] if place in CANNOT_BE_DIVIDED else []))


@pytest.mark.slow
def test_nearly_all_of_the_time_slept_is_booked_as_input_or_between_passes(trained):
    place, slept, waterfall, log = trained
    keys = (
        "input_wait",
        "between",
        "outside",  # where a busy machine makes a wait several times as long as the others
        *(("below_peak",) if not seconds_of(log).get("passes_timed") and place in CANNOT_BE_DIVIDED else ()),
    )
    booked = sum(loss.seconds for loss in waterfall.losses if loss.key in keys)
    # The first batch is fetched before the first step, and counted steps are not divided.
    assert booked > 0.8 * slept * 23 / 24, waterfall.losses

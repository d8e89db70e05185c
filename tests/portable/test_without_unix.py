"""macOS and Windows by construction: without what only Unix or Linux has, flopwatch imports, counts and monitors.

It was never run on those systems. torch and the frameworks are those of this machine.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.portable]

SCRIPT = Path(__file__).parent / "scripts" / "without_unix.py"


@pytest.fixture(scope="module", params=["darwin", "win32"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found in which all that this system lacks was taken away."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, str(SCRIPT), request.param, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    return {**result, "platform": request.param, "folder": folder}


def test_every_module_can_be_imported(seen: dict[str, Any]) -> None:
    assert seen["not_imported"] == {}
    assert seen["imported"] > 150


def test_a_training_is_counted_monitored_and_logged(seen: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in (seen["folder"] / "run" / "training_log.jsonl").read_text().splitlines()]

    assert seen["count"] == {"model_flops": 4 * 2 * 2 * 16 * 16, "method": "trace"}
    assert seen["failed_parts"] == {}
    assert seen["model_flops"] == 27 * 2 * 2 * 16 * 16
    assert seen["statuses"] == [0, 0, 0]
    assert len([row for row in rows if row["type"] == "row"]) == 3


def test_a_sweep_runs_or_says_in_one_sentence_what_it_needs(seen: dict[str, Any]) -> None:
    if seen["platform"] == "win32":
        assert seen["sweep"].startswith("sweep, trial and fit need Linux")
    else:
        assert seen["sweep"] == "ok"

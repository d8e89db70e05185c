"""Two real ranks: their sums in one log, and the same weights as without the monitor."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.portable]

SCRIPT = Path(__file__).parent / "scripts" / "two_ranks.py"
STEPS, WIDTH = 12, 16
SAMPLES = STEPS * (2 + 3)
"""Rank 0 has 2 samples in every step, rank 1 has 3."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
               "--rdzv-endpoint=127.0.0.1:0", str(SCRIPT), str(folder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_the_log_has_the_sums_of_both_ranks(ranks: list[dict[str, Any]]) -> None:
    values, other = ranks[0]["values"], ranks[1]["values"]

    assert other is None
    assert values["ranks/reporting"] == 2
    assert values["total/samples"] == SAMPLES
    assert values["total/model_flops"] == SAMPLES * 2 * (2 * WIDTH * WIDTH)  # forward, and the weights' gradient


def test_both_ranks_train_the_same_weights_as_without_the_monitor(ranks: list[dict[str, Any]]) -> None:
    hashes = {rank[kind] for rank in ranks for kind in ("bare", "watched")}

    assert len(hashes) == 1

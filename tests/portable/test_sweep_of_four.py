"""A sweep of four trials on this machine: every trial trains in a process of its own and is counted."""

from pathlib import Path
from typing import Any

import pytest

import flopwatch
from flopwatch.models.load import dummy_batch, load_model

pytestmark = [pytest.mark.slow, pytest.mark.portable]

MATRIX: dict[str, Any] = {
    "trainer": ["standard"],
    "model": ["tiny"],
    "batch_size": [1, 2],
    "seq_len": [8, 16],
    "steps": 3,
    "warmup_steps": 1,
    "trace": False,
    "device": "cpu",
}


def test_four_trials_measure_and_count_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    model = load_model("tiny")

    results = flopwatch.sweep.run(MATRIX, tmp_path / "sweep")

    shapes = [(batch_size, seq_len) for batch_size in (1, 2) for seq_len in (8, 16)]
    expected = {
        f"StandardTrainer_bs{size}_seq{length}": flopwatch.count_flops(model, dummy_batch(model, size, length))
        for size, length in shapes
    }
    assert {name: (result.outcome, result.reason) for name, result in results.items()} == dict.fromkeys(
        expected, ("ok", "ran to its end")
    )
    assert [dict(result.measured.not_measured) for result in results.values()] == [{}] * 4
    for name, count in expected.items():
        cost = results[name].measured.cost
        assert cost is not None
        assert cost.model_flops == count.model_flops

"""A few of the random corruptions of `benchmarks/reliability/folder_corruptions.py`, which runs hundreds."""

import pytest

from reliability.folder_corruptions import run_campaign

pytestmark = pytest.mark.slow


def test_corrupted_folders_are_reported_and_resumed_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "2")  # how long a runner with damaged files is watched for life
    monkeypatch.setenv("COLUMNS", "100")
    figures = run_campaign(tmp_path, count=5, seed=2, with_torch=False, batch_sizes=[1])
    assert figures.problems == []
    assert figures.whole > figures.damaged > 0

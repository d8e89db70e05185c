"""What the supervisor reads of a trial's processes: the files of torchrun and of the ranks, perhaps damaged."""

import json

import pytest

from flopwatch.sweep.supervisor.ranks import job_end

LOST_PEER = {"type": "RuntimeError", "message": "", "lost_peer": True, "unix_time": 1.0}


def test_the_cause_is_the_killed_process_and_not_the_one_that_lost_its_peer(tmp_path):
    (tmp_path / "ranks.json").write_text(json.dumps({"statuses": {"0": 1, "1": -9}, "error": ""}))
    (tmp_path / "exception-0.json").write_text(json.dumps(LOST_PEER))
    end = job_end(tmp_path, 2)
    assert (end.first.rank, end.first.status, end.is_mute) == (1, -9, False)


def test_all_went_well_if_torchrun_says_so(tmp_path):
    (tmp_path / "ranks.json").write_text('{"statuses": {}, "error": ""}')
    assert job_end(tmp_path, 2).first is None


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"statuses": {"0": "many"}}', '{"statuses": [1]}', '{"error": 3}']
)
def test_a_damaged_report_counts_as_none(tmp_path, content):
    if content is not None:
        (tmp_path / "ranks.json").write_text(content)
    (tmp_path / "exception-0.json").write_text('{"unix_time": "yesterday"}')
    end = job_end(tmp_path, 2)
    assert (end.is_mute, end.error, end.first.rank) == (True, "", 0)

"""Goodput in `flopwatch watch` and `flopwatch explain`: one line, with what cost most."""

import json
from dataclasses import replace

import pytest

from flopwatch.cli.run_logs.watch_screen import draw_frame
from flopwatch.records.metrics import APART
from flopwatch.runs.state import WatchedRun
from support.make_run_log import Accounts, Story, session, write_log

SPENT = {"wall": 10_000.0, "train": 8_100.0, "compile": 100.0, "eval": 400.0, "restart": 900.0, "start_up": 500.0}
SPENT["input_wait"] = 0.0


def records_with_goodput():
    *before, newest = session(Story(), 1, 700, Accounts())
    return [*before, replace(newest, ledger={"steps": 700, "totals": {}, "seconds": SPENT})]


def frame(records, width, height):
    run = WatchedRun()
    for record in records:
        run.add(record)
    return [line.plain for line in draw_frame(run, "runs/a", run.heard_unix_time, width=width, height=height)]


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (220, 70)], ids=str)
def test_watch_shows_goodput_and_the_three_largest_losses(size):
    width, height = size
    lines = frame(records_with_goodput(), width, height)
    (shown,) = (line for line in lines if "goodput" in line)
    assert shown.split() == ["goodput", "80.0", "%"]
    legend = " ".join(" ".join(lines).split())
    assert "█ training steps 80.0 % ▒ restarts 9.0 % ▓ start-up 5.0 % ░ evaluation 4.0 %" in legend
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_watch_shows_no_goodput_of_a_log_that_does_not_tell():
    assert not any("goodput" in line for line in frame(session(Story(), 1, 700, Accounts()), 80, 24))


def test_explain_tells_goodput_as_text_and_as_json(flopwatch, tmp_path):
    write_log(tmp_path / "training_log.jsonl", records_with_goodput())
    _, out, _ = flopwatch("explain", str(tmp_path))
    assert "80.00 % of 10,000.0 s since the first process started" in out
    assert "Largest losses: restarts 900.0 s, start-up 500.0 s, evaluation 400.0 s." in " ".join(out.split())
    _, text, _ = flopwatch("explain", str(tmp_path), "--json")
    assert json.loads(text)["goodput"]["lost_seconds"]["other"] == 100.0


def test_explain_names_each_use_of_time_outside_of_steps(flopwatch, tmp_path):
    *before, newest = records_with_goodput()
    spent = {**SPENT, **dict.fromkeys(APART, 7.0)}
    ledger = {"steps": 700, "totals": {}, "seconds": spent}
    write_log(tmp_path / "training_log.jsonl", [*before, replace(newest, ledger=ledger)])
    status, out, err = flopwatch("explain", str(tmp_path))
    assert (status, err) == (0, "")
    assert "work between steps 7.0 s" in " ".join(out.split())


def test_an_input_wait_that_is_unknown_is_told_beside_the_goodput(flopwatch, tmp_path):
    *before, newest = records_with_goodput()
    unknown = [*before, replace(newest, ledger={"steps": 700, "totals": {}, "seconds": {**SPENT, "wait_unknown": 8e3}})]
    write_log(tmp_path / "training_log.jsonl", unknown)
    sentence = "The input wait is unknown and counts as productive."
    assert sentence in " ".join(flopwatch("explain", str(tmp_path))[1].split())
    assert sentence in " ".join(flopwatch("report", str(tmp_path))[1].split())
    assert any("goodput 80.0 % with input wait, which is unknown" in line for line in frame(unknown, 120, 40))
    known = [*before, replace(newest, ledger={"steps": 700, "totals": {}, "seconds": {**SPENT, "input_wait": 0.0}})]
    write_log(tmp_path / "training_log.jsonl", known)
    assert sentence not in " ".join(flopwatch("explain", str(tmp_path))[1].split())
    assert not any("unknown" in line for line in frame(known, 120, 40) if "goodput" in line)


def test_explain_is_silent_about_goodput_where_the_log_is(flopwatch, tmp_path):
    write_log(tmp_path / "training_log.jsonl", session(Story(), 1, 700, Accounts()))
    _, out, _ = flopwatch("explain", str(tmp_path))
    assert "goodput" not in out

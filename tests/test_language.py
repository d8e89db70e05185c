"""What flopwatch finds is shown in the reader's language, and what a user has named is never translated."""

import contextlib
import io
import json
import re
import sys

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.cli import main
from flopwatch.decode import read_record
from flopwatch.language import Said, _, choose, commas, counted, language
from flopwatch.records.run import Notice, Row, Summary
from flopwatch.sinks.console import ConsoleSink
from support.ledgers import write_ledger
from testbeds.english_left import english_left, texts_of
from testbeds.made_up_sweep import example_specs, make_result, write_sweep

SECONDS = {
    "wall": 1630.0, "start_up": 10.0, "eval": 15.0, "train": 1570.0, "input_wait": 608.0, "divided": 960.0,
    "optimizer": 40.0, "host": 2.0, "model_at_peak": 500.0, "hardware_at_peak": 500.0,
}  # fmt: skip


@pytest.fixture
def chinese(monkeypatch):
    monkeypatch.setenv("FLOPWATCH_LANG", "zh")


def _output(capsys, *arguments) -> str:
    capsys.readouterr()
    with contextlib.suppress(SystemExit):  # `why` of a run without times is an error, which is English
        main([str(each) for each in arguments])
    return capsys.readouterr().out


def test_only_what_is_said_is_translated_and_values_only_if_they_are_said(chinese):
    assert _(Said("{code}: {notice}", code="steps", notice=Said("steps"))) == "steps：步数"
    assert _(Said("{code}: {notice}", code=Said("steps"), notice="steps")) == "步数：steps"
    assert _("steps") == "steps"
    assert _(commas([Said("optimizer"), "optimizer"])) == "优化器，optimizer"
    assert _(counted(3000, "{n} step", "{n} steps")) == "3,000 步"


def test_english_is_what_was_said(monkeypatch):
    monkeypatch.setenv("FLOPWATCH_LANG", "en")
    said = Said("the model was called {times:,} times", times=1200)
    assert _(said) == said == "the model was called 1,200 times"


def test_a_log_keeps_the_english_text_and_what_it_was_made_from(chinese):
    reason = Said("no step could be counted: {why}", why="steps")
    row = Row(9, 0.0, {}, exact=False, notes=(reason, "optimizer"))
    notice = Notice(3, "info", "not_exact", Said("the FLOPs of these steps are not exact: {reasons}", reasons=reason))
    for record in (row, notice, Summary(9, 0.0, notes=(reason,), failed_parts={"csv": reason}, ended_by="steps")):
        written = json.loads(json.dumps(record.to_json()))
        read = read_record(type(record), written)
        assert read == record
        assert [_(text) for text in getattr(read, "notes", ())][:1] in ([], ["一步也没能统计：steps"])
    assert written["notes"] == ["no step could be counted: steps"]
    assert _(read_record(Notice, json.loads(json.dumps(notice.to_json()))).message).endswith("：一步也没能统计：steps")
    assert _(read_record(Row, json.loads(json.dumps(row.to_json()))).notes[1]) == "optimizer"


@pytest.mark.parametrize(
    "said",
    [None, 3, [], {"a text": 3}, {"a text": ["{0.__class__}", {}]}, {"a text": ["x", {"y": [[[]]]}]}, {"a text": []}],
)
def test_broken_parts_in_a_log_leave_the_english_text(chinese, said):
    content = {**Notice(3, "info", "code", "a text").to_json(), "said": said}
    assert _(read_record(Notice, content).message) == "a text"


def test_a_sentence_of_another_version_stays_english(chinese):
    parts = {"said": {"of 3 kinds": ["of {n} kinds", {"n": "3"}]}}
    assert (
        _(read_record(Notice, {**Notice(3, "info", "code", "of 3 kinds").to_json(), **parts}).message) == "of 3 kinds"
    )


def test_the_language_is_the_one_asked_for(monkeypatch):
    for name in ("FLOPWATCH_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    assert language() == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert language() == "zh"
    choose("en")
    try:
        assert language() == "en"
        monkeypatch.setenv("FLOPWATCH_LANG", "zh")
        assert language() == "zh"
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert language() == "en"
    finally:
        choose("auto")


# --- Names of users ---------------------------------------------------------------------------------------------------

OURS = ("optimizer", "evaluation", "steps", "loss", "开始", "trial")
"""Words that flopwatch uses itself."""


def test_a_trainer_named_like_one_of_our_words_keeps_its_name(chinese, tmp_path, capsys):
    specs = [spec for spec in example_specs() if spec.trainer == "standard"][: 2 * len(OURS)]
    named = [spec.__class__(**{**_fields(spec), "label": OURS[place % len(OURS)]}) for place, spec in enumerate(specs)]
    write_sweep(tmp_path / "s", [make_result(spec) for spec in named], named)
    shown = [_output(capsys, "report", str(tmp_path / "s"), *form) for form in ((), ("--html", "-"), ("--md", "-"))]

    for name in OURS:
        assert all(name in text for text in shown), name
    assert "峰值内存" in shown[0]
    assert not re.search(r"优化器|评估|步数", shown[0])


def _fields(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_metrics_and_folders_named_like_our_words_keep_their_names(chinese, tmp_path, capsys):
    folder = tmp_path / "optimizer"
    monitor = TrainingMonitor(folder, quiet=True, log_every=2)
    for step in range(1, 9):
        monitor.log_step(step, batch=torch.zeros(2, 4), loss=0.5, **dict.fromkeys(OURS[:3], 1.0), 开始=1.0, trial=1.0)
    monitor.close()
    for form in ((), ("--html", "-"), ("--md", "-")):
        shown = _output(capsys, "report", str(folder), *form)
        assert "optimizer" in shown
        if form:
            assert all(name in shown for name in OURS)
            assert "开始" in shown


# --- Texts of a run ---


def test_a_run_that_was_just_logged_is_read_in_chinese(chinese, tmp_path, capsys, monkeypatch):
    """Notices and reasons too, of which logs from before have the English text only."""
    monkeypatch.setenv("COLUMNS", "5000")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    monitor = TrainingMonitor(tmp_path / "run", model=model, quiet=True, log_every=2, peak_flops_per_s=1e6)
    for step in range(1, 9):
        model(torch.randn(2 + step % 3, 8)).sum().backward()
        monitor.log_step(step, loss=float("nan") if step == 3 else 1.0)
    monitor.close()
    log = (tmp_path / "run" / "training_log.jsonl").read_text("utf-8")
    assert '"said"' in log
    assert log.isascii()
    known = {str(tmp_path), "run", "2 cores"} | {
        value for line in log.splitlines() if '"type":"notice"' not in line for value in texts_of(json.loads(line))
    } - {text for line in log.splitlines() for text in json.loads(line).get("said", ())}
    for form in (("why",), ("report",), ("report", "--html", "-"), ("report", "--md", "-"), ("explain",)):
        assert english_left(_output(capsys, form[0], tmp_path / "run", *form[1:]), known) == [], form


def test_the_console_speaks_chinese(chinese, tmp_path):
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.write(
        Notice(7, "warning", "not_exact", Said("the FLOPs of these steps are not exact: {reasons}", reasons="x"))
    )
    sink.write(Summary(7, 1.0, {"total/steps": 7, "training/loss": 2.5}, notes=(Said("not timed"),)))
    assert stream.getvalue().startswith("警告，第 7 步：")
    assert "训练第 7 步结束" in stream.getvalue() or "训练在第 7 步结束" in stream.getvalue()
    assert english_left(stream.getvalue(), {"write_ledger"}) == []


def test_why_is_chinese_for_losses_that_no_recorded_run_has(chinese, tmp_path, capsys):
    for extra in ({"checkpoint": 90.0, "pause": 80.0, "restart": 70.0}, {"compile": 300.0, "stall": 200.0}):
        folder = tmp_path / "_".join(extra)
        write_ledger(folder, {**SECONDS, **extra})
        assert english_left(_output(capsys, "why", folder), {str(folder), "x 2.5 GHz"}) == []

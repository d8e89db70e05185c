"""What a new user does in the first hour, and what the monitor answers."""

import html
import re
from dataclasses import dataclass

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import read_shape
from flopwatch.testing import RecordingSink
from support.small_models import TinyText, text_batch
from support.small_models import train as train_step


def notices_of(sink):
    return {record.code: record.message for record in sink.records if record.type == "notice"}


def rows_of(sink):
    return [record for record in sink.records if record.type == "row"]


def train(folder, *, with_batch=True, steps=20, **options):
    sink, model = RecordingSink(), options.get("model") or TinyText()
    with TrainingMonitor(folder, sinks=[sink], log_every=10, peak_flops_per_s=1e12, **options) as monitor:
        for _ in range(steps):
            with monitor.step(text_batch(2, 8) if with_batch else None) as step:
                train_step(model, text_batch(2, 8))
                step.log(loss=1.0, grad_norm=0.5)
    return sink


def test_one_sink_may_be_given_without_a_list(tmp_path, capsys):
    with TrainingMonitor(tmp_path, sinks="console") as monitor:
        monitor.log_step(0, loss=1.0)
    assert monitor.summary.failed_parts == {}
    assert "The run ended at step 0." in capsys.readouterr().out
    sink = RecordingSink()
    with TrainingMonitor(tmp_path / "object", sinks=sink) as monitor:
        monitor.log_step(0, loss=1.0)
    assert sink.records
    monitor = TrainingMonitor(tmp_path / "config", config={"sinks": "console"}, strict=True)
    assert monitor.config.sinks == ("console",)
    monitor.close()


def test_without_a_model_one_notice_says_what_is_missing_and_what_to_pass(tmp_path):
    found = notices_of(train(tmp_path))
    assert set(found) == {"no_model"}
    assert "no FLOPs" in found["no_model"]
    assert "MFU" in found["no_model"]
    assert "model=" in found["no_model"]


def test_without_a_batch_one_notice_says_what_is_missing_and_what_to_pass(tmp_path):
    found = notices_of(train(tmp_path, model=TinyText(), with_batch=False))
    assert set(found) == {"no_batch"}
    assert "no tokens per second;" in found["no_batch"], "FLOPs need no batch"
    assert "batch=" in found["no_batch"]


@pytest.mark.parametrize("options", [{"model": TinyText()}, {"flops_fn": lambda batch: 1000}])
def test_where_nothing_is_missing_nothing_is_said(tmp_path, options):
    assert not {"no_model", "no_batch"} & set(notices_of(train(tmp_path, **options)))


def test_a_gradient_norm_is_in_every_row(tmp_path):
    rows = rows_of(train(tmp_path, steps=100, model=TinyText()))
    assert len(rows) == 10
    assert {row.values["training/grad_norm"] for row in rows} == {0.5}


def test_a_notebook_shows_a_monitor_as_a_table_of_its_newest_row_and_later_of_its_summary(tmp_path):
    model = TinyText()
    monitor = TrainingMonitor(tmp_path / "<b>run", model=model, log_every=5)
    assert "no step yet" in monitor._repr_html_()
    for number in range(20):
        train_step(model, text_batch(2, 8))
        monitor.log_step(number, loss=2.5, batch=text_batch(2, 8))
    newest = cells(monitor._repr_html_())
    assert (newest["steps"], newest["loss"]) == ("20", "2.5000")
    assert "MFU" in newest
    assert "not exact" not in newest
    monitor.close()
    page = monitor._repr_html_()
    assert "&lt;b&gt;run: closed at step 19" in page
    assert "<b>" not in page
    assert cells(page)["tokens"] == "320"


def cells(page):
    return {label: html.unescape(text) for label, text in re.findall(r"<th[^>]*>(.*?)</th><td[^>]*>(.*?)</td>", page)}


def test_a_monitor_that_is_switched_off_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_DISABLE", "1")
    assert repr(TrainingMonitor(tmp_path)).endswith("switched off by FLOPWATCH_DISABLE)")
    assert "switched off by FLOPWATCH_DISABLE" in TrainingMonitor(tmp_path)._repr_html_()


@dataclass
class Sample:
    ids: torch.Tensor


class Plain:
    def __init__(self, ids):
        self.ids = ids


def test_a_dict_without_a_tensor_is_answered_with_its_keys():
    with pytest.raises(InputError, match=r"holds no tensor \(got a dict with the keys 'text' \(list\), 'idx' \(int\)"):
        read_shape({"text": ["a"], "idx": 3})

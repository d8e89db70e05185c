"""A peak that `flopwatch peak --measure` has stored is used where no other is known, and is marked as measured."""

import json
import re

import pytest
import torch

from flopwatch import TrainingMonitor, peak_flops
from flopwatch.hardware.peaks import Unknown
from flopwatch.records.flops import Peak
from flopwatch.runs import read_log

MEASURE = ("peak", "--measure", "--seconds", "0.05", "--json")


@pytest.fixture(autouse=True)
def unknown_device(monkeypatch, tmp_path):
    """A machine whose processor has no known peak, and a working folder of its own."""
    monkeypatch.setattr("flopwatch.hardware.cpu.peak_of_cpu", lambda *_: Unknown("it is not in the table"))
    monkeypatch.chdir(tmp_path)


def train(folder):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(folder, model=model, log_every=5) as monitor:
        for _ in range(20):
            with monitor.step(torch.ones(8, 64)) as step:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(torch.ones(8, 64)).sum()
                loss.backward()
                optimizer.step()
                step.log(loss=loss)
    return monitor


def test_the_advice_leads_from_no_peak_to_the_mfu_of_the_same_log_and_of_the_next_run(flopwatch):
    first = train("flopwatch-runs/one")
    assert "perf/mfu" not in first.summary.values
    advice = json.loads(flopwatch("why", "--json")[1])["no_verdict"]
    assert "`flopwatch peak --measure --dtype bf16`" in advice
    status, out, err = flopwatch("peak", "--dtype", "bf16")
    assert status == 1
    assert "`flopwatch peak --measure --dtype bf16`" in err

    (measured,) = json.loads(flopwatch(*MEASURE)[1])["peaks"]
    assert (measured["dtype"], measured["kind"]) == ("bf16", "measured")  # the type of the newest run

    found = json.loads(flopwatch("why", "--json")[1])
    assert found["mfu_percent"] > 0
    assert any("measured on such a device" in note and "spread" in note for note in found["notes"])
    second = train("flopwatch-runs/two")
    assert second.summary.values["perf/peak_flops_per_second_per_device"] == pytest.approx(measured["flops_per_s"])
    status, out, _ = flopwatch("explain", "flopwatch-runs/two")
    assert "measured, confidence" in out
    assert "confidence high" not in out
    status, out, _ = flopwatch("peak", "--dtype", "bf16", "--json")
    assert (status, json.loads(out)["peaks"]) == (0, [measured])


def test_the_fastest_measurement_counts_whatever_number_of_threads_the_training_has(flopwatch):
    threads = torch.get_num_threads()
    flopwatch(*MEASURE, "--dtype", "fp32")
    try:
        torch.set_num_threads(threads + 1)
        assert peak_flops("cpu", "fp32").kind == "measured"
        assert peak_flops("cpu", "fp16") is None
    finally:
        torch.set_num_threads(threads)


def test_a_measurement_on_another_device_is_not_used_for_a_log(flopwatch, tmp_path):
    train("run")
    flopwatch(*MEASURE, "--dtype", "bf16")
    cache = tmp_path / "cache/flopwatch/peaks.json"
    cache.write_text(cache.read_text().replace(" units)", "1 units)"))
    assert json.loads(flopwatch("why", "run", "--json")[1])["mfu_percent"] is None


def test_a_peak_that_was_measured_badly_is_named_with_the_reason_why_it_is_not_used(flopwatch, tmp_path, monkeypatch):
    derived = Peak(1e14, "cpu", "fp32", "a table", kind="derived", confidence="low")
    monkeypatch.setattr("flopwatch.hardware.cpu.peak_of_cpu", lambda *_: derived)
    flopwatch(*MEASURE, "--dtype", "fp32")
    cache = tmp_path / "cache/flopwatch/peaks.json"
    cache.write_text(re.sub('"confidence": ?"[a-z]+"', '"confidence": "low"', cache.read_text()))
    model = torch.nn.Linear(8, 8)
    with TrainingMonitor("run", model=model, log_every=2) as monitor:
        for _ in range(4):
            with monitor.step(torch.ones(2, 8)):
                model(torch.ones(2, 8)).sum().backward()
    log = read_log("run/training_log.jsonl")
    (message,) = [notice.message for notice in log.notices if notice.code == "measured_peak_not_used"]
    assert log.provenances[-1].achievable_flops_per_s is None
    assert "with low confidence" in message
    assert "--measure-again" in message

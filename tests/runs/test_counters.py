"""What is said of a run's hardware counters and energy, and that logs without them are read as before."""

import json

import pytest

from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.records.run import Row
from flopwatch.report.run.compared import runs_compared
from flopwatch.report.run.contents import read_report
from flopwatch.report.run.document import run_document, run_json
from flopwatch.report.run.why import why
from flopwatch.runs.comparison import compare
from flopwatch.runs.counters import counter_sentences, counters_of
from flopwatch.runs.reading import read_around, read_log
from support.counted_device import CLOCK_MHZ, STEP_FLOPS, TOKENS, FakeTraining, seconds_at

SECONDS = seconds_at(0.4)
WATTS = 500.0


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The same training with counters and, as of an earlier version, without any trace of them."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("counted")
        shown = {"tensor_active": 0.42, "sm_clock_mhz": CLOCK_MHZ}
        FakeTraining(folder, patch, shown, watts=WATTS).train([SECONDS] * 60)
        old = tmp_path_factory.mktemp("old")
    text = (folder / "training_log.jsonl").read_text()
    lines = [without_counters(json.loads(line)) for line in text.splitlines()]
    (old / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "training_log.jsonl", old / "training_log.jsonl"


def without_counters(record):
    record.pop("counters_source", None)
    named = ("counters/", "perf/joules", "total/energy")
    values = record.get("values", {})
    record |= {"values": {key: value for key, value in values.items() if not key.startswith(named)}} if values else {}
    record.get("ledger", {}).get("totals", {}).pop("energy_joules", None)
    return record


def test_energy_and_both_rates_are_read_from_the_log(logs):
    found = counters_of(read_around(logs[0]))
    assert found.source == "fake"
    assert found.energy_joules == pytest.approx(WATTS * 59 * SECONDS)  # the sampling begins after the first step
    assert found.joules_per_step == pytest.approx(WATTS * SECONDS)
    assert found.joules_per_sample == pytest.approx(WATTS * SECONDS / TOKENS)
    assert found.counted_flops_per_s == pytest.approx(STEP_FLOPS / SECONDS)
    assert found.flops_per_s == pytest.approx(1.05 * STEP_FLOPS / SECONDS, rel=1e-5)


def test_why_says_it_in_words_and_in_json(logs):
    content, document = why(read_around(logs[0]), (), ())
    text = to_markdown(document)
    assert "Measured energy of the devices: 78" in text
    assert "per step" in text
    assert "1.05 times as many" in text
    assert content["counters"]["source"] == "fake"


def test_a_comparison_has_energy_if_one_of_the_runs_does(logs):
    counted, old = map(read_log, logs)
    comparison = compare(counted, old)
    line = comparison.line("perf/joules_per_step")
    assert (line.a, line.b, line.unit) == (pytest.approx(WATTS * SECONDS), None, "J")
    assert "energy per step" in to_markdown(runs_compared(comparison))
    assert "energy" not in to_markdown(runs_compared(compare(old, old)))


def test_the_report_has_a_tile_and_sentences(logs):
    report = read_report(logs[0])
    page, text = to_page(run_document(report)), to_markdown(run_document(report))
    assert "measured energy of the devices" in page
    assert "FLOP/s of a device in the newest window" in page
    assert "Measured energy of the devices" in text
    assert json.loads(run_json(report))["counters"]["source"] == "fake"


def test_logs_without_counters_are_read_as_before(logs):
    log = read_log(logs[1])
    assert counters_of(log) is None
    assert "counters" not in why(log, (), ())[0]
    report = read_report(logs[1])
    assert report.counters is None
    assert "FLOP/s of a device in the newest window" not in to_page(run_document(report))


def test_the_source_stands_in_a_row_only_if_there_is_one():
    assert "counters_source" not in Row(1, 0.0, {}).to_json()
    assert Row(1, 0.0, {}, counters_source="nvml").to_json()["counters_source"] == "nvml"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", -1.0])
def test_values_that_no_counter_can_show_are_unknown(value, logs, tmp_path):
    """As in a log that an earlier version wrote of a driver's NaN."""
    records = [json.loads(line) for line in logs[0].read_text().splitlines()]
    for values in (record.get("values", {}) for record in records):
        values.update(dict.fromkeys([key for key in values if "joules" in key or key.startswith("counters/")], value))
    path = tmp_path / "training_log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = counters_of(read_around(path))
    assert found is None or counter_sentences(found) == []

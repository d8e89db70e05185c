"""What the users' documents write, run as they write it. The number in a test's name is the document's."""

import dataclasses
import json
import textwrap

import pytest
import torch
import yaml

import flopwatch
from flopwatch import TrainingMonitor, calculate_mfu, calculate_mfu_with_profiler, calculate_precise_mfu
from flopwatch.errors import MeasurementError
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.monitor.config import PRESETS, read_config
from flopwatch.testing import FakeCounters, RecordingSink
from testbeds.architectures import BY_NAME, causal_batch, true_flops

PEAK = 1e12
R6_KEYS = {
    "perf/mfu",
    "perf/mfu_percent",
    "perf/step_time",
    "perf/steps_per_second",
    "perf/tokens_per_second",
    "perf/samples_per_second",
    "training/loss",
    "training/lr",
    "training/epoch",
    "training/grad_norm",
}


@pytest.fixture
def model():
    return BY_NAME["llama"].build()


@pytest.fixture(scope="module")
def true_of_4_x_32():
    return true_flops(BY_NAME["llama"].build(eager=True), causal_batch(4, 32))


def settings(text):
    config, problems = read_config(yaml.safe_load(textwrap.dedent(text)))
    assert problems == []
    return config


@pytest.mark.requirement("R1")
def test_000_mfu_of_one_step(model, true_of_4_x_32, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "1")
    mfu = calculate_mfu_with_profiler(model, batch_size=4, seq_length=32, step_time=0.1)
    assert f"MFU: {mfu:.4f}" == f"MFU: {true_of_4_x_32 / 0.1 / PEAK:.4f}"
    assert model.training


@pytest.mark.slow
@pytest.mark.requirement("R3")
@pytest.mark.requirement("R6")
def test_000_the_monitor_in_a_training(model, true_of_4_x_32, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "1")
    config = {"model": {"name": "llama"}, "monitoring": {"flops_profile_freq": 500}}
    total_steps, epoch, loss, grad_norm, lr = 20, 0, torch.tensor(2.5), 1.0, 1e-4
    batch = causal_batch(4, 32)
    attention_mask = batch["attention_mask"]

    monitor = TrainingMonitor(str(tmp_path), config, flops_profile_freq=500)
    monitor.model_ref = model
    for step in range(total_steps):
        model(**batch).loss.backward()
        monitor.log_step(step, epoch, loss, grad_norm, lr, attention_mask)
    monitor.close()

    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["type"] == "row"]
    assert set(rows[0]["values"]) >= R6_KEYS
    assert rows[0]["step"] == 19
    assert rows[0]["values"]["training/loss"] == 2.5
    assert monitor.summary.values["total/model_flops"] == 20 * true_of_4_x_32
    assert not any(value == 0 for row in rows for key, value in row["values"].items() if key == "perf/mfu")


@pytest.mark.requirement("R3")
def test_000_the_signatures_are_the_documents(tmp_path):
    monitor = TrainingMonitor(output_dir=tmp_path, config=None, log_file="training_log.json", flops_profile_freq=500)
    monitor.log_step(step=1, epoch=0, loss=1.0, grad_norm=0.5, learning_rate=0.1, attention_mask=None, skip_wandb=False)
    monitor.close()
    assert (tmp_path / "training_log.json").is_file()


@pytest.mark.requirement("R4")
def test_000_frequency_from_yaml(tmp_path):
    path = tmp_path / "config_profiler_mfu.yaml"
    path.write_text("# every 500 steps\nmonitoring:\n  flops_profile_freq: 500\n")
    assert read_config(path)[0].flops_profile_freq == 500


@pytest.mark.requirement("R4")
def test_000_frequency_from_code_comes_before_the_file(tmp_path):
    config = {"monitoring": {"flops_profile_freq": 500}}
    monitor = TrainingMonitor(output_dir=tmp_path, config=config, flops_profile_freq=50)
    assert monitor.config.flops_profile_freq == 50
    monitor.close()


@pytest.mark.slow
@pytest.mark.requirement("R9")
@pytest.mark.parametrize("measurement_mode", ["smart", "profiler", "estimate", "hybrid"])
def test_001_precise_mfu(model, true_of_4_x_32, measurement_mode, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "1")
    mfu = calculate_precise_mfu(model, 4, 32, 0.1, measurement_mode=measurement_mode, actual_flops=None)
    assert mfu == pytest.approx(true_of_4_x_32 / 0.1 / PEAK, rel=1e-12)


@pytest.mark.requirement("R9")
def test_001_precise_mfu_of_flops_the_user_has(model):
    assert calculate_precise_mfu(model, 4, 32, 0.5, actual_flops=1e11, peak_flops_per_s=PEAK) == 0.2


@pytest.mark.requirement("R9")
def test_001_an_unknown_mode_is_refused(model):
    with pytest.raises(flopwatch.InputError, match="'smart', 'estimate', 'profiler', 'hybrid', got 'fast'"):
        calculate_precise_mfu(model, 4, 32, 0.5, "fast")


@pytest.mark.requirement("R11")
def test_001_production():
    config = settings("""
        monitoring:
          mfu_calculation_mode: "smart"
          performance_monitoring:
            measure_flops_frequency: 500
            smart_mode:
              initial_profiling: true
              calibration_enabled: true
              recalibration_frequency: 1000
        """)
    assert (config.mode, config.flops_profile_freq, config.recalibration_frequency) == ("smart", 500, 1000)
    assert config.initial_profiling
    assert config.calibration_enabled
    assert config == read_config(None, "production")[0]


@pytest.mark.requirement("R11")
def test_001_research():
    config = settings("""
        monitoring:
          mfu_calculation_mode: "profiler"
          performance_monitoring:
            measure_flops_frequency: 50
        """)
    assert (config.mode, config.flops_profile_freq) == ("profiler", 50)
    assert config == read_config(None, "research")[0]


@pytest.mark.requirement("R11")
def test_001_prototype():
    config = settings("""
        monitoring:
          mfu_calculation_mode: "estimate"
          performance_monitoring:
            measure_flops_frequency: 0
        """)
    assert (config.mode, config.flops_profile_freq) == ("estimate", 0)
    assert config == read_config(None, "prototype")[0]


HYBRID = """
monitoring:
  mfu_calculation_mode: "hybrid"
  performance_monitoring:
    hybrid_mode:
      hardware_counters_enabled: true
      fallback_to_profiler: true
"""


@pytest.mark.requirement("R11")
def test_001_complex():
    config = settings(HYBRID)
    assert (config.mode, config.hardware_counters_enabled, config.fallback_to_profiler) == ("hybrid", True, True)
    assert config == read_config(None, "complex")[0]


@pytest.mark.slow
@pytest.mark.requirement("R9")
@pytest.mark.requirement("R11")
@pytest.mark.parametrize(
    ("source", "became", "reads"),
    [(FakeCounters("counters", [{"power_watts": 70.0}]), "hybrid", True), (None, "profiler", False)],
)
def test_001_hybrid_reads_counters_or_falls_back(source, became, reads, model, tmp_path, monkeypatch):
    """The document's file as it stands: with counters they are in every row; without any, it is the profiler."""

    def open_source(device):
        if source is None:
            raise MeasurementError("there are no counters here")
        return source.open(device)

    monkeypatch.setattr(
        "flopwatch.monitor.counters.device.CounterSampler",
        lambda device, notify: CounterSampler(device, notify, open_source=open_source, interval_seconds=0.001),
    )
    (tmp_path / "config.yaml").write_text(HYBRID, encoding="utf-8")
    sink = RecordingSink()
    monitor = TrainingMonitor(
        tmp_path, config=tmp_path / "config.yaml", model=model, sinks=[sink], strict=True, peak_flops_per_s=PEAK
    )
    for step in range(6):
        batch = causal_batch(2, 16)
        model(**batch).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 0.1, batch=batch)
    monitor.close()
    row = next(record for record in sink.records if record.type == "row")
    provenance = [record for record in sink.records if record.type == "provenance"][-1]
    assert provenance.mode == became
    assert row.counters_source == ("counters" if reads else None)
    assert row.values.get("counters/power_watts") == (pytest.approx(70.0) if reads else None)
    assert row.values["perf/mfu"] > 0
    assert monitor.summary.notices.get("hybrid_without_counters", 0) == int(not reads)


@pytest.mark.slow
@pytest.mark.requirement("R11")
@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=[] if name in ("production", "prototype") else pytest.mark.campaign) for name in PRESETS],
)
def test_001_every_preset_runs(preset, model, tmp_path):
    monitor = TrainingMonitor(tmp_path, model=model, preset=preset, strict=True, peak_flops_per_s=PEAK)
    for step in range(6):
        batch = causal_batch(2, 16)
        model(**batch).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 0.1, batch=batch)
    monitor.close()
    assert monitor.summary.values["perf/mfu"] > 0


@pytest.mark.slow
@pytest.mark.requirement("R12")
@pytest.mark.parametrize(
    ("training_phase", "measure_freq"),
    [
        ("finetune", 200),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in (("warmup", 1000), ("main", 500))),
    ],
)
def test_001_frequency_by_training_phase(training_phase, measure_freq, model, tmp_path):
    """At least one of so many steps is counted."""
    monitor = TrainingMonitor(tmp_path, model=model, mode="profiler", strict=True, peak_flops_per_s=PEAK)
    monitor.set_phase(training_phase)
    monitor.close()
    assert monitor._started_run.counter._schedule.every == measure_freq


@pytest.mark.requirement("R16")
def test_002_reduced_logging():
    config = settings("""
        wandb:
          project: mine
          log_dataset_metrics: false
          reduced_logging: true
        """)
    assert not config.log_dataset_metrics
    assert config.reduced_logging


@pytest.mark.requirement("R16")
def test_002_large_models():
    config = settings("""
        training:
          logging_steps: 100
          eval_steps: 1000
          save_steps: 2000
          learning_rate: 0.1
        """)
    assert config.log_every == 100


@pytest.mark.requirement("R16")
def test_002_the_throttles_are_the_defaults():
    config = read_config(None)[0]
    assert config.flops_profile_freq == 500
    assert config.dataset_metrics_every == 10
    assert config.detailed_log_every == 50
    assert config.local_log_every == 200


@pytest.mark.requirement("R16")
def test_002_detailed_metrics_come_every_50_steps(tmp_path):
    sink = RecordingSink()
    monitor = TrainingMonitor(tmp_path, sinks=[sink], strict=True, log_every=10, config={"warm_up_steps": 0})
    for step in range(200):
        monitor.log_step(step, 0, 1.0, 1.0, 0.1)
    monitor.close()
    rows = [record for record in sink.records if record.type == "row"]
    assert [row.step for row in rows if row.detailed] == [9, 49, 99, 149, 199]
    assert all(("perf/step_time_p90" in row.values) == row.detailed for row in rows)
    assert all("training/loss" in row.values for row in rows)


@pytest.mark.requirement("R16")
def test_002_reduced_logging_leaves_the_details_out(tmp_path):
    sink = RecordingSink()
    config = {"wandb": {"reduced_logging": True}}
    monitor = TrainingMonitor(tmp_path, sinks=[sink], strict=True, log_every=10, config=config)
    for step in range(100):
        monitor.log_step(step, 0, 1.0, 1.0, 0.1)
    monitor.close()
    assert not any("perf/step_time_p90" in record.values for record in sink.records if record.type == "row")


@pytest.mark.requirement("R19")
def test_003_flops_and_mfu(model, true_of_4_x_32):
    flops = flopwatch.profile_model_flops(model, causal_batch(4, 32))
    assert flops == true_of_4_x_32
    assert calculate_mfu(flops, 0.1, PEAK) == pytest.approx(true_of_4_x_32 / 0.1 / PEAK, rel=1e-12)


@pytest.mark.requirement("R4")
def test_003_frequency_from_yaml():
    config = settings("""
        monitor:
          freq:
            flops_profile_freq: 50
        """)
    assert config.flops_profile_freq == 50


def test_a_row_has_no_field_that_the_log_loses():
    from flopwatch.records.run import Row

    fields = {field.name for field in dataclasses.fields(Row)} - {"skip"}
    row = Row(1, 0.0, {}, all_ranks={"tokens": 1}, exact=False, notes=("an estimate",), counters_source="nvml")
    assert set(row.to_json()) == fields

"""Whatever goes wrong in the monitor is said once, and the training goes on."""

import json
import logging
import threading

import pytest
import torch

import flopwatch
from flopwatch.testing import FakeClock, RecordingSink
from support.small_models import TINY_FLOPS_PER_TOKEN, TinyText, text_batch, train

pytestmark = pytest.mark.requirement("R20")


def run(tmp_path, steps=20, *, batch=None, model=None, trains=True, **options):
    """A monitored training; returns the monitor and how often the training itself got round."""
    model = model or TinyText()
    options = {"log_every": 10, **options}
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, peak_flops_per_s=1e12, **options)
    rounds = 0
    for number in range(steps):
        with monitor.step(text_batch(2, 8) if batch is None else batch, step=number) as step:
            if trains:
                train(model, text_batch(2, 8))
            step.log(1.0, 0.1, 1.0, 0)
        rounds += 1
    monitor.close()
    return monitor, rounds


def test_nothing_wrong_nothing_said(tmp_path, caplog):
    monitor, _ = run(tmp_path)
    assert caplog.records == []
    assert monitor.summary.failed_parts == {}
    assert monitor.summary.values["total/model_flops"] == 20 * 16 * TINY_FLOPS_PER_TOKEN


@pytest.fixture
def compiled(monkeypatch):
    """Steps are not counted as they run, as in a process with compiled code: the model is traced."""
    monkeypatch.setattr("flopwatch.monitor.counting.step_counter.obstacle", lambda: "the code is compiled")


@pytest.mark.parametrize("batch", [{}, "text", {"input_ids": [1, 2]}, torch.zeros(0, 3)])
def test_a_batch_nobody_understands_costs_its_tokens_only(tmp_path, caplog, batch):
    monitor, rounds = run(tmp_path, batch=batch)

    assert rounds == 20
    assert len(caplog.records) == 1
    assert monitor.summary.failed_parts.keys() == {"batch"}
    assert monitor.summary.values["total/steps"] == 20
    assert monitor.summary.values["total/model_flops"] == 20 * 16 * TINY_FLOPS_PER_TOKEN


def test_lengths_that_cannot_be_cost_the_tokens_of_that_step_only(tmp_path, caplog):
    model = TinyText()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, peak_flops_per_s=1e12)
    for number in range(20):
        with monitor.step(text_batch(2, 8), lengths=[100] if number == 5 else [8, 8]):
            train(model, text_batch(2, 8))
    monitor.close()

    assert "sum to 100" in caplog.text
    assert monitor.summary.values["total/steps"] == 20
    assert monitor.summary.values["total/tokens"] == 19 * 16
    assert monitor.summary.values["total/model_flops"] == 20 * 16 * TINY_FLOPS_PER_TOKEN


def test_a_loss_that_is_written_into_afterwards_is_left_out_and_said(tmp_path, caplog):
    monitor = flopwatch.TrainingMonitor(tmp_path, log_every=5)
    loss = torch.zeros(())
    for number in range(5):
        loss += 1.0
        monitor.log_step(number, loss=loss, grad_norm=torch.tensor(float(number)))
    values = monitor.log_now()
    monitor.close()

    assert "loss.detach().clone()" in caplog.text
    assert values["training/loss"] == 5.0, "the last one was not written into"
    assert values["training/grad_norm"] == 2.0


def test_a_loss_of_many_values_is_left_out_and_said(tmp_path, caplog):
    monitor, _ = run(tmp_path, steps=1)
    caplog.clear()
    monitor = flopwatch.TrainingMonitor(tmp_path / "b")
    monitor.log_step(0, loss=torch.zeros(3))
    monitor.close()
    assert "not a single number" in caplog.text


@pytest.mark.parametrize("how", [{"raises": RuntimeError("no space")}, {"hangs": True}])
def test_a_sink_that_fails_or_hangs_costs_nobody_else_anything(tmp_path, caplog, how, monkeypatch):
    monkeypatch.setattr("flopwatch.monitor.outlets.CLOSE_SECONDS", 1.0)
    bad, good = RecordingSink("bad", **how), RecordingSink("good")
    monitor, rounds = run(tmp_path, sinks=[bad, good])
    bad.release()

    assert rounds == 20
    assert "bad" in monitor.summary.failed_parts
    assert len([record for record in good.records if record.type == "row"]) == 2
    lines = [json.loads(line) for line in monitor.log_path.read_text().splitlines()]
    assert lines[-1]["type"] == "summary"
    assert "bad" in lines[-1]["failed_parts"], "the local log tells about the others"


@pytest.mark.slow
def test_a_sink_that_is_too_slow_loses_rows_and_that_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("flopwatch.monitor.outlets.CLOSE_SECONDS", 1.0)
    slow = RecordingSink("slow", hangs=True, fails_after=1)
    monitor, rounds = run(tmp_path, steps=1500, log_every=1, sinks=[slow])
    slow.release()

    assert rounds == 1500
    assert monitor.summary.dropped_rows["slow"] > 0
    assert caplog.text.count("too slow") == 1
    rows = [line for line in monitor.log_path.read_text().splitlines() if '"type":"row"' in line]
    assert len(rows) == 1500


def test_a_process_that_can_start_no_threads_trains_and_says_that_there_is_no_log(tmp_path, caplog, monkeypatch):
    def cannot(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    run(tmp_path)
    assert "the sink jsonl failed and is switched off, the training goes on: RuntimeError" in caplog.text


def test_an_unknown_sink_is_said_and_left_out(tmp_path, caplog):
    monitor, rounds = run(tmp_path, sinks=["tensorbord"])
    assert rounds == 20
    assert "tensorbord" in caplog.text
    assert "tensorboard" in caplog.text
    assert monitor.summary.failed_parts.keys() == {"tensorbord"}


def test_a_log_of_a_newer_version_is_not_resumed_but_the_training_goes_on(tmp_path, caplog):
    (tmp_path / "training_log.jsonl").write_text('{"type":"run","format":99,"session":"x","unix_time":0}\n')
    model = TinyText()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, peak_flops_per_s=1e12)
    for number in range(30, 50):
        monitor.log_step(number, batch=text_batch(2, 8))
    monitor.close()
    assert "the totals start at 0" in caplog.text
    assert monitor.summary.values["total/steps"] == 20


@pytest.mark.parametrize("wrong", ["", None, [], {"a": 1}])
def test_a_session_that_resumes_after_a_damaged_summary_logs_all_of_its_steps(tmp_path, wrong):
    run(tmp_path, steps=20)
    log = tmp_path / "training_log.jsonl"
    *before, last = log.read_text().splitlines()
    summary = json.loads(last)
    assert summary["type"] == "summary"
    summary["values"]["time/start_up_seconds"] = wrong
    log.write_text("\n".join([*before, json.dumps(summary)]) + "\n")

    monitor = flopwatch.TrainingMonitor(tmp_path, model=TinyText(), peak_flops_per_s=1e12)
    for number in range(20, 30):
        monitor.log_step(number, batch=text_batch(2, 8))
    monitor.close()

    assert monitor.summary.failed_parts == {}
    assert monitor.summary.values["total/steps"] == 30


def test_mistakes_in_the_configuration_are_named_and_left_out(tmp_path, caplog):
    config = {"monitoring": {"log_evry": 5, "mode": "fast", "log_every": 4}}
    monitor, rounds = run(tmp_path, config=config, log_every=None)
    assert rounds == 20
    assert "did you mean 'log_every'" in caplog.text
    assert "mode='fast'" in caplog.text
    assert monitor.config.log_every == 4


def test_a_configuration_that_is_not_there_is_named(tmp_path, caplog):
    _, rounds = run(tmp_path, config=tmp_path / "missing.yaml")
    assert rounds == 20
    assert "missing.yaml" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"monitoring": {"mode": "fast"}}}, "mode='fast'"),
        ({"sinks": ["tensorbord"]}, "no sink 'tensorbord'"),
        ({"preset": "fast"}, "use one of production"),
    ],
)
def test_strict_raises_at_once(tmp_path, options, message):
    with pytest.raises(flopwatch.InputError, match=message):
        flopwatch.TrainingMonitor(tmp_path, strict=True, **options)


@pytest.mark.usefixtures("compiled")
def test_an_unknown_peak_is_said_once_and_there_is_no_mfu(tmp_path, caplog):
    model = TinyText()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, dtype="fp8")
    for _ in range(20):
        with monitor.step(text_batch(2, 8)):
            train(model, text_batch(2, 8))
    monitor.close()
    assert len(caplog.records) == 1
    assert "there will be no MFU" in caplog.text
    assert "FLOPWATCH_PEAK_TFLOPS" in caplog.text
    assert "perf/mfu" not in monitor.summary.values
    assert monitor.summary.values["perf/model_flops_per_second_per_device"] > 0


def test_more_than_the_device_can_do_is_shown_and_said(tmp_path, caplog):
    model = TinyText()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, peak_flops_per_s=1.0)
    for _ in range(40):
        with monitor.step(text_batch(2, 8)):
            train(model, text_batch(2, 8))
    monitor.close()
    assert caplog.text.count("more than the device can do") == 1
    assert "peak of 1 FLOP/s" in caplog.text
    assert monitor.summary.values["perf/mfu"] > 1.05


@pytest.mark.slow
def test_an_op_without_a_formula_makes_mfu_a_lower_bound_and_that_is_said(tmp_path, caplog):
    class Distances(TinyText):
        def forward(self, input_ids, attention_mask=None, labels=None):
            x = self.layer(self.embedding(input_ids))
            return {"loss": torch.linalg.qr(x).R.sum()}

    run(tmp_path, model=Distances())
    assert "lower bound" in caplog.text
    assert "linalg_qr" in caplog.text


def test_switched_off_by_the_environment_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_DISABLE", "1")
    folder = tmp_path / "outputs"
    monitor, rounds = run(folder, sinks=["tensorboard"])
    assert rounds == 20
    assert not folder.exists()
    with monitor.phase("eval"), monitor.pause(), monitor.step() as step:
        step.log(loss=1.0)
    assert monitor.state_dict() == {}
    assert monitor.latest == {}


def test_calls_after_the_end_do_nothing(tmp_path):
    monitor, _ = run(tmp_path)
    size = monitor.log_path.stat().st_size
    monitor.log_step(21)
    monitor.close()
    assert monitor.log_path.stat().st_size == size


def test_messages_go_through_pythons_logging(tmp_path, caplog):
    with caplog.at_level(logging.ERROR, logger="flopwatch"):
        run(tmp_path, sinks=["tensorbord"])
    assert {record.name for record in caplog.records} == {"flopwatch"}


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("this exception cannot be printed")


def test_an_exception_that_cannot_be_printed_is_reported_by_its_class(tmp_path, caplog):
    def flops_of(batch):
        raise UnprintableError

    monitor, rounds = run(tmp_path, flops_fn=flops_of)

    assert rounds == 20
    assert "batch failed in the monitor, the training goes on: UnprintableError" in caplog.text
    assert monitor.summary.failed_parts == {"batch": "UnprintableError: UnprintableError"}
    assert monitor.summary.values["total/steps"] == 20


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("at", ["sink", "log"])
def test_an_exception_that_cannot_be_printed_does_not_stop_the_notice_about_it(tmp_path, caplog, monkeypatch, at):
    class UnprintableValueError(UnprintableError, ValueError):
        pass

    def find(log, first_step):
        raise UnprintableValueError

    if at == "log":
        monkeypatch.setattr("flopwatch.monitor.resume.find_resume_point", find)
    sinks = [RecordingSink("bad", raises=UnprintableError())] if at == "sink" else []
    monitor, rounds = run(tmp_path, sinks=sinks, trains=False)

    assert rounds == 20
    code = {"sink": "sink_failed:bad", "log": "log_not_resumed"}[at]
    assert monitor.summary.notices[code] == 1
    assert len(caplog.records) == 1
    assert "Unprintable" in caplog.text
    assert monitor.summary.values["total/steps"] == 20


def test_a_training_that_ends_with_an_exception_that_cannot_be_printed_has_a_summary(tmp_path):
    monitor = flopwatch.TrainingMonitor(tmp_path)
    monitor.log_step(0, loss=1.0)
    with pytest.raises(UnprintableError), monitor:
        raise UnprintableError

    assert monitor.summary.ended_by == f"{UnprintableError.__module__}.UnprintableError"
    assert monitor.summary.values["total/steps"] == 1


def test_a_step_whose_number_is_none_leaves_the_times_of_the_others_as_they_are(tmp_path):
    clock, sink = FakeClock(), RecordingSink()
    options = {"log_every": 100, "config": {"warm_up_steps": 0, "log_seconds": 1e9}}
    monitor = flopwatch.TrainingMonitor(tmp_path, sinks=[sink], clock=clock, quiet=True, **options)
    for number in (0, 1, "two", 3, 4):
        monitor.start_step()
        clock.advance(1.0 if number == "two" else float(number) + 2.0)
        monitor.log_step(number)
    monitor.close()

    (row,) = [record for record in sink.records if record.type == "row"]
    assert row.steps["step"] == [0, 1, 3, 4]
    assert row.steps["seconds"] == [2.0, 3.0, 1.0 + 5.0, 6.0], "the time of what was no step is in the next one"

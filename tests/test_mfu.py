"""FLOPs over time over peak, and the functions the documents name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.models.load import load_model
from flopwatch.monitor.config import read_config
from flopwatch.sweep.spec.matrix import read_matrix


def test_mfu_is_flops_over_seconds_over_peak() -> None:
    assert flopwatch.calculate_mfu(flops=300e12, seconds=2.0, peak_flops_per_s=600e12) == 0.25


def test_mfu_is_never_clamped() -> None:
    assert flopwatch.calculate_mfu(flops=2e12, seconds=1.0, peak_flops_per_s=1e12) == 2.0


@pytest.mark.requirement("R1")
def test_the_profiler_function_counts_forward_and_backward() -> None:
    model = load_model("tiny", device="cpu")
    forward = 2 * 4 * 16 * (2 * 12 * 64 * 64 + 64 * 1000) + 2 * 2 * 2 * 4 * 16 * 16 * 64

    mfu = flopwatch.calculate_mfu_with_profiler(
        model, batch_size=4, seq_length=16, step_time=0.5, peak_flops_per_s=1e12
    )

    assert mfu == 3 * forward / 0.5 / 1e12
    assert model.training


@pytest.mark.requirement("R1")
def test_the_profiler_function_looks_the_peak_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "2")
    model = load_model("tiny", device="cpu")

    once = flopwatch.calculate_mfu_with_profiler(model, 4, 16, 0.5)

    assert once == flopwatch.calculate_mfu_with_profiler(model, 4, 16, 0.5, peak_flops_per_s=2e12)


def test_an_unknown_peak_is_none_with_advice_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.mfu.peak_flops", lambda *_: None)
    monkeypatch.setattr("flopwatch.mfu.explain_unknown", lambda *_: "set FLOPWATCH_PEAK_TFLOPS")

    with pytest.warns(UserWarning, match="FLOPWATCH_PEAK_TFLOPS"):
        assert flopwatch.calculate_mfu_with_profiler(load_model("tiny", device="cpu"), 4, 16, 0.5) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 16, 1.0), "batch_size must be a positive whole number, got 0"),
        ((4, 1.5, 1.0), "seq_len must be a positive whole number, got 1.5"),
        ((4, 16, 0.0), "seconds must be a positive finite number, got 0.0"),
    ],
)
def test_sizes_that_are_none_are_refused(arguments: Any, says: str) -> None:
    with pytest.raises(flopwatch.InputError, match=says):
        flopwatch.calculate_mfu_with_profiler(load_model("tiny", device="cpu"), *arguments, peak_flops_per_s=1e12)


def test_a_peak_of_zero_is_refused_not_looked_up() -> None:
    with pytest.raises(flopwatch.InputError, match="peak_flops_per_s must be a positive finite number, got 0"):
        flopwatch.calculate_mfu_with_profiler(load_model("tiny", device="cpu"), 4, 16, 1.0, peak_flops_per_s=0)


def test_a_model_on_no_device_has_no_peak() -> None:
    with pytest.raises(flopwatch.InputError, match="pass peak_flops_per_s"):
        flopwatch.calculate_mfu_with_profiler(load_model("tiny"), 4, 16, 1.0)


def test_a_model_that_takes_neither_text_nor_images_needs_a_batch() -> None:
    with pytest.raises(flopwatch.InputError, match="with your own batch"):
        flopwatch.calculate_mfu_with_profiler(nn.Linear(2, 2), 4, 16, 1.0, peak_flops_per_s=1e12)


def test_an_eval_model_comes_back_in_eval_mode() -> None:
    model = load_model("tiny", device="cpu").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    flopwatch.calculate_mfu_with_profiler(model, 4, 16, 1.0, peak_flops_per_s=1e12)

    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("section", [None, "monitoring"])
def test_the_monitor_understands_the_words_of_the_sweep(section: str | None) -> None:
    words = {"seq_len": 9, "warmup_steps": 2}
    read, problems = read_config({section: words} if section else words)

    assert (read.seq_length, read.warm_up_steps, problems) == (9, 2, [])


def test_the_sweep_understands_the_documents_word_for_the_length() -> None:
    assert read_matrix(None, {"seq_length": 9}).seq_len == [9]


def test_log_step_takes_the_learning_rate_by_both_names(tmp_path: Path) -> None:
    for name in ("lr", "learning_rate"):
        with flopwatch.TrainingMonitor(tmp_path / name, config={"log_every": 1}) as monitor:
            monitor.log_step(0, loss=1.0, **{name: 0.25})
            assert monitor.log_now()["training/lr"] == 0.25

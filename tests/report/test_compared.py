"""What must not be compared is told, and what is compared has a denominator with a name."""

import json
from dataclasses import replace
from io import StringIO

from rich.console import Console

from flopwatch.cli.trials.trial_run import print_result
from flopwatch.files import write_json
from flopwatch.present.markdown import fenced, to_markdown
from flopwatch.records.trial import MemoryUse
from flopwatch.report.capture import capture_sweep
from flopwatch.report.sweep.document import sweep_document
from support.few_results import GIB, group_of, ran, summary_of

A100 = {"flops_per_s": 312e12, "device": "A100", "dtype": "bf16", "kind": "datasheet"}


def on(result, **environment):
    return replace(result, environment={"device": "cuda", **environment})


def with_peak(result, peak):
    return replace(result, measured=replace(result.measured, cost=replace(result.measured.cost, peak=peak)))


def test_trials_on_different_gpus_or_threads_are_warned_of():
    gpus = [on(ran("standard", 8, 64), device_name="A100"), on(ran("ghost", 8, 64), device_name="RTX 3090")]
    assert any("A100 (1), RTX 3090 (1)" in warning for warning in group_of(*gpus).warnings)
    cores = [on(ran("standard", 8, 64), threads=8), on(ran("ghost", 8, 64), threads=2)]
    assert any("threads" in warning for warning in group_of(*cores).warnings)


def test_host_memory_is_not_compared_with_a_devices():
    gpu = ran("standard", 8, 64, gib=12)
    gpu = replace(gpu, measured=replace(gpu.measured, memory=replace(gpu.measured.memory, device_bytes=40 * GIB)))
    command = ran("command", 8, 64, label="mine")
    command = replace(command, measured=replace(command.measured, memory=MemoryUse(host_bytes=3 * GIB)))
    peaks = {cell.trainer: cell.peak_bytes for cell in group_of(gpu, command).cells}
    assert peaks == {"standard": 12 * GIB, "mine": None}
    on_a_device_that_does_not_tell = replace(command, environment={"device": "mps"})
    assert group_of(on_a_device_that_does_not_tell).cells[0].peak_bytes is None


def test_the_peak_behind_mfu_is_named_and_one_above_it_is_warned_of():
    group = group_of(with_peak(ran("standard", 8, 64, mfu=1.3, hfu=1.4), A100))
    assert group.denominators == ("312 TFLOP/s (A100, bf16, datasheet)",)
    assert group.warnings == (
        "standard_bs8_seq64_tiny_0: HFU is 140.0 %, which cannot be: the peak is too low, or the FLOPs are wrong",
    )
    assert group_of(with_peak(ran("standard", 8, 64, mfu=1.03), A100)).warnings
    assert not group_of(with_peak(ran("standard", 8, 64, mfu=0.99), A100)).warnings
    markdown = to_markdown(sweep_document(summary_of(with_peak(ran("standard", 8, 64, mfu=0.4), A100))))
    assert "A100, bf16, datasheet" in markdown


def test_a_trial_warns_of_an_mfu_above_its_peak_too():
    def printed(result):
        with StringIO() as text:
            print_result(result, Console(file=text, width=120))
            return text.getvalue()

    assert "warning" not in printed(with_peak(ran("standard", 8, 64, mfu=0.99), A100))
    assert "MFU is 134.0 %, which cannot be" in printed(with_peak(ran("standard", 8, 64, mfu=1.34), A100))


def test_different_denominators_are_warned_of():
    measured = {**A100, "flops_per_s": 250e12, "kind": "measured"}
    group = group_of(
        with_peak(ran("standard", 8, 64, mfu=0.4), A100), with_peak(ran("ghost", 8, 64, mfu=0.4), measured)
    )
    assert any("different peaks" in warning for warning in group.warnings)


def test_nothing_in_a_log_ends_the_block_it_stands_in():
    block = fenced("``\x1b[0m`\n<img src=https://evil/x.png>")
    fence = block.partition("text")[0]
    assert block.count(fence) == 2


def test_a_result_that_was_given_another_name_since_is_not_missing(tmp_path):
    result = ran("standard", 4, 512)
    (tmp_path / "results.jsonl").write_text(json.dumps(result.to_json()) + "\n")
    planned = [
        {"name": name, "key": key, "spec": result.spec.to_json()} for name, key in (("new", "key"), ("b", "other"))
    ]
    write_json(tmp_path / "sweep.json", {"trials": planned})
    assert list(capture_sweep(tmp_path).missing) == ["b"]

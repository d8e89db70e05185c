"""Settings in the file of `flopwatch run --config`: each that the documentation names is used, or refused aloud."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from flopwatch.monitor.config import read_config
from support.warm_python import start_warm

COMMAND = "from flopwatch.cli import main; main()"
SETTINGS_PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"
OTHER_THAN_DEFAULT = {
    "mode": "profiler",
    "count": "every",
    "attention": "causal",
    "log_every": 2,
    "log_seconds": 77.0,
    "detailed_log_every": 3,
    "reduced_logging": True,
    "language": "en",
    "local_log_every": 5,
    "local_log_seconds": 2.5,
    "flops_profile_freq": 4,
    "recalibration_frequency": 9,
    "initial_profiling": False,
    "calibration_enabled": False,
    "phase_frequencies": {"main": 3},
    "log_dataset_metrics": False,
    "dataset_metrics_every": 3,
    "warm_up_steps": 1,
    "peak_tflops": 0.25,
    "dtype": "bf16",
    "total_steps": 6,
    "batch_size": 2,
    "seq_length": 8,
    "logging_rank": -1,
    "data_parallel_size": 1,
    "sinks": ["tensorboard"],
    "sink_options": {"tensorboard": {"log_dir": "events"}},
    "log_what_ran": False,
    "strict": True,
    "counters": False,
    "hardware_counters_enabled": False,
    "fallback_to_profiler": False,
}
STEPS, SAMPLES, POSITIONS, WIDTH = 6, 2, 8, 4
SCRIPT = f"""
import torch
layer = torch.nn.Linear({WIDTH}, 3 * {WIDTH})
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range({STEPS}):
    q, k, v = layer(torch.randn({SAMPLES}, {POSITIONS}, {WIDTH})).chunk(3, -1)
    attended = torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
    attended.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def run_with(tmp_path):
    """A function that runs the script with these lines in the file; it returns the log's records and stderr."""

    def run(settings, *options):
        (tmp_path / "train.py").write_text(SCRIPT)
        (tmp_path / "settings.yaml").write_text(settings)
        command = ("run", "--output-dir", "run", "--config", "settings.yaml", *options, "train.py")
        process = start_warm(COMMAND, *command, cwd=tmp_path, env=dict(os.environ))
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
        log = (tmp_path / "run/training_log.jsonl").read_text()
        return [json.loads(line) for line in log.splitlines()], stderr

    return run


@pytest.mark.slow
def test_every_setting_that_the_page_names_reaches_the_monitor(run_with, tmp_path):
    named = re.findall(r"^\| `([a-z_]+)` \|", SETTINGS_PAGE.read_text().partition("<!-- end of settings")[0], re.M)
    assert sorted(named) == sorted([*OTHER_THAN_DEFAULT, "quiet"])
    records, stderr = run_with(yaml.safe_dump({"flopwatch": OTHER_THAN_DEFAULT}))
    assert records[0]["config"] == {**OTHER_THAN_DEFAULT, "quiet": False}
    assert "not used" not in stderr
    assert list((tmp_path / "events").iterdir())
    assert "MFU" in stderr  # the lines are printed besides


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "flags"), [("", ["--quiet"]), ("quiet: true", [])])
def test_the_console_sink_of_the_file_prints_nothing_to_the_scripts_stdout(tmp_path, settings, flags):
    (tmp_path / "train.py").write_text(SCRIPT + 'print("loss 1")')
    (tmp_path / "settings.yaml").write_text(f"sinks: [console]\n{settings}")
    command = ("run", "--output-dir", "run", *flags, "--config", "settings.yaml", "train.py")
    out, err = start_warm(COMMAND, *command, cwd=tmp_path).communicate()
    assert out == "loss 1\n"
    assert ("The run ended" in err) is not bool(flags)


@pytest.mark.slow
def test_attention_of_the_file_counts_from_the_first_step_on(run_with):
    records, _ = run_with("flopwatch: {attention: causal, log_every: 1, peak_tflops: 1}")
    linear = 2 * (2 * SAMPLES * POSITIONS * WIDTH * 3 * WIDTH)  # forward and the weight's gradient
    pairs = SAMPLES * POSITIONS * (POSITIONS + 1) // 2
    attention = 3 * 2 * (2 * pairs * WIDTH)  # forward and twice as much backward, of two products
    assert records[-1]["values"]["total/model_flops"] == STEPS * (linear + attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("flopwatch: {log_evry: 2}", "flopwatch.log_evry: not a known key; did you mean 'log_every'?"),
        ("log_every: 2\nsinkz: [tensorboard]", "sinkz: not a known key; did you mean 'sinks'?"),
        ("flopwatch: {log_every: often}", "log_every='often'"),
        ("flopwatch: {sinks: [tensorbord]}", "did you mean 'tensorboard'?"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_and_the_training_goes_on(run_with, settings, message):
    _, stderr = run_with(settings)
    assert message in " ".join(stderr.split())


@pytest.mark.slow
def test_without_a_log_no_command_is_advised_that_would_read_it(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ends = {}
    for folder in ("/proc/nope", str(tmp_path / "run")):
        process = start_warm(COMMAND, "run", "--output-dir", folder, "train.py", cwd=tmp_path, env=dict(os.environ))
        _, ends[folder] = process.communicate()
        assert process.returncode == 0
    unwritable, written = ends.values()
    assert "the run's log cannot be written" in unwritable
    assert "Next:" not in unwritable
    assert f"Next: flopwatch why {tmp_path}/run" in written


def test_a_misspelt_key_does_not_hide_a_wrong_value_beside_it():
    first, second = read_config({"mode": "smrt", "log_evry": 5})[1]

    assert first == "log_evry: not a known key; did you mean 'log_every'?"
    assert second.startswith("mode='smrt': input should be 'smart'")


def test_a_misspelt_key_in_the_configuration_of_a_training_is_said_with_where_to_put_settings():
    [problem] = read_config({"log_every": 5, "mod": "smart", "learning_rate": 0.1})[1]

    assert "did you mean 'mode'?" in problem
    assert "put the settings below `flopwatch:`" in problem

"""What makes a trial the same trial: its configuration, the user's own code, and the machine it runs on."""

import json
from statistics import median

import pytest

from flopwatch.records.run import Summary
from flopwatch.records.trial import TrialSpec
from flopwatch.runs import read_log
from flopwatch.runs.reading import steady_steps
from flopwatch.sweep.host.environment import _source_digest, fingerprint
from flopwatch.sweep.host.memory import HostPeak
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.spec.parsing import parse_overrides
from flopwatch.sweep.supervisor.build_result import collect_measurements
from support.make_run_log import Accounts, Story, session, write_log


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _source_digest.cache_clear()
    yield tmp_path
    _source_digest.cache_clear()


def changes(spec, file, is_here=True):
    before = fingerprint(spec, is_here=is_here)
    file.write_text(file.read_text() + "# edited\n")
    _source_digest.cache_clear()
    return fingerprint(spec, is_here=is_here) != before


@pytest.mark.parametrize(
    ("spec", "file"),
    [
        (TrialSpec("mine:Own", "tiny", 4, 8), "mine.py"),
        (TrialSpec("package.trainer:Own", "tiny", 4, 8), "src/package/trainer.py"),
        (TrialSpec("package:Own", "tiny", 4, 8), "package/inner/part.py"),
        (TrialSpec("standard", "models.llama:build", 4, 8), "models/llama.py"),
        (TrialSpec("command", "tiny", 4, 8, command="python train.py --bs {batch_size}"), "train.py"),
    ],
)
def test_an_edited_source_is_another_trial(here, spec, file):
    (here / file).parent.mkdir(parents=True, exist_ok=True)
    (here / file).write_text("x = 1\n")
    if spec.trainer == "package:Own":
        (here / "package" / "__init__.py").write_text("")
    assert changes(spec, here / file)


def test_on_a_cluster_this_hosts_devices_are_not_part_of_it():
    spec = TrialSpec("standard", "tiny", 4, 8)
    assert {"cpu"} <= set(fingerprint(spec)) - set(fingerprint(spec, is_here=False))
    assert "torch" in fingerprint(spec, is_here=False)


def test_settings_on_the_command_line_change_only_what_they_name(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("memory: 4GiB\ntimeout: 60\noptions: {noise_multiplier: 0.5}\n")
    (spec, *_) = expand(read_matrix(file, parse_overrides(["options.lr=1e-3"]) | {"timeout": "100s"}))
    assert (spec.limits.memory_bytes, spec.limits.wall_seconds) == (4 * 2**30, 100)
    assert spec.options == {"noise_multiplier": 0.5, "lr": 0.001}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[1.2]", "it must hold a JSON object"),
        ('{"step_seconds": [null]}', "step_seconds = [None] is not a list of numbers above 0"),
        ('{"step_seconds": "fast"}', "step_seconds = 'fast' is not a list of numbers above 0"),
        ('{"mfu": NaN}', "mfu = nan is not a finite number"),
        ('{"samples_per_s": "3", "loss": -Infinity}', "samples_per_s = '3' is not a finite number"),
        ('{"outcome": "oom"}', "outcome = 'oom' is not oom_device or oom_host"),
        ("{", "the file is not valid JSON"),
    ],
)
def test_a_command_that_tells_nonsense_has_told_nothing_and_the_record_says_why(tmp_path, content, why):
    (tmp_path / "metrics.json").write_text(content)
    measured = collect_measurements(tmp_path, TrialSpec("command", "none", 4, 8, command="true"), HostPeak()).measured
    assert (measured.steps, measured.samples_per_s, measured.cost) == (None, None, None)
    assert why in measured.not_measured["reported numbers"]


@pytest.mark.parametrize("content", [None, "{}", '{"samples_per_s": 3, "optimizer": "adam", "done": true}'])
def test_what_a_command_may_tell_or_keep_to_itself_is_no_trouble(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.json").write_text(content)
    measured = collect_measurements(tmp_path, TrialSpec("command", "none", 4, 8, command="true"), HostPeak()).measured
    assert measured.not_measured == {}


def test_a_command_that_tells_its_step_times_has_a_throughput_and_its_first_step_is_the_first(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps({"step_seconds": [5.0, 1.0, 2.0]}))
    measured = collect_measurements(tmp_path, TrialSpec("command", "none", 4, 8, command="true"), HostPeak()).measured
    assert measured.steps.first == 5.0
    assert measured.samples_per_s == 2.0


def test_a_command_whose_monitor_logs_its_steps_has_their_times(tmp_path):
    records = list(session(Story(), 1, 40, Accounts()))
    write_log(tmp_path / "training_log.jsonl", [*records, Summary(40, 5.0, {"perf/samples_per_second": 7.0})])
    measured = collect_measurements(tmp_path, TrialSpec("command", "none", 4, 8, command="true"), HostPeak()).measured
    steady = [step.seconds for step in steady_steps(read_log(tmp_path / "training_log.jsonl"))]
    assert measured.steps.count == len(steady) > 10
    assert measured.steps.median == pytest.approx(median(steady))
    assert measured.samples_per_s == 7.0

"""Trials of a sweep as runs of W&B and MLflow: once each, however often they are logged."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from flopwatch.cli.trials.tracking import MOST_FAILURES, MlflowTrials, log_trials, trial_run
from support.few_results import ended, ran
from support.hostile_sweep import hostile_results
from support.sinks.fresh_python import fresh_environment
from support.sinks.servers import get_json, post_json
from support.sinks.small_sweep import sweep, wandb_files
from support.sinks.wandb_file import read_config, read_exit_code, read_kind, read_summary
from testbeds.made_up_sweep import example_specs, make_result, write_sweep

GOOD = make_result(example_specs()[0], with_accidents=False)


class FailingLog:
    def __init__(self, failing):
        self.failing, self.tried = failing, []

    def log(self, run):
        self.tried.append(run.name)
        if run.name in self.failing:
            raise ConnectionError("away")


def runs_named(*names):
    return [trial_run(replace(GOOD, name=name), "s", 1.0) for name in names]


def test_a_trial_has_the_same_id_wherever_its_folder_is_and_another_one_in_another_sweep():
    run = trial_run(GOOD, "here", 1763000000.0)
    assert run.id == trial_run(replace(GOOD, outcome="error"), "moved", 1763000000.0).id
    assert run.id != trial_run(GOOD, "here", 1763000001.0).id
    assert run.id != trial_run(replace(GOOD, key="other"), "here", 1763000000.0).id


def test_config_is_what_was_asked_for_and_figures_are_what_was_measured():
    run = trial_run(GOOD, "s", 1.0)
    assert run.config == json.loads(json.dumps(GOOD.spec.to_json()))
    assert run.figures["step_seconds_median"] == GOOD.measured.steps.median
    assert run.figures["peak_bytes"] == GOOD.measured.memory.reserved_bytes
    assert (run.facts["outcome"], run.facts["torch"], run.state) == ("ok", "2.13.0", "finished")
    assert not run.figures.keys() & {"batch_size", "seed"}
    assert run.end_unix_seconds == GOOD.unix_time + GOOD.seconds


@pytest.mark.parametrize(
    ("outcome", "state"), [("oom_device", "finished"), ("error", "failed"), ("cancelled", "killed")]
)
def test_out_of_memory_is_a_result_and_an_error_is_a_failure(outcome, state):
    assert trial_run(ended("standard", 4, 64, outcome), "s", 1.0).state == state


def test_one_trial_that_cannot_be_logged_does_not_keep_the_others_from_it():
    log = FailingLog({"b"})
    logged = log_trials(runs_named("a", "b", "c"), log.log)
    assert (logged.count, logged.failures, logged.gave_up) == (2, ("b: away",), False)


def test_a_service_that_is_away_is_given_up_after_a_few():
    log = FailingLog(set("abcdefg"))
    logged = log_trials(runs_named(*"abcdefg"), log.log)
    assert (logged.count, len(log.tried), logged.gave_up) == (0, MOST_FAILURES, True)


# MLflow, on a real server.


@pytest.fixture
def mlflow_trials(mlflow_address, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    return lambda experiment: MlflowTrials(experiment, tmp_path)


def runs_of(address, experiment):
    found = get_json(f"{address}/api/2.0/mlflow/experiments/get-by-name", experiment_name=experiment)["experiment"]
    return post_json(f"{address}/api/2.0/mlflow/runs/search", experiment_ids=[found["experiment_id"]]).get("runs", [])


def by_key(entries):
    return {entry["key"]: entry["value"] for entry in entries}


@pytest.mark.slow
def test_mlflow_has_one_run_per_trial_however_often_they_are_logged(mlflow_trials, mlflow_address):
    results = [GOOD, *(make_result(spec, with_accidents=False) for spec in example_specs()[1:4])]
    for _ in range(2):
        planned = (trial_run(result, "a-sweep", 5.0) for result in results)
        assert log_trials(planned, mlflow_trials("twice").log).failures == ()
    runs = runs_of(mlflow_address, "twice")
    assert sorted(run["info"]["run_name"] for run in runs) == sorted(result.name for result in results)
    (run,) = [run for run in runs if run["info"]["run_name"] == GOOD.name]
    params, metrics, tags = (by_key(run["data"][part]) for part in ("params", "metrics", "tags"))
    assert (params["trainer"], params["batch_size"], params["limits.wall_seconds"]) == ("standard", "4", "3600.0")
    assert metrics["step_seconds_median"] == GOOD.measured.steps.median
    assert metrics["peak_bytes"] == GOOD.measured.memory.reserved_bytes
    assert (tags["flopwatch.outcome"], tags["flopwatch.sweep"]) == ("ok", "a-sweep")
    assert (run["info"]["status"], run["info"]["start_time"]) == ("FINISHED", 1_763_000_000_000)
    history = get_json(
        f"{mlflow_address}/api/2.0/mlflow/metrics/get-history", run_id=run["info"]["run_id"], metric_key="mfu"
    )
    assert len(history["metrics"]) == 1


@pytest.mark.slow
def test_a_trial_that_was_run_again_updates_its_run_in_mlflow(mlflow_trials, mlflow_address):
    lost = replace(GOOD, outcome="lost", reason="node failure", measured=replace(GOOD.measured, steps=None))
    log_trials([trial_run(lost, "s", 6.0)], mlflow_trials("again").log)
    (before,) = runs_of(mlflow_address, "again")
    assert before["info"]["status"] == "FAILED"
    log_trials([trial_run(replace(GOOD, unix_time=GOOD.unix_time + 60), "s", 6.0)], mlflow_trials("again").log)
    (after,) = runs_of(mlflow_address, "again")
    assert (after["info"]["run_id"], after["info"]["status"]) == (before["info"]["run_id"], "FINISHED")
    assert by_key(after["data"]["metrics"])["step_seconds_median"] == GOOD.measured.steps.median
    assert by_key(after["data"]["tags"])["flopwatch.outcome"] == "ok"


@pytest.mark.slow
def test_hostile_names_options_and_texts_reach_mlflow_as_text(mlflow_trials, mlflow_address):
    many = {f"option {place}": place for place in range(150)} | {
        "a[0]": 1,
        "a(0)": 2,
        "": 3,
        "/": 4,
        "x" * 400: "y" * 9000,
    }
    results = [*hostile_results(), ended("standard", 4, 64, "error", options=many, reason="r" * 9000, name="many")]
    results = [replace(result, key=str(place)) for place, result in enumerate(results)]
    logged = log_trials((trial_run(result, "<b>'s\n\ud83d", None) for result in results), mlflow_trials("hostile").log)
    assert (logged.failures, logged.count) == ((), len(results))
    (run,) = [run for run in runs_of(mlflow_address, "hostile") if run["info"]["run_name"] == "many"]
    params = by_key(run["data"]["params"])
    assert {"1", "2"} <= {value for key, value in params.items() if key.startswith("options.a_0_")}
    assert params["options.option 149"] == "149"


def test_a_server_that_is_away_is_told_with_what_to_check(monkeypatch, tmp_path):
    from flopwatch.errors import FlopwatchError

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(FlopwatchError, match="MLFLOW_TRACKING_URI"):
        MlflowTrials("x", tmp_path)


# W&B, offline: what lies in its files is what it would upload.


def log_to_wandb(folder, project="proj"):
    """In a fresh interpreter: W&B leaves traces in its process."""
    command = [sys.executable, "-m", "flopwatch", "report", str(folder), "--wandb", project]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=fresh_environment())


@pytest.mark.slow
def test_wandb_gets_config_summary_tags_and_group_under_the_same_ids_each_time(tmp_path):
    failed = ended("standard", 8, 64, "error", reason="boom", name="failed")
    folder = write_sweep(tmp_path / "my sweep", [GOOD, replace(failed, key="failed")])
    for _ in range(2):
        done = log_to_wandb(folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "W&B: logged 2 trials\n", "")
    ids = [file.stem.removeprefix("run-") for file in wandb_files(folder)]
    expected = trial_run(GOOD, "my sweep", 1_763_000_000.0).id
    assert sorted(ids) == sorted(2 * [expected, trial_run(replace(failed, key="failed"), "", 1_763_000_000.0).id])
    file = next(file for file in wandb_files(folder) if expected in file.name)
    run = read_kind(file, "run")[0].run
    assert (run.project, run.run_group, run.display_name, list(run.tags)) == (
        "proj",
        "my sweep",
        GOOD.name,
        ["ok", "my sweep"],
    )
    config, summary = read_config(file), read_summary(file)
    assert (config["trainer"], config["batch_size"], config["options"]) == ("standard", 4, {})
    assert summary["step_seconds_median"] == GOOD.measured.steps.median
    assert (summary["outcome"], summary["host"], summary["epsilon"]) == ("ok", "node-a", None)
    assert read_exit_code(file) == 0
    other = next(file for file in wandb_files(folder) if expected not in file.name)
    assert (read_exit_code(other), read_summary(other)["reason"]) == (1, "boom")


@pytest.mark.slow
def test_hostile_trials_reach_wandb(tmp_path):
    results = [
        replace(
            result,
            name=f"{place}<b>|[x]",
            key=str(place),
            spec=replace(result.spec, options={"[/x]": "\ud83d", "": float("nan")}),
        )
        for place, result in enumerate(hostile_results())
    ]
    done = log_to_wandb(write_sweep(tmp_path / "[bold]", results))
    assert (done.returncode, done.stdout) == (0, f"W&B: logged {len(results)} trials\n"), done.stderr


@pytest.mark.slow
def test_without_an_account_wandb_is_refused_with_what_to_do(tmp_path):
    folder = write_sweep(tmp_path / "s", [ran("standard", 4, 64)])
    environment = fresh_environment(WANDB_MODE="online", HOME=str(tmp_path), NETRC=str(tmp_path / "none"))
    environment.pop("WANDB_API_KEY", None)
    command = [sys.executable, "-m", "flopwatch", "report", str(folder), "--wandb", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert "wandb login" in done.stderr
    assert not (folder / "wandb").exists()


# Both, while a sweep runs.


@pytest.mark.slow
def test_trials_are_in_wandb_and_mlflow_when_the_sweep_ends(tmp_path, mlflow_address):
    folder = tmp_path / "s"
    done = sweep(folder, "--wandb", "proj", "--mlflow", "live", MLFLOW_TRACKING_URI=mlflow_address)
    assert done.returncode == 1  # one trial failed, as it should
    assert "W&B: logged 3 trials; MLflow: logged 3 trials" in done.stdout
    assert sorted(read_summary(file)["outcome"] for file in wandb_files(folder)) == ["error", "ok", "ok"]
    runs = {run["info"]["run_name"]: run for run in runs_of(mlflow_address, "live")}
    assert by_key(runs["Command_bs2_seq8"]["data"]["metrics"])["samples_per_s"] == 2
    again = [sys.executable, "-m", "flopwatch", "report", str(folder), "--mlflow", "live"]
    subprocess.run(again, check=True, capture_output=True, env=fresh_environment(MLFLOW_TRACKING_URI=mlflow_address))
    assert len(runs_of(mlflow_address, "live")) == 3

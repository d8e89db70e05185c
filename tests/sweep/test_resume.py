"""What a second run of a sweep does, and what it refuses. Trials cost nothing: an engine in this process answers."""

from dataclasses import replace

import pytest

from flopwatch.errors import InputError
from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.host import environment
from flopwatch.sweep.runner.plan import make_plan
from flopwatch.testing import InProcessEngine
from support.sweeping import run_sweep

pytestmark = pytest.mark.requirement("R27")

SPECS = [TrialSpec("standard", "tiny", batch, 64) for batch in (1, 2, 4, 8)]


def answering(**outcomes):
    """An engine that gives the outcome by batch size, `ok` where none is named."""

    def run(trial):
        outcome = outcomes.get(f"bs{trial.spec.batch_size}", "ok")
        ended = {"phase": "measure", "step": 1, "seconds": 1.0}
        return None if outcome is None else TrialResult(trial.name, trial.key, trial.spec, outcome, **ended)

    return InProcessEngine(run)


def batches(engine):
    return [int(name.split("_bs")[1].split("_")[0]) for name in engine.submitted]


def test_a_finished_sweep_runs_nothing_again(tmp_path):
    run_sweep(tmp_path / "s", SPECS, answering())
    again = answering()
    assert len(run_sweep(tmp_path / "s", SPECS, again)) == 4
    assert again.submitted == []


def test_a_larger_matrix_runs_what_is_new(tmp_path):
    run_sweep(tmp_path / "s", SPECS[:2], answering())
    again = answering()
    results = run_sweep(tmp_path / "s", SPECS, again)
    assert sorted(batches(again)) == [4, 8]
    assert len(results) == 4


def test_failures_stand_until_they_are_asked_for(tmp_path):
    run_sweep(tmp_path / "s", SPECS, answering(bs2="error", bs4="hang"))
    again = answering()
    run_sweep(tmp_path / "s", SPECS, again)
    assert again.submitted == []
    results = run_sweep(tmp_path / "s", SPECS, again, only="failed")
    assert sorted(batches(again)) == [2, 4]
    assert {result.outcome for result in results.values()} == {"ok"}


@pytest.mark.parametrize("outcome", ["cancelled", None])
def test_what_was_cancelled_or_lost_runs_again(tmp_path, outcome):
    run_sweep(tmp_path / "s", SPECS, answering(bs2=outcome))
    again = answering()
    run_sweep(tmp_path / "s", SPECS, again)
    assert batches(again) == [2]


def test_only_what_was_out_of_memory(tmp_path):
    run_sweep(tmp_path / "s", SPECS, answering(bs1="error", bs8="oom_host"))
    again = answering()
    run_sweep(tmp_path / "s", SPECS, again, only="oom")
    assert batches(again) == [8]


def test_only_what_is_missing(tmp_path):
    run_sweep(tmp_path / "s", SPECS[:3], answering(bs1="error"))
    again = answering()
    run_sweep(tmp_path / "s", SPECS, again, only="missing")
    assert batches(again) == [8]


def test_another_torch_measures_again_and_keeps_the_earlier_trial(tmp_path, monkeypatch):
    run_sweep(tmp_path / "s", SPECS, answering())
    before = environment.machine()
    monkeypatch.setattr(environment, "machine", lambda: {**before, "torch": "9.9"})
    again = answering()
    run_sweep(tmp_path / "s", SPECS, again)
    assert len(again.submitted) == 4
    assert sorted(path.name for path in (tmp_path / "s" / "earlier").iterdir())[0] == "standard_bs1_seq64.1"


def test_a_changed_model_file_measures_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.json").write_text("{}")
    specs = [TrialSpec("standard", "model.json", 1, 64)]
    run_sweep(tmp_path / "s", specs, answering())
    (tmp_path / "model.json").write_text('{"model_type": "gpt2"}')
    environment._source_digest.cache_clear()
    again = answering()
    run_sweep(tmp_path / "s", specs, again)
    assert len(again.submitted) == 1


def test_a_new_label_or_time_limit_changes_nothing(tmp_path):
    run_sweep(tmp_path / "s", SPECS, answering())
    renamed = [replace(spec, label="Mine", limits=replace(spec.limits, wall_seconds=5)) for spec in SPECS]
    again = answering()
    run_sweep(tmp_path / "s", renamed, again)
    assert again.submitted == []


def test_the_same_name_for_another_configuration_is_refused_and_nothing_is_touched(tmp_path):
    run_sweep(tmp_path / "s", SPECS, answering())
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.json*")}
    with pytest.raises(InputError, match=r"steps was 10, is 20.*--output"):
        run_sweep(tmp_path / "s", [replace(spec, steps=20) for spec in SPECS], answering())
    assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.json*")} == before


def test_a_slice_of_the_matrix(tmp_path):
    first, rest = answering(), answering()
    run_sweep(tmp_path / "s", SPECS, first, limit="1:3")
    assert sorted(batches(first)) == [2, 4]
    run_sweep(tmp_path / "s", SPECS, rest)
    assert sorted(batches(rest)) == [1, 8]


@pytest.mark.parametrize("limit", ["x", "3:1", "-2", ":", "0"])
def test_a_slice_that_is_none(tmp_path, limit):
    if limit == ":":
        assert len(make_plan(tmp_path, SPECS, limit=limit).todo) == 4
        return
    with pytest.raises(InputError, match="not a slice of the trials"):
        make_plan(tmp_path, SPECS, limit=limit)


def test_the_order_is_shuffled_and_the_same_each_time(tmp_path):
    many = [TrialSpec("standard", "tiny", batch, 64) for batch in range(1, 30)]
    once, again = ([trial.name for trial in make_plan(tmp_path, many).todo] for _ in range(2))
    assert once == again != [f"standard_bs{batch}_seq64" for batch in range(1, 30)]


def test_an_end_that_nobody_recorded_is_found(tmp_path):
    """The runner was killed after the supervisor wrote its result and before the runner noted it."""
    run_sweep(tmp_path / "s", SPECS, answering())
    results = tmp_path / "s" / "results.jsonl"
    kept = results.read_text().splitlines()[:-1]
    results.write_text("\n".join(kept) + "\n")
    again = answering()
    assert len(run_sweep(tmp_path / "s", SPECS, again)) == 4
    assert again.submitted == []


def test_an_end_between_planning_and_running_stands(tmp_path):
    """A supervisor of the killed runner, or a job in the queue, finished in the meantime."""
    run_sweep(tmp_path / "s", SPECS, answering())
    results, file = tmp_path / "s" / "results.jsonl", tmp_path / "s" / "trials" / "standard_bs2_seq64" / "result.json"
    results.write_text("".join(line + "\n" for line in results.read_text().splitlines() if "bs2_" not in line))
    late = file.read_bytes()
    file.unlink()

    class Late(InProcessEngine):
        def open(self, sweep, unfinished):
            assert [trial.name for trial in unfinished] == ["standard_bs2_seq64"]
            file.write_bytes(late)
            return ()

    engine = Late(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "error"))
    found = run_sweep(tmp_path / "s", SPECS, engine)
    assert engine.submitted == []
    assert {result.outcome for result in found.values()} == {"ok"}


def test_a_torn_last_line_is_survived(tmp_path):
    run_sweep(tmp_path / "s", SPECS, answering())
    with (tmp_path / "s" / "results.jsonl").open("a") as stream:
        stream.write('{"name": "standard_bs1')
    again = answering()
    larger = [*SPECS, TrialSpec("standard", "tiny", 16, 64)]
    run_sweep(tmp_path / "s", larger, again)
    assert batches(again) == [16]
    assert len(read_results(tmp_path / "s")) == 5

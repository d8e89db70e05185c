"""A damaged folder of a sweep: what is whole is kept, what is not is told and run again, nothing is overwritten."""

import json
import os
import shutil

import pytest

from flopwatch.errors import InputError
from flopwatch.records.sweep_results import gather_results, read_results, troubles
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.report.capture import capture_sweep
from flopwatch.report.summary import summarise
from flopwatch.sweep.runner.plan import make_plan
from flopwatch.testing import InProcessEngine
from support.sweeping import run_sweep

SPECS = [TrialSpec("standard", "tiny", batch, 64) for batch in (1, 2, 4)]
ONE, TWO, FOUR = (f"standard_bs{batch}_seq64" for batch in (1, 2, 4))


TIMES = iter(range(1, 10**6))


def answering(outcome="ok"):
    """An engine that gives every trial this outcome, at a time of its own as clocks do."""
    return InProcessEngine(
        lambda trial: TrialResult(
            trial.name, trial.key, trial.spec, outcome, seconds=1.0, unix_time=1.7e9 + next(TIMES)
        )
    )


@pytest.fixture
def sweep(tmp_path):
    run_sweep(tmp_path / "s", SPECS, answering())
    return tmp_path / "s"


def own(sweep, name):
    return sweep / "trials" / name / "result.json"


def lines(sweep):
    return [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]


def write_lines(sweep, contents):
    (sweep / "results.jsonl").write_text("".join(json.dumps(content) + "\n" for content in contents))


def resumed(sweep):
    engine = answering()
    results = run_sweep(sweep, SPECS, engine)
    return sorted(engine.submitted), results


def snapshot(folder):
    """Every file but those by which runners keep each other out."""
    files = (path for path in folder.rglob("*") if path.is_file() and "runners" not in path.parts)
    return {path: path.read_bytes() for path in files}


ODD_LINES = [b"", b"{}", b"[]", b"null", b"\0\0\0", b"\xff\xfe", b'{"name": "x"', b'{"format": "1"}', b"[" * 9999]


@pytest.mark.parametrize("line", ODD_LINES, ids=[repr(line[:12]) for line in ODD_LINES])
def test_an_odd_line_costs_nothing(sweep, line):
    file = sweep / "results.jsonl"
    file.write_bytes(line + b"\n" + file.read_bytes() + line)
    summary = summarise(capture_sweep(sweep))
    assert summary.totals.by_outcome == {"ok": 3}
    assert resumed(sweep)[0] == []


@pytest.mark.parametrize("how", ["gone", "empty", "garbage", "folder", "fifo", "loop", "unnamed"])
def test_results_stand_without_their_list(sweep, how):
    before = read_results(sweep)
    damage(sweep / "results.jsonl", how)
    summary = summarise(capture_sweep(sweep))
    assert summary.totals.by_outcome == {"ok": 3}
    assert ("results.jsonl" in " ".join(summary.warnings)) == (how not in ("gone", "empty"))
    if how in ("folder", "fifo", "loop"):
        (sweep / "results.jsonl").rename(sweep / "moved away as the message says")
    ran, after = resumed(sweep)
    assert ran == []
    assert after == before


@pytest.mark.parametrize("how", ["gone", "empty", "garbage", "folder", "fifo", "loop"])
def test_results_stand_without_their_trials_own_files(sweep, how):
    for name in (ONE, TWO, FOUR):
        damage(own(sweep, name), how)
    assert summarise(capture_sweep(sweep)).totals.by_outcome == {"ok": 3}
    assert resumed(sweep)[0] == []


def damage(file, how):
    content = file.read_bytes()
    file.unlink()
    if how == "empty":
        file.touch()
    elif how == "garbage":
        file.write_bytes(os.urandom(300).replace(b"\n", b"") + b"\n")
    elif how == "folder":
        file.mkdir()
    elif how == "fifo":
        os.mkfifo(file)
    elif how == "loop":
        file.symlink_to(file)
    elif how == "unnamed":
        file.write_bytes(content.replace(b'"name"', b'"nome"'))


def test_a_trial_damaged_in_both_places_is_told_and_runs_again_alone(sweep):
    write_lines(sweep, [{**line, "seconds": "long"} if line["name"] == TWO else line for line in lines(sweep)])
    own(sweep, TWO).write_bytes(own(sweep, TWO).read_bytes()[:-20])
    summary = summarise(capture_sweep(sweep))
    assert summary.totals.by_outcome == {"ok": 2, "missing": 1}
    assert f"1 trial is damaged and counted as missing: {TWO}" in summary.warnings[0]
    damaged = own(sweep, TWO).read_bytes()
    ran, after = resumed(sweep)
    assert ran == [TWO]
    assert len(after) == 3
    assert (sweep / "earlier" / f"{TWO}.1" / "result.json").read_bytes() == damaged


def test_a_newer_end_in_the_trials_folder_wins_over_an_older_one_in_the_list(sweep):
    """`--only failed` ran it again, and the runner died before it noted the end."""
    old = [{**line, "outcome": "error", "unix_time": 1.0} for line in lines(sweep)]
    write_lines(sweep, old)
    os.utime(sweep / "results.jsonl", (1.7e9, 1.7e9))
    assert {result.outcome for result in read_results(sweep).values()} == {"ok"}


def test_an_end_that_the_list_explains_better_stands(sweep):
    """Slurm's word for a cancellation came after the trial's own."""
    write_lines(sweep, [{**line, "outcome": "timeout"} for line in lines(sweep)])
    assert {result.outcome for result in read_results(sweep).values()} == {"timeout"}


def test_a_damaged_line_after_a_whole_one_of_the_same_trial_is_not_passed_over(sweep):
    """The older end must not come back to life."""
    old = [{**line, "outcome": "error", "unix_time": 1.0} for line in lines(sweep)]
    write_lines(sweep, [*old, *({**line, "spec": None} for line in lines(sweep))])
    assert {result.outcome for result in read_results(sweep).values()} == {"ok"}


def test_a_trials_end_that_is_anothers_is_damaged(sweep):
    shutil.copy(own(sweep, ONE), own(sweep, TWO))
    (sweep / "results.jsonl").unlink()
    found = gather_results(sweep)
    assert sorted(found.results) == [ONE, FOUR]
    assert ONE in found.damaged[TWO]


@pytest.mark.parametrize("file", ["results.jsonl", "result.json"])
def test_a_trial_of_a_newer_format_is_told_and_left_alone(sweep, file):
    if file == "results.jsonl":
        write_lines(sweep, [{**line, "format": 2} if line["name"] == TWO else line for line in lines(sweep)])
        own(sweep, TWO).unlink()
    else:
        write_lines(sweep, [line for line in lines(sweep) if line["name"] != TWO])
        own(sweep, TWO).write_text(json.dumps({**json.loads(own(sweep, TWO).read_text()), "format": 2}))
    before = snapshot(sweep / "trials")
    summary = summarise(capture_sweep(sweep))
    assert summary.totals.by_outcome == {"ok": 2}
    assert f"1 trial was written by a newer flopwatch (format 2) and left alone: {TWO}" in summary.warnings[0]
    plan = make_plan(sweep, SPECS)
    assert plan.newer == {TWO}
    assert resumed(sweep)[0] == []
    assert snapshot(sweep / "trials") == before


def test_a_plan_of_a_newer_format_is_not_overwritten(sweep):
    plan = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps({**plan, "format": 2}))
    before = snapshot(sweep)
    assert "newer flopwatch (format 2)" in summarise(capture_sweep(sweep)).warnings[0]
    with pytest.raises(InputError, match=r"newer flopwatch.*--output"):
        run_sweep(sweep, SPECS, answering())
    assert snapshot(sweep) == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"trials": 3}', '{"trials": [1, {"name": 2}, null]}', "\0" * 100])
def test_a_damaged_plan_is_told_and_kept_aside(sweep, content):
    (sweep / "sweep.json").write_text(content)
    assert any("sweep.json is damaged" in warning for warning in summarise(capture_sweep(sweep)).warnings)
    assert resumed(sweep)[0] == []
    assert (sweep / "earlier" / "sweep.json.1").read_text() == content
    assert troubles(gather_results(sweep)) == ()


def test_one_damaged_entry_of_the_plan_hides_no_other(sweep):
    plan = json.loads((sweep / "sweep.json").read_text())
    plan["trials"][0]["spec"]["batch_size"] = "one"
    plan["trials"].append({"name": "gone", "key": "k", "spec": {"trainer": 3}})
    (sweep / "sweep.json").write_text(json.dumps(plan))
    summary = summarise(capture_sweep(sweep))
    assert summary.totals.by_outcome == {"ok": 3}
    assert any("gone" in warning for warning in summary.warnings)
    assert resumed(sweep)[0] == []


@pytest.mark.parametrize("name", ["trials", "logs", "runs", "runners", "results.jsonl"])
@pytest.mark.parametrize("how", ["wrong type", "fifo", "loop"])
def test_anything_in_the_place_of_anything_is_named_and_nothing_is_run(sweep, name, how):
    place = sweep / name
    make = place.mkdir if place.is_file() else place.touch
    place.rename(sweep / "was")
    {"wrong type": make, "fifo": lambda: os.mkfifo(place), "loop": lambda: place.symlink_to(place)}[how]()
    with pytest.raises(InputError, match=f"cannot write to {place}: .* move it away, or choose another folder"):
        resumed(sweep)


@pytest.mark.parametrize("how", ["file", "fifo", "loop", "spec folder"])
def test_anything_in_the_place_of_a_trial_is_moved_aside(sweep, how):
    write_lines(sweep, [line for line in lines(sweep) if line["name"] != TWO])
    folder = sweep / "trials" / TWO
    shutil.rmtree(folder)
    {
        "file": folder.touch,
        "fifo": lambda: os.mkfifo(folder),
        "loop": lambda: folder.symlink_to(folder),
        "spec folder": lambda: (folder / "spec.json").mkdir(parents=True),
    }[how]()
    ran, after = resumed(sweep)
    assert ran == [TWO]
    assert len(after) == 3


def test_a_trial_whose_log_is_a_folder_is_not_started_and_says_so(sweep):
    write_lines(sweep, [line for line in lines(sweep) if line["name"] != TWO])
    shutil.rmtree(sweep / "trials" / TWO)
    (sweep / "logs" / f"{TWO}.log").mkdir()
    _, after = resumed(sweep)
    assert after[TWO].outcome == "lost"
    assert "something else has this name" in after[TWO].reason


def test_a_dry_run_and_a_report_write_nothing(sweep):
    (sweep / "results.jsonl").unlink()
    before = snapshot(sweep)
    assert len(make_plan(sweep, SPECS).kept) == 3
    assert summarise(capture_sweep(sweep)).totals.by_outcome == {"ok": 3}
    assert snapshot(sweep) == before


def test_a_sweep_that_lost_its_lists_is_still_one(sweep):
    for name in ("sweep.json", "results.jsonl"):
        (sweep / name).unlink()
    shutil.rmtree(sweep / "runners")
    assert len(capture_sweep(sweep).results) == 3
    assert resumed(sweep)[0] == []


def test_a_sweep_whose_every_file_is_unreadable_has_nothing_to_show_and_says_so(sweep):
    for file in [*sweep.rglob("*.json"), sweep / "results.jsonl"]:
        file.write_bytes(b"\xff" * 50)
    summary = summarise(capture_sweep(sweep))
    assert summary.totals.trials == 0
    assert len(summary.warnings) == 3

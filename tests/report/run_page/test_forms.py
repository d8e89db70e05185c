"""`flopwatch report` of a run: page, Markdown, JSON and a short form; of a sweep it still reports the sweep."""

import json

import pytest

from flopwatch.cli import main
from flopwatch.runs import read_log
from support.hand_made_run import records, write_run
from testbeds.made_up_sweep import example_specs, make_result, write_sweep


@pytest.fixture
def flopwatch(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        return ended.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run").parent


def test_every_form_is_written_in_one_call(flopwatch, run, tmp_path):
    page, text, data, rows = (tmp_path / name for name in ("page.html", "run.md", "run.json", "rows.csv"))
    status, out, _ = flopwatch("report", run, "--html", page, "--md", text, "--output", data, "--csv", rows)
    assert status == 0
    assert out.split("\n")[:4] == [f"Written: {path}" for path in (rows, page, text, data)]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert text.read_text().startswith("## Run by-hand\n")
    assert json.loads(data.read_text())["steps"] == 7
    assert rows.read_text().startswith("step,unix_time,exact,")


def test_the_log_file_may_be_named_instead_of_the_folder(flopwatch, run):
    assert flopwatch("report", run / "training_log.jsonl", "--json")[0] == 0


def test_json_has_every_number_unrounded(flopwatch, run):
    status, out, _ = flopwatch("report", run, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["means"]["perf/mfu_percent"] == pytest.approx(440 / 14)
    assert [curve["key"] for curve in found["curves"]][:2] == ["perf/mfu_percent", "perf/hfu_percent"]
    assert found["curves"][0]["points"][0]["unix_time"] == 1006.0
    assert found["goodput"]["lost_seconds"]["eval"] == 5.0
    assert found["provenances"][0]["peak"]["source"] == "counted beads"
    assert [notice["code"] for notice in found["notices"]] == ["slow"]
    assert found["state"] == "ended"


def test_a_loss_that_is_nan_is_still_valid_json(flopwatch, tmp_path):
    lines = records()
    lines[-2]["values"]["training/loss"] = "nan"
    out = flopwatch("report", write_run(tmp_path, lines).parent, "--json")[1]
    assert json.loads(out)["values"]["training/loss"]["value"] is None


def test_markdown_has_the_same_numbers(flopwatch, run, tmp_path):
    flopwatch("report", run, "--md", tmp_path / "run.md")
    text = (tmp_path / "run.md").read_text()
    for words in (
        "**31.4 %**",
        "| evaluation | 5.0 s | 12.2 % |",
        "| training/loss | 1.000 | 4.571 | 9.000 | 2.000 | 7 |",
        "counted beads",
    ):
        assert words in text, words
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables
    assert all(line.endswith("|") for line in tables)


def test_the_short_form_is_printed(flopwatch, run):
    status, out, _ = flopwatch("report", run)
    assert status == 0
    for words in ("Run by-hand", "7 of 8 planned steps", "31.4 %", "34.1 %", "! slow: Step 2"):
        assert words in out, words


def test_tables_of_sweeps_are_refused_for_a_run(flopwatch, run):
    status, out, err = flopwatch("report", run, "--metric", "memory")
    assert (status, out) == (2, "")
    assert "--metric chooses tables of a sweep" in err.replace("\n", " ")


def test_a_sweep_still_has_the_report_of_a_sweep(flopwatch, tmp_path):
    folder = write_sweep(tmp_path / "sweep", [make_result(spec) for spec in example_specs()[:4]])
    flopwatch("report", folder, "--html", tmp_path / "page.html")
    assert "<title>Sweep " in (tmp_path / "page.html").read_text()
    assert "Trainers" in flopwatch("report", folder)[1]


def test_of_a_folder_above_runs_the_newest_is_reported_and_named(flopwatch, run):
    status, _, err = flopwatch("report", run.parent)
    assert status == 0
    assert run.name in err


def test_a_log_shows_itself_in_a_notebook(run):
    shown = read_log(run / "training_log.jsonl")._repr_html_()
    assert shown.startswith("<table><caption")
    assert "Run runs/by-hand" in shown
    assert "7 steps; ended" in shown
    assert "50.0 %" in shown

"""`flopwatch report`: from a folder to text, page, Markdown and JSON; wrong folders say what to do."""

import json
import subprocess
import sys

import pytest

from testbeds.made_up_sweep import example_specs, make_result, write_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The 240 made-up trials, two of which have no result yet."""
    specs = example_specs()
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "a sweep", [make_result(spec) for spec in specs[:-2]], specs)


@pytest.mark.slow
@pytest.mark.requirement("R26")
def test_the_report_tells_totals_success_mean_memory_and_failures(flopwatch, sweep):
    status, out, err = flopwatch("report", str(sweep))
    assert (status, err) == (0, "")
    results = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    ok = sum(result["outcome"] == "ok" for result in results)
    assert f"240 trials: {ok} ok" in out
    assert "2 missing" in out
    tried = [
        r for r in results if r["spec"]["trainer"] == "ghost" and r["outcome"] not in ("unsupported", "oom_inferred")
    ]
    ran = [r for r in tried if r["outcome"] == "ok"]
    mean = sum(r["measured"]["memory"]["reserved_bytes"] for r in ran) / len(ran) / 2**30
    (row,) = [line.split() for line in out.splitlines() if line.split()[:2] == ["ghost", "DP"]]
    assert row[2] == f"{len(ran)}/{len(tried)}"
    assert row[3] == f"{100 * len(ran) / len(tried):.1f}"
    assert f"{mean:.2f} GiB" in " ".join(row)
    assert "RuntimeError: expected a tensor of N samples" in out
    assert "Traceback (most recent call last):" in out


@pytest.mark.requirement("R26")
def test_the_logs_folder_names_the_sweep_as_well(flopwatch, sweep):
    by_folder = flopwatch("report", str(sweep), "--json")
    by_logs = flopwatch("report", "--logs-dir", str(sweep / "logs"), "--json")
    assert by_logs[0] == 0
    assert json.loads(by_logs[1])["totals"] == json.loads(by_folder[1])["totals"]


@pytest.mark.requirement("R26")
def test_output_writes_the_json_that_json_prints(flopwatch, sweep, tmp_path):
    file = tmp_path / "results.json"
    status, out, _ = flopwatch("report", str(sweep), "--output", str(file))
    assert (status, out) == (0, f"Written: {file}\n")
    printed = flopwatch("report", str(sweep), "--json")[1]
    assert json.loads(file.read_text()) == json.loads(printed)


def test_page_and_markdown_are_written_together(flopwatch, sweep, tmp_path):
    page, text = tmp_path / "report.html", tmp_path / "report.md"
    status, out, err = flopwatch("report", str(sweep), "--html", str(page), "--md", str(text))
    assert (status, err) == (0, "")
    assert out.splitlines() == [f"Written: {page}", f"Written: {text}"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert text.read_text().startswith("## Sweep a sweep")


def test_json_on_stdout_stays_json_when_files_are_written_too(flopwatch, sweep, tmp_path):
    _, out, err = flopwatch("report", str(sweep), "--json", "--md", str(tmp_path / "a.md"))
    json.loads(out)
    assert err.startswith("Written: ")


def test_lines_fit_the_terminal(flopwatch, sweep):
    out = flopwatch("report", str(sweep))[1]
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_metric_may_be_chosen(flopwatch, sweep):
    status, out, _ = flopwatch("report", str(sweep), "--metric", "hfu,time")
    assert status == 0
    assert "HFU" in out
    assert "Peak memory" not in out


def test_a_torn_last_line_is_left_out_and_its_trial_is_missing(flopwatch, tmp_path):
    specs = example_specs()[:4]
    folder = write_sweep(tmp_path, [make_result(spec, with_accidents=False) for spec in specs])
    file = folder / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-200])
    status, out, _ = flopwatch("report", str(folder), "--json")
    assert status == 0
    assert json.loads(out)["totals"]["by_outcome"] == {"ok": 3, "missing": 1}


def test_the_newest_end_of_a_trial_that_was_run_again_counts(flopwatch, tmp_path):
    spec = example_specs()[0]
    result = make_result(spec, with_accidents=False)
    write_sweep(tmp_path, [result])
    earlier = {**result.to_json(), "outcome": "error"}
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(earlier) + "\n" + file.read_text())
    assert json.loads(flopwatch("report", str(tmp_path), "--json")[1])["totals"]["by_outcome"] == {"ok": 1}


@pytest.mark.parametrize("extra", [{}, {"engine": 3, "created": "x", "trials": "none"}, {"trials": [3, {"name": 1}]}])
def test_an_empty_sweep_is_told_whatever_its_plan_lacks(flopwatch, tmp_path, extra):
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, **extra}))
    status, out, _ = flopwatch("report", str(tmp_path))
    assert status == 0
    assert "No trials" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["."], "is not the folder of a sweep"),
        (["no/such/folder"], "is not a folder"),
        ([], "no run was named"),
        (["a", "--logs-dir", "b"], "name one folder"),
        (["--logs-dir", "."], "is not the folder of a sweep"),
    ],
)
def test_a_folder_that_is_no_sweep_ends_with_what_to_do(flopwatch, tmp_path, monkeypatch, arguments, words):
    inner = tmp_path / "logs"
    inner.mkdir()
    monkeypatch.chdir(inner)
    status, out, err = flopwatch("report", *arguments)
    assert status == 2
    assert words in err
    assert any(what_to_do in err for what_to_do in ("flopwatch sweep", "flopwatch report DIR", "name a folder"))
    assert out == ""


def test_a_trial_of_a_newer_version_is_told_and_left_alone(flopwatch, tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps({"format": 99, "name": "x"}) + "\n")
    _, out, err = flopwatch("report", str(tmp_path))
    assert "1 trial was written by a newer flopwatch" in " ".join((out + err).split())
    assert "Traceback" not in out + err


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_field_of_a_later_version_is_ignored_and_a_bare_format_is_damage(flopwatch, tmp_path, arguments):
    whole = make_result(example_specs()[0]).to_json()
    one_field_more = whole | {"brand_new": 1, "spec": whole["spec"] | {"brand_new": 2}}
    lines = "".join(json.dumps(result) + "\n" for result in (one_field_more, {"format": 1}))
    (write_sweep(tmp_path / "a", []) / "results.jsonl").write_text(lines)
    status, out, err = flopwatch("report", str(tmp_path / "a"), *arguments)
    assert (status, err) == (0, "")
    assert ("1 ok" in out) or ('"ok": 1' in out)
    assert "1 line of results.jsonl cannot be read" in " ".join(out.split())


def test_an_unknown_metric_and_an_unwritable_file_say_what_would_do(flopwatch, sweep, tmp_path):
    status, _, err = flopwatch("report", str(sweep), "--metric", "speed")
    assert status == 2
    assert "choose from memory, time" in err
    status, _, err = flopwatch("report", str(sweep), "--md", str(tmp_path / "none" / "a.md"))
    assert status == 2
    assert "in a folder that exists" in err


@pytest.mark.slow
def test_a_report_loads_neither_torch_nor_plotly(sweep, tmp_path):
    """A report opens on a laptop without torch."""
    code = (
        "import sys\nfrom flopwatch.cli import main\n"
        f"try:\n    main(['report', {str(sweep)!r}, '--html', {str(tmp_path / 'a.html')!r}])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'plotly', 'pandas', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

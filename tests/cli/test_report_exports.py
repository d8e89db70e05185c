"""`flopwatch report --csv`: files, standard output, and what cannot be asked for together."""

import csv
import io

import pytest

from testbeds.made_up_sweep import example_specs, make_result, write_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    specs = example_specs()[:12]
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "a sweep", [make_result(spec) for spec in specs])


def test_a_page_may_be_written_beside_them(flopwatch, sweep, tmp_path):
    table, page = tmp_path / "a.csv", tmp_path / "a.html"
    _, out, _ = flopwatch("report", str(sweep), "--csv", str(table), "--html", str(page))
    assert out == f"Written: {table}\nWritten: {page}\n"
    assert len(list(csv.DictReader(io.StringIO(table.read_text())))) == 12
    assert page.stat().st_size > 1000


def test_a_dash_is_standard_output_and_then_nothing_else_is_on_it(flopwatch, sweep, tmp_path):
    page = tmp_path / "a.md"
    status, out, err = flopwatch("report", str(sweep), "--csv", "-", "--md", str(page))
    assert (status, err) == (0, f"Written: {page}\n")
    assert [row["outcome"] for row in csv.DictReader(io.StringIO(out))] == ["ok"] * 12


@pytest.mark.parametrize("option", ["--md", "--html", "--output"])
def test_a_report_on_standard_output_is_the_text_of_the_file(flopwatch, sweep, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    flopwatch("report", str(sweep), option, "file")
    status, out, err = flopwatch("report", str(sweep), option, "-")

    assert (status, err) == (0, "")
    assert out == (tmp_path / "file").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("words", [["--csv", "-", "--json"], ["--md", "-", "--html", "-"]])
def test_two_formats_do_not_share_standard_output(flopwatch, sweep, words):
    status, out, err = flopwatch("report", str(sweep), *words)
    assert (status, out) == (2, "")
    assert "would both write to standard output" in err


def test_a_file_that_cannot_be_written_is_told(flopwatch, sweep, tmp_path):
    status, _, err = flopwatch("report", str(sweep), "--csv", str(tmp_path / "none" / "a.csv"))
    assert status == 2
    assert "in a folder that exists" in err

"""If the given peak is far too low, every form of the report says so in readable numbers."""

import io

from rich.console import Console

from flopwatch.report.run_page.collecting import read_report
from flopwatch.report.run_page.exports import run_markdown
from flopwatch.report.run_page.page import run_page
from flopwatch.report.run_page.terminal import draw_run
from flopwatch.runs import read_log
from support.ledgers import write_ledger

SECONDS = {"wall": 1000.0, "train": 900.0, "model_at_peak": 932.0, "hardware_at_peak": 932.0}


def short_form(report):
    console = Console(width=100, file=io.StringIO())
    console.print(draw_run(report))
    return console.file.getvalue()


def test_a_loss_below_0_has_a_plus_in_all_forms(tmp_path):
    folder = write_ledger(tmp_path, SECONDS)
    report = read_report(folder)
    notebook = read_log(tmp_path / "training_log.jsonl")._repr_html_()

    for text in (short_form(report), run_markdown(report), run_page(report)):
        assert "+3.2 points" in text
        assert "−-" not in text
    assert "+3.2 %" in notebook


def test_a_peak_in_tera_flops_without_the_tera_gives_no_endless_bar(tmp_path):
    report = read_report(write_ledger(tmp_path, SECONDS | {"model_at_peak": 9e14, "hardware_at_peak": 9e14}))

    assert len(short_form(report)) < 5_000
    assert len(run_page(report)) < 200_000

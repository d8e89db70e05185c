"""If the given peak is far too low, every form of the report says so in readable numbers."""

from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.report.run.contents import read_report
from flopwatch.report.run.document import run_document
from flopwatch.runs import read_log
from support.ledgers import write_ledger
from testbeds.documents import document_text

SECONDS = {"wall": 1000.0, "train": 900.0, "model_at_peak": 932.0, "hardware_at_peak": 932.0}


def test_a_loss_below_0_has_a_plus_in_all_forms(tmp_path):
    folder = write_ledger(tmp_path, SECONDS)
    document = run_document(read_report(folder))
    notebook = read_log(tmp_path / "training_log.jsonl")._repr_html_()

    for text in (document_text(document), to_markdown(document), to_page(document)):
        assert "+3.2" in text
        assert "−-" not in text
    assert "+3.2 %" in notebook


def test_a_peak_in_tera_flops_without_the_tera_gives_no_endless_bar(tmp_path):
    run = write_ledger(tmp_path, SECONDS | {"model_at_peak": 9e14, "hardware_at_peak": 9e14})
    document = run_document(read_report(run))

    assert len(document_text(document)) < 5_000
    assert len(to_page(document)) < 200_000

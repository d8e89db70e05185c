"""Wherever an MFU is shown, it is shown as exact only where its row says so."""

import io
import json
import re

import pytest
import torch

import flopwatch as package
from flopwatch.sinks.console import ConsoleSink

REASON = "no operation of the training was seen"


def train(folder, *, runs):
    """A training whose steps run, or one of which the monitor is only told; the latter cannot be exact."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    console = io.StringIO()
    with package.TrainingMonitor(
        folder, model=model, peak_flops_per_s=1e12, log_every=10, sinks=[ConsoleSink(console)], strict=True
    ) as monitor:
        for step in range(40):
            batch = torch.randn(4, 16)
            if runs:
                with monitor.step(batch):
                    model(batch).sum().backward()
            else:
                monitor.log_step(step, batch=batch)
    return monitor.summary, console.getvalue()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    return folder, *train(folder, runs=False)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    return folder, *train(folder, runs=True)


def test_the_console_marks_shares_that_are_not_exact_and_says_why_once(told, exact):
    assert len(re.findall(r"^step .*MFU +~\d", told[2], re.MULTILINE)) == 4
    assert told[2].count("are not exact: ") == 1
    assert re.search(r"^not exact +no ", told[2], re.MULTILINE), "in the table at the end"
    assert "~" not in exact[2]
    assert "not exact" not in exact[2]


def test_the_summary_says_it(told, exact):
    assert (told[1].exact, told[1].values["perf/exact"]) == (False, 0)
    assert any(REASON in note for note in told[1].notes)
    assert (exact[1].exact, exact[1].values["perf/exact"], exact[1].notes) == (True, 1, ())


def test_watch_says_it(flopwatch, told, exact):
    for (folder, *_), is_exact in ((told, False), (exact, True)):
        _, out, _ = flopwatch("watch", str(folder), "--once")
        assert ("· exact" in out, "· not exact" in out) == (is_exact, not is_exact)
        assert ("not exact: " in out) != is_exact


def test_the_tiles_of_a_report_mark_it(flopwatch, told, exact):
    for (folder, *_), about in ((told, "~"), (exact, "")):
        out = flopwatch("report", str(folder))[1]
        assert re.search(rf"^ *{about}[\d.]+ %  MFU of the training steps", out, re.MULTILINE), out


def test_explain_says_it(flopwatch, told, exact):
    for (folder, *_), is_exact in ((told, False), (exact, True)):
        _, out, _ = flopwatch("explain", str(folder))
        assert ("; exact" in out, "; not exact" in out) == (is_exact, not is_exact)
        assert ("Not exact: " in out) != is_exact
    _, out, _ = flopwatch("explain", str(told[0]), "--json")
    assert json.loads(out)["exact"] is False


def test_compare_lists_that_one_run_is_exact_and_the_other_is_not(flopwatch, told, exact):
    _, out, _ = flopwatch("compare", str(exact[0]), str(told[0]))
    assert re.search(r"^exact +yes +no +affects", out, re.MULTILINE), out


@pytest.mark.slow
def test_explain_divides_mixed_types_by_the_peak_that_the_row_was_divided_by(flopwatch, tmp_path, monkeypatch):
    """One layer in bf16, one in fp32: neither type's peak is the denominator."""
    monkeypatch.delenv("FLOPWATCH_PEAK_TFLOPS", raising=False)
    first, second = torch.nn.Linear(64, 64).bfloat16(), torch.nn.Linear(64, 64)
    model = torch.nn.ModuleList([first, second])
    model.forward = lambda x: second(first(x).float())
    with package.TrainingMonitor(tmp_path, model=model, log_every=10, strict=True) as monitor:
        for _ in range(20):
            batch = torch.randn(8, 64, dtype=torch.bfloat16)
            with monitor.step(batch):
                model(batch).sum().backward()
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    row = [record for record in records if "ledger" in record][-1]
    _, out, _ = flopwatch("explain", str(tmp_path))
    if row["values"].get("perf/mfu") is None:
        pytest.skip("this CPU has no known peak for bf16")
    assert "The log has the same value" in out, out

"""Every way a result reaches a person, given hostile texts; each check raises AssertionError with what was wrong."""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

from flopwatch.cli.trials.sweep_screens import LiveTable, PlainLines, print_dry_run, print_line, print_preflight
from flopwatch.cli.trials.trial_run import print_result, probe_line
from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.report.capture import Capture
from flopwatch.report.summary import summarise
from flopwatch.report.sweep.document import sweep_document, sweep_json
from flopwatch.sweep.fit import Probe
from flopwatch.sweep.folder import Trial
from flopwatch.sweep.preflight import PreflightResult, pair_of
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import Plan
from testbeds.documents import document_text
from testbeds.made_up_sweep import example_specs, make_result

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_OURS_IN_MARKDOWN = re.compile(r"</?(details|summary|sub)>")
_BAD_TAGS = {"img", "iframe", "object", "embed", "base", "form", "link", "h6"}


def check_renders(texts: list[str], folder: Path) -> None:
    """All renderers, with each text in every place of some results."""
    results = hostile_results(texts)
    _check_screens(results, texts, folder)
    _check_reports(results, folder)


def hostile_results(texts: list[str]) -> list[TrialResult]:
    """A failure and a success of each text; the numbers of the successes are those of `make_result`."""
    good = make_result(example_specs()[0], with_accidents=False)
    found = []
    for number, text in enumerate(texts):
        spec = TrialSpec("m:C", text, number + 1, 64, label=text, device=text, options={text: text}, command=text)
        exception = {"type": text, "message": text}
        failed = TrialResult(
            f"failed {number} {text}", f"f{number}", spec, "error", text, {"exception": exception, text: text},
            phase=text, log_tail=text, stacks=text, command=text, environment={"torch": text, "device": {"name": text}},
        )  # fmt: skip
        ran = replace(good.spec, label=f"{number} {text}"[:200], options={"number": number}, model="small")
        found += [failed, replace(good, name=f"ok {number} {text}", key=f"k{number}", spec=ran)]
    return found


def _check_screens(results: list[TrialResult], texts: list[str], folder: Path) -> None:
    trials = tuple(Trial(folder / "s", result.name, result.key, result.spec) for result in results)
    plan = Plan(trials, trials, {})
    for width in (70,):
        stream = io.StringIO()
        console = Console(file=stream, width=width, color_system=None, force_terminal=False)
        lines, table = PlainLines(plan, print_line(console)), LiveTable(plan, Path(texts[0]), Stop())
        for result, trial in zip(results, trials, strict=True):
            for observer in (lines, table):
                observer.started(trial)
                observer.ticked({trial.name: trial}, 1, f"waiting {result.reason}")
                observer.ended(result)
            if result.outcome == "error":
                console.print(table.render())
        print_dry_run(plan, Path(texts[-1]), console)
        with redirect_stdout(stream):
            for result in results:
                print_result(result, console)
            for text in texts:
                found = PreflightResult(text, text, False, text, False, text)
                print_preflight({pair_of(found): found})
                print(probe_line(Probe(1, None, "error", text, None)))
        _assert_harmless(stream.getvalue(), "screen")


def _check_reports(results: list[TrialResult], folder: Path) -> None:
    summary = summarise(Capture(folder, {result.name: result for result in results}, {}))
    document = sweep_document(summary)
    _assert_harmless(document_text(document, 90), "report")
    _check_markdown(to_markdown(document))
    _check_page(to_page(document))
    _check_numbers(json.loads(sweep_json(summary)), results)


def _check_numbers(content: dict[str, object], results: list[TrialResult]) -> None:
    # By the beginning of their names: two halves of a character become a whole one in JSON.
    rows = {_begin(row["name"]): row for row in content["trials"]}  # type: ignore[attr-defined]
    assert len(rows) == len(results)
    for result in results:
        row, is_ok = rows[_begin(result.name)], result.outcome == "ok"
        assert row["outcome"] == result.outcome
        assert row["samples_per_s"] == (result.measured.samples_per_s if is_ok else None)
        assert row["peak_bytes"] == (result.measured.memory.peak_bytes if is_ok else None)


def _begin(name: str) -> tuple[str, ...]:
    return tuple(name.split(" ")[:2])


def _check_markdown(text: str) -> None:
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    outside = _OURS_IN_MARKDOWN.sub("", outside)
    assert not re.search(r"(?<!\\)<[A-Za-z/!]", outside), "HTML in Markdown"
    assert not re.search(r"(?<!\\)\]\(", outside), "a link in Markdown"
    assert "```" not in re.sub(r"\\`", "", outside), "a fence that was broken"
    _assert_harmless(text.replace("\u200b", ""), "Markdown")


class _Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _check_page(page: str) -> None:
    elements = _Elements(page).found
    assert not _BAD_TAGS & {tag for tag, _ in elements}, "an element of the text's own"
    assert sum(tag == "script" for tag, _ in elements) <= 2, "a script of the text's own"
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")], "a handler"
    _assert_harmless(page, "page")


def _assert_harmless(shown: str, where: str) -> None:
    shown.encode("utf-8")
    found = _CONTROL.search(shown)
    assert found is None, f"{found[0]!r} reached the {where}: {shown[max(0, found.start() - 60) : found.end() + 60]!r}"

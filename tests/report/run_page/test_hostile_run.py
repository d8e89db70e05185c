"""Whatever a run, its user or its machine call themselves: the page, Markdown and terminal show it as text."""

import http.server
import json
import os
import re
import shutil
import subprocess
import threading

import pytest

from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.report.run.contents import read_report
from flopwatch.report.run.document import run_document, run_json
from support.hand_made_run import provenance, row, start
from support.hostile_sweep import HOSTILE, OWNED
from testbeds.documents import document_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def hostile_lines(text):
    values = {f"training/{text}": 1.0, text: 2.0, f"dataset/{text}/loss": 3.0, "ranks/longest_input_wait_rank": 1}
    spent = {"train": 1.0, "eval": 1.0, "wall": 3.0, text: 1.0}
    peak = {"flops_per_s": 1e3, "device": text, "dtype": text, "source": text, "kind": text, "confidence": text}
    return [
        start("one", 0.0, output_dir=text, config={text: text, "nested": {text: [text]}}, world_size=2),
        provenance(1, notes=[text], peak=peak, method=text, mode=text, attention=text),
        row([1], [1.0], [1.0], 1.0, {"train": 1.0, "wall": 1.0}, values=values, notes=[text], exact=False),
        {"type": "notice", "step": 1, "level": text, "code": text, "message": text},
        start("two", 2.0, resumed=1, output_dir=f"runs/{text}", environment={"host": text, "device": text, text: text}),
        row([2], [1.0], [1.0], 3.0, spent, values=values, notes=[text], exact=False),
        {"type": "summary", "step": 2, "unix_time": 4.0, "ended_by": f"Error: {text}", "exact": False, "notes": [text]},
    ]


def hostile_report(folder, text=HOSTILE):
    path = folder / "training_log.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    # ASCII, as the training writes it: half a surrogate pair has no UTF-8.
    path.write_text("".join(json.dumps(line) + "\n" for line in hostile_lines(text)))
    return read_report(path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return hostile_report(tmp_path_factory.mktemp("hostile"))


def test_the_page_has_no_element_or_control_character_of_the_text(report):
    page = to_page(run_document(report))
    assert "<script>document" not in page
    assert "<img" not in page
    assert not CONTROL.search(page)
    page.encode("utf-8")
    assert page.count("&lt;script&gt;document.title=&#x27;owned&#x27;&lt;/script&gt;") >= 15


def test_markdown_json_and_terminal_are_harmless_too(report):
    markdown = to_markdown(run_document(report))
    assert "<script>" not in markdown.replace("\\<script\\>", "")
    assert not CONTROL.search(markdown)
    # Records are read without lone surrogates, which no UTF-8 file can hold.
    whole = HOSTILE.encode(errors="replace").decode()
    assert json.loads(run_json(report))["starts"][0]["output_dir"] == whole
    assert not CONTROL.search(document_text(run_document(report)))


def dumped_dom(page, folder):
    if CHROMIUM is None:
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS"):
            pytest.fail("chromium is needed: FLOPWATCH_REQUIRE_SERVERS is set")
        pytest.skip("no chromium here")
    file = folder / "run.html"
    file.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *options, file.as_uri()], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def listener():
    """A server on this machine that notes what is asked for, and the text that asks for it."""
    asked = []

    class Noting(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Noting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        text = (
            f'"><img src="{place}/image"><link rel=stylesheet href="{place}/style"><script src={place}/script></script>'
        )
        yield asked, text
        server.shutdown()


@pytest.mark.slow
def test_a_browser_runs_none_of_it_asks_for_nothing_and_shows_all_of_it(tmp_path, listener):
    asked, asking = listener
    dom = dumped_dom(to_page(run_document(hostile_report(tmp_path / "run", HOSTILE + asking))), tmp_path)
    assert re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1].startswith("Run ")
    assert asked == []
    assert not re.search(r"<(img|link|iframe)\b", dom)
    assert dom.count(OWNED.replace("<", "&lt;").replace(">", "&gt;")) >= 10
    assert 'id="tip"' in dom, "our own script did run: it made the tooltip"


@pytest.mark.slow
def test_the_browser_test_can_fail(tmp_path, listener):
    asked, asking = listener
    text = (HOSTILE + asking).encode("utf-8", "replace").decode()
    dom = dumped_dom(f"<html><head><title>Run</title></head><body>{OWNED}{asking}{text}</body></html>", tmp_path)
    assert "<title>owned</title>" in dom
    assert asked

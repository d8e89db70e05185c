"""The page is one file that loads nothing and shows hostile text as text."""

import html
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from flopwatch.present.page import to_page
from flopwatch.report.sweep.document import sweep_document
from support.few_results import ended, private_results, ran, summary_of
from support.hostile_sweep import HOSTILE, OWNED, hostile_results
from testbeds.made_up_sweep import example_specs, make_result, many_specs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOADING = {"src", "srcset", "href", "data", "poster", "action", "formaction", "background", "xlink:href"}


class Elements(HTMLParser):
    """Every element with its attributes, as a browser's parser finds them."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def example():
    return to_page(sweep_document(summary_of(*(make_result(spec) for spec in example_specs()))))


@pytest.fixture(scope="module")
def hostile():
    return to_page(sweep_document(summary_of(*hostile_results())))


@pytest.mark.parametrize("page", ["example", "hostile"])
def test_nothing_is_loaded(page, request):
    page = request.getfixturevalue(page)
    elements = Elements(page).found
    targets = [value for _, attributes in elements for name, value in attributes.items() if name in LOADING]
    assert targets
    assert all(target.startswith("#") for target in targets), "only places within the page are linked"
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in elements}
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("page", ["example", "hostile"])
def test_there_is_one_script_element_and_no_inline_handler(page, request):
    elements = Elements(request.getfixturevalue(page)).found
    assert sum(tag == "script" for tag, _ in elements) == 1
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]


def test_the_policy_allows_our_script_only(example):
    policy = next(a["content"] for tag, a in Elements(example).found if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_hostile_text_is_shown_as_text(hostile):
    shown = "".join(Elements(hostile).text)
    assert OWNED in shown
    assert "[l](http://evil.example/x)" in shown
    assert "\u202e" not in hostile
    assert "\x1b" not in hostile
    hostile.encode("utf-8")


def test_every_trial_is_in_the_table(example):
    table = example[example.index('id="all-trials"') :]
    assert table.count("<tr") == 1 + min(len(example_specs()), 200)


@pytest.mark.parametrize(
    "results",
    [
        [],
        [ran("standard", 4, 64, gib=1, mfu=0.3, hfu=0.4)],
        [ended("standard", 4, 64, "error")],
        [ended("standard", 4, 64, "ok")],
        [ran("mine:Own", batch, 64) for batch in (1, 2, 3)],
        [ran("standard", 4, seq, gib=1) for seq in (64, 128, 256)],
    ],
    ids=["empty", "one trial", "all failed", "nothing measured", "own trainer, no memory", "only sequences"],
)
def test_small_and_bare_sweeps_make_a_page(results):
    page = to_page(sweep_document(summary_of(*results)))
    shown = html.unescape(" ".join(Elements(page).text))
    assert "nan" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page, flags=re.DOTALL)
    assert ("What to run" if results else "has no trials") in shown


def test_the_page_of_a_small_sweep_stays_small(example):
    """plotly's script alone is about 4 MB."""
    documents = to_page(sweep_document(summary_of(*(make_result(spec) for spec in example_specs()[:16]))))
    assert len(documents.encode()) < 300_000
    assert len(example.encode()) < 600_000


def dumped_dom(page, folder, *, with_network=False, width=800):
    """What a real browser makes of the page, without a network where the system lets us take it away."""
    if CHROMIUM is None:
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS"):
            pytest.fail("chromium is needed: FLOPWATCH_REQUIRE_SERVERS is set")
        pytest.skip("no chromium here")
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    cut_off = ["unshare", "-rn"]
    is_cut = not with_network and subprocess.run([*cut_off, "true"], capture_output=True, check=False).returncode == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--dump-dom"]
    options.append(f"--window-size={width},2000")
    command = [*(cut_off if is_cut else []), CHROMIUM, *options, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_browser_runs_none_of_it_and_shows_all_of_it(hostile, tmp_path):
    dom = dumped_dom(hostile, tmp_path)
    assert re.search(r"<title>(.*?)</title>", dom)[1] == "Sweep a-sweep"
    elements = Elements(dom)
    shown = "".join(elements.text)
    assert shown.count(OWNED) >= 10
    assert not {"img", "iframe", "link"} & {tag for tag, _ in elements.found}


_MEASURE = """<script>
const cut = [...document.querySelectorAll("#run td, #run th")].filter((cell) => {
  const frame = cell.closest(".scroll").getBoundingClientRect();
  return cell.getBoundingClientRect().right > frame.right + 1;
});
document.body.dataset.cut = cut.map((cell) => cell.textContent).join("|");
</script>"""


@pytest.mark.slow
def test_all_of_what_to_run_is_visible_at_1280_pixels(tmp_path):
    page = to_page(sweep_document(summary_of(*private_results())))
    measured = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page) + _MEASURE
    dom = dumped_dom(measured, tmp_path, width=1280)
    assert "no measurable difference" in dom
    assert re.search(r'data-cut="([^"]*)"', dom)[1] == ""


@pytest.mark.slow
def test_the_browser_test_can_fail(tmp_path):
    """Without escaping and without a policy the same text does take over the page."""
    page = f"<html><head><title>Sweep</title></head><body>{HOSTILE}</body></html>".encode("utf-8", "replace").decode()
    assert "<title>owned</title>" in dumped_dom(page, tmp_path)


def test_of_many_trials_200_rows_are_shown():
    page = to_page(sweep_document(summary_of(*(make_result(spec) for spec in many_specs(1200)))))
    table = page[page.index('id="all-trials"') :]
    assert table.count("<tr") == 201
    assert "200 of 1,200 rows are shown; the JSON report has all." in table

"""The page of a run is one file that loads nothing, and has the numbers of its charts in tables."""

import html
import re
from html.parser import HTMLParser

import pytest

from flopwatch.cli import main
from flopwatch.present.document import Document
from flopwatch.present.page import to_page
from flopwatch.present.svg import bars_svg, linear_ticks
from flopwatch.report.run.contents import read_report
from flopwatch.report.run.document import run_document
from flopwatch.runs.advice import waterfall_bars
from flopwatch.runs.waterfall import Loss, Waterfall
from support.hand_made_run import PEAK, provenance, records, row, start, write_run
from support.ledgers import write_ledger

LOADING = {"src", "srcset", "href", "data", "poster", "action", "formaction", "background", "xlink:href"}
VOID = {"meta", "br", "img", "input", "link", "hr"}
WATERFALL = Waterfall(
    100.0,
    (
        Loss("eval", "evaluation", 20.0, 20.0, "Evaluation took 20 s.", "Evaluate less often."),
        Loss("below_peak", "forward and backward below the peak", 50.0, 50.0, "No trace.", "Run `flopwatch trace`."),
    ),
    30.0,
    notes=("The peak is measured.",),
)


class Page(HTMLParser):
    """Checks that every element is closed in order, and collects elements and text."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text, self.open = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def notice(step):
    return {"type": "notice", "step": step, "level": "info", "code": "odd", "message": "An odd log."}


def page_of(folder, lines=None):
    return to_page(run_document(read_report(write_run(folder, lines))))


@pytest.fixture
def page(tmp_path):
    return page_of(tmp_path)


def test_the_page_is_well_formed_and_loads_nothing(page):
    elements = Page(page).found
    targets = [value for _, attributes in elements for name, value in attributes.items() if name in LOADING]
    assert targets
    assert all(target.startswith("#") for target in targets)
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in elements}
    assert "url(" not in page
    assert "@import" not in page
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]


def test_every_link_leads_to_a_place_of_the_page(page):
    elements = Page(page).found
    ids = {attributes["id"] for _, attributes in elements if "id" in attributes}
    assert {attributes["href"].removeprefix("#") for tag, attributes in elements if tag == "a"} <= ids


def test_the_policy_allows_our_script_only(page):
    policy = next(attributes["content"] for _, attributes in Page(page).found if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy
    assert page.count("<script") == 1


def test_the_numbers_of_the_charts_stand_in_tables(page):
    assert page.count("<figure>") >= 4
    metrics = page[page.index('id="metrics"') :]
    for title, key in (("Loss", "training/loss"), ("Step time", "perf/step_time"), ("MFU and HFU", "perf/mfu_percent")):
        assert f"<figcaption>{title}" in page
        assert f"<td>{key}</td>" in metrics


def test_the_numbers_of_the_log_are_on_the_page(page):
    shown = html.unescape(" ".join(Page(page).text))
    for words in (
        "runs/by-hand", "The run ended. 7 of 8 planned steps in 41 s, 2 sessions.", "31.4 %", "34.1 %", "desk",
        "Abacus", "counted beads", "slow: Step 2 was slow.", "restart at step 4: resumed on desk",
        "training/<temperature>", "The FLOPs are exact.", "smart", "3.12.1",
    ):  # fmt: skip
        assert words in shown, words


def test_there_is_a_dark_and_a_narrow_form(page):
    assert "prefers-color-scheme: dark" in page
    assert "max-width: 560px" in page
    assert 'name="viewport"' in page


def test_the_waterfall_goes_from_100_percent_to_the_mfu():
    drawn, _, _ = bars_svg(waterfall_bars(WATERFALL).bars)
    bars = re.findall(r'<rect class="fill (\w+)" x="([\d.]+)" width="([\d.]+)"', drawn)
    places = [(style, (float(x) - 4) / 4.52, (float(x) - 4 + float(width)) / 4.52) for style, x, width in bars]
    expected = [("whole", 0, 100), ("loss", 80, 100), ("loss", 30, 80), ("rest", 0, 30)]
    for (style, left, right), (wanted, start_percent, end_percent) in zip(places, expected, strict=True):
        assert style == wanted
        assert (left, right) == (pytest.approx(start_percent, abs=0.1), pytest.approx(end_percent, abs=0.1))
    assert "-20.0" in drawn


def test_the_table_behind_the_waterfall_has_evidence_and_advice():
    section = to_page(Document("a run", [waterfall_bars(WATERFALL)]))
    Page(section)
    for words in ("Evaluation took 20 s.", "Evaluate less often.", "50.0 points", "30.0 %"):
        assert words in section


def shown_text(page):
    return " ".join(html.unescape(" ".join(Page(page).text)).split())


def test_the_page_begins_with_the_words_of_flopwatch_why(tmp_path, capsys):
    times = {"wall": 1600.0, "train": 1570.0, "input_wait": 608.0, "model_at_peak": 500.0, "hardware_at_peak": 500.0}
    run = write_ledger(tmp_path, times)
    page = to_page(run_document(read_report(run)))
    shown = shown_text(page)
    verdict = "Waiting for input costs 38 points: the loader cannot keep up. Nothing else costs more."
    assert page.index(verdict) < page.index("Next: Prepare batches ahead") < page.index('class="tiles"')
    assert shown.count("Prepare batches ahead, in other processes") == 2, "once before the table"
    assert "(608 ms per step) waiting for batches." in shown
    with pytest.raises(SystemExit):
        main(["why", run])
    told = " ".join(capsys.readouterr().out.split())
    assert verdict in told


def test_the_title_is_the_name_of_the_run_and_the_folder_stands_below(tmp_path):
    page = page_of(tmp_path, [start("one", 0.0, output_dir="/home/ann/experiments/tiny-7")])
    assert "<title>Run tiny-7</title>" in page
    assert "/home/ann/experiments/tiny-7" not in page[: page.index('id="where"')]
    assert "/home/ann/experiments/tiny-7" in page


@pytest.mark.parametrize(
    ("peak", "values", "spent", "words"),
    [
        (None, {"total/model_flops": 10}, {"wall": 9.0}, "The peak FLOP/s of the device is unknown"),
        (PEAK, {}, {"wall": 9.0}, "The FLOPs of this run are unknown"),
        (PEAK, {"total/model_flops": 10}, {}, "The log does not have the times that show where the peak went"),
    ],
    ids=["no peak", "no FLOPs", "no wall time"],
)
def test_a_run_without_a_waterfall_says_which_thing_is_missing(tmp_path, peak, values, spent, words):
    lines = [start("one", 0.0), provenance(peak=peak), row([1], [1.0], [1.0], 1.0, spent, values=values)]
    page = page_of(tmp_path, lines)
    top = page[: page.index('class="tiles"')]
    assert words in top
    assert sum(text in top for text in ("is unknown", "are unknown", "does not have the times")) == 1


def test_a_notice_before_the_first_step_says_so(tmp_path):
    page = page_of(tmp_path, [*records()[:2], notice(None), *records()[2:]])
    assert "notice before the first step: odd: An odd log." in page


@pytest.mark.parametrize(
    "lines",
    [
        [start("one", 1000.0)],
        [start("one", 1000.0), provenance(peak=None, method=None)],
        records()[:3],
        [*records()[:2], {"type": "row", "step": 1, "unix_time": 1.0, "values": {}, "steps": {}, "ledger": {}}],
        [{"type": "row", "step": 1, "unix_time": 1.0, "values": {"training/loss": 1.0}}],
        [start("one", 1e300, total_steps="many"), notice(None)],
        [start("one", 0.0), row([1], [1.0], [1e300], 2.0, {"wall": 0.0}), row([2], [1.0], [-1e300], 3.0, {})],
    ],
    ids=["start only", "no peak", "one window", "empty row", "no start", "odd", "huge"],
)  # fmt: skip
def test_short_and_odd_logs_make_a_page(tmp_path, lines):
    page = page_of(tmp_path, lines)
    Page(page)
    shown = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None)\b", shown)


def test_one_stall_does_not_flatten_the_step_times(tmp_path):
    lines = records()[:2]
    for step in range(1, 101):
        seconds = 500.0 if step == 50 else 1.0
        lines.append(row([step], [seconds], [1.0], 1000.0 + step, {"wall": 1.0 * step, "train": 1.0 * step}))
    page = page_of(tmp_path, lines)
    assert "1 spike above the axis, up to 500 s" in page


def test_metrics_of_ranks_are_in_the_table_of_metrics(tmp_path):
    values = {"ranks/reporting": 3, "ranks/longest_input_wait_rank": 2}
    lines = [start("one", 0.0, world_size=4), provenance()]
    lines.append(row([1], [1.0], [1.0], 1.0, {"wall": 1.0, "train": 1.0}, values=values))
    shown = " ".join(Page(page_of(tmp_path / "ranks", lines)).text)
    assert "ranks/reporting" in shown
    assert "longest_input_wait_rank" in shown


def test_a_measured_rate_stands_beside_the_peak(tmp_path, page):
    assert "quickest matmul" not in page
    lines = [start("one", 0.0), provenance(achievable_flops_per_s=1.5e14), records()[2]]
    shown = " ".join(Page(page_of(tmp_path / "measured", lines)).text)
    assert "150.0 TFLOP/s, the quickest matmul that was measured on this device" in shown


def test_memory_of_a_device_is_in_the_table(tmp_path):
    values = {"perf/memory_allocated_gib": 1.5, "perf/memory_reserved_gib": 2.0}
    lines = [start("one", 0.0), row([1], [1.0], [1.0], 1.0, {"wall": 1.0, "train": 1.0}, values=values)]
    assert "1.500 GiB" in " ".join(Page(page_of(tmp_path, lines)).text)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 1e6), (-3, 5), (0.001, 0.0013), (1e9, 1e9 + 1), (-1e300, 1e300)])
def test_ticks_are_few_and_within_the_axis(low, high):
    ticks = linear_ticks(low, high)
    assert 1 <= len(ticks) <= 6
    assert all(low - 1e-6 * abs(low) <= tick <= high + 1e-6 * abs(high) for tick in ticks)

"""`flopwatch why`: every loss from 100 % of the peak down to MFU, a verdict, and what to try next."""

import json
import re
from itertools import pairwise

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.errors import InputError
from flopwatch.records.run import Summary
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.traces import files as splits
from support.ledgers import CPU, records_of, write_ledger
from support.make_run_log import Story, write_log, write_run

# 31 % MFU; 1,630 s, of which 608 s wait for input
SECONDS = {
    "wall": 1630.0,
    "start_up": 10.0,
    "restart": 30.0,
    "eval": 15.0,
    "checkpoint": 4.5,
    "pause": 0.3,
    "count": 0.2,
    "train": 1570.0,
    "input_wait": 608.0,
    "divided": 960.0,
    "optimizer": 40.0,
    "host": 2.0,
    "model_at_peak": 500.0,
    "hardware_at_peak": 500.0,
}


@pytest.fixture
def why(flopwatch):
    """Runs the command; returns what it printed."""

    def why(*arguments):
        status, out, err = flopwatch("why", *arguments)
        assert (status, err) == (0, "")
        return out

    return why


def bars_in(text):
    """Name to points of the drawn bars, with the column at which each begins and ends."""
    bars = {}
    for line in text.splitlines():
        found = re.fullmatch(r"(\S.*?)  +([█▌▐▕#|]+) +([+-]?[\d.]+)( %)?", line)
        if found:
            bars[found[1]] = (float(found[3]), line.index(found[2]), line.index(found[2]) + len(found[2]))
    return bars


# The text


def test_the_bars_go_from_the_peak_down_to_mfu(why, tmp_path):
    bars = bars_in(why(write_ledger(tmp_path / "a", SECONDS)))
    assert list(bars) == [
        *("peak", "start-up", "restarts", "evaluation", "checkpoints", "input wait", "optimizer"),
        *("after the optimizer", "forward and backward below the peak", "2 smaller losses", "MFU of the whole run"),
    ]
    assert bars["peak"][0] == 100
    assert bars["input wait"][0] == pytest.approx(-37.3)
    left = 100 + sum(points for name, (points, _, _) in bars.items() if name not in ("peak", "MFU of the whole run"))
    assert bars["MFU of the whole run"][0] == pytest.approx(left, abs=0.3), "as printed, with one decimal each"


@pytest.mark.parametrize("width", [80, 200])
def test_every_bar_begins_where_the_one_above_it_ends(why, tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = why(write_ledger(tmp_path / "a", SECONDS))
    bars = list(bars_in(text).values())
    for (_, begin, _), (_, _, end) in pairwise(bars[1:-1]):
        assert abs(begin - end) <= 1
    assert bars[0][1] == bars[-1][1], "peak and MFU begin at the left edge"
    assert max(map(len, text.splitlines())) <= width


def test_the_verdict_and_the_three_largest_losses_are_told_with_what_to_try(why, tmp_path):
    text = why(write_ledger(tmp_path / "a", SECONDS))
    told = " ".join(text.split())
    assert (
        "Waiting for input costs 37 points: the loader cannot keep up. Nothing else costs more. Next: Prepare" in told
    )
    numbered = re.findall(r"^(\d)\. (.+): ([\d.]+) points$", text, re.MULTILINE)
    assert [(number, name) for number, name, _ in numbered] == [
        ("1", "input wait"),
        ("2", "forward and backward below the peak"),
        ("3", "optimizer"),
    ]
    assert "10 min 08 s of 27 min 10 s (608 ms per step) waiting for batches." in told
    assert "Next: Prepare batches ahead" in told
    assert f"`flopwatch trace {tmp_path / 'a'}` divides this time" in told
    assert "Without a trace" not in told, "the loss itself has said it"


def test_a_run_that_mostly_starts_is_not_said_to_be_in_training_steps(why, tmp_path):
    """The difference in points is tiny where MFU is tiny, whatever the time is spent on."""
    seconds = {"wall": 1000.0, "start_up": 878.0, "train": 122.0, "model_at_peak": 0.1, "hardware_at_peak": 0.1}
    told = why(write_ledger(tmp_path, seconds))

    assert "Nearly all of its time" not in told
    assert "87.8 % of its time is spent otherwise, most of it on start-up" in told


def test_the_difference_between_the_run_and_its_steps_is_explained(why, tmp_path):
    told = " ".join(why(write_ledger(tmp_path / "a", SECONDS)).split())
    assert f"Why the MFU of {tmp_path / 'a'} is 30.7 %" in told
    assert "1,000 steps in 27 min 10 s on H100 SXM5 80GB, bf16 peak 989.4 TFLOP/s (datasheet)" in told
    assert (
        "Its training steps reach 31.8 % without stalls and warm-up. The run as a whole is lower, because 3.7 %" in told
    )
    assert "most of it on restarts" in told


def test_an_mfu_of_the_log_that_differs_from_that_of_the_steps_is_named(why, tmp_path):
    seconds = {**SECONDS, "stall": 100.0}
    values = {f"time/{name}_seconds": amount for name, amount in seconds.items()}
    end = Summary(1000, 3.0, {**values, "perf/mfu_percent": 30.1})
    write_log(tmp_path / "training_log.jsonl", [*records_of(seconds), end])
    told = " ".join(why(str(tmp_path)).split())
    assert "Its training steps reach 34.0 % without stalls and warm-up (30.1 % in the log, which counts stalls" in told


def test_a_short_run_gets_the_waterfall_and_no_verdict(why, tmp_path):
    told = " ".join(why(write_ledger(tmp_path / "a", SECONDS, steps=12)).split())
    assert "No verdict: the run has 12 steps, and a verdict needs 20." in told
    assert "1. input wait: 37.3 points" in told


def test_what_limits_the_figures_is_a_note(why, tmp_path):
    run = write_ledger(
        tmp_path / "a", SECONDS, exact=False, notes=("my::op has no formula",), peak=CPU, environment={"device": "cpu"}
    )
    told = " ".join(why(run).split())
    assert "Note: The FLOPs are not exact: my::op has no formula." in told
    assert "Note: The peak is that of the whole CPU: 2 cores x 2.5 GHz." in told
    assert "so this verdict relies on the measured times" in told


def test_a_peak_that_is_too_low_is_the_verdict_and_draws_a_bar_upwards(why, tmp_path):
    text = why(write_ledger(tmp_path / "a", {**SECONDS, "model_at_peak": 1900.0}))
    assert "The peak is too low to judge this run" in text
    bars = bars_in(text)
    assert bars["forward and backward below the peak"][0] > 0
    assert bars["MFU of the whole run"][0] > 100
    assert bars["MFU of the whole run"][2] > bars["peak"][2]


# JSON


def test_json_has_the_same_figures(why, tmp_path):
    content = json.loads(why(write_ledger(tmp_path / "a", SECONDS), "--json"))
    assert sum(loss["points"] for loss in content["losses"]) + content["mfu_percent"] == pytest.approx(100, abs=0.1)
    assert content["largest"] == ["input_wait", "below_peak", "optimizer"]
    assert (content["verdict"]["key"], content["no_verdict"]) == ("input_wait", None)
    assert (content["steps"], content["exact"], content["traces"]) == (1000, True, [])
    assert any("flopwatch trace" in note for note in content["notes"])


# Traces

TRACE = TraceSplit(
    "step9_rank0.pt.trace.json.gz",
    0,
    "cuda",
    3,
    1.57,
    matmul_seconds=0.6,
    other_kernel_seconds=0.3,
    optimizer_seconds=0.04,
    idle_seconds=0.63,
)


@pytest.fixture
def traces(monkeypatch):
    """Stands in for the reading of traces: what `newest_traces` and `read_trace` return or raise."""
    monkeypatch.setattr(splits, "newest_traces", lambda run_dir: (TRACE,))
    monkeypatch.setattr(splits, "read_trace", lambda file: TRACE)
    return monkeypatch


def test_a_trace_divides_what_is_one_bar_without_it(why, tmp_path, traces):
    content = json.loads(why(write_ledger(tmp_path / "a", SECONDS), "--json"))
    keys = {loss["key"] for loss in content["losses"]}
    assert keys >= {"slow_matmuls", "other_kernels", "idle"}
    assert "below_peak" not in keys
    assert content["traces"][0]["file"] == TRACE.file
    assert not any("Without a trace" in note for note in content["notes"])


def test_a_damaged_trace_of_the_run_is_a_note_and_one_that_is_named_is_an_error(flopwatch, why, tmp_path, traces):
    def damaged(path):
        raise InputError("the trace 'x' is incomplete")

    traces.setattr(splits, "newest_traces", damaged)
    traces.setattr(splits, "read_trace", damaged)
    run = write_ledger(tmp_path / "a", SECONDS)
    assert "Note: The trace of this run is not used: the trace 'x' is incomplete." in why(run)
    status, _, err = flopwatch("why", run, "--trace", "x")
    assert (status, err.strip()) == (2, "the trace 'x' is incomplete")


# What is missing


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (Story(knows_flops=False), "The FLOPs of this run are unknown.*flopwatch explain"),
        (
            Story(knows_peak=False),
            "The peak FLOP/s of the device is unknown.*--peak-tflops X.*flopwatch peak --measure",
        ),
        (Story(), "does not have the times that show where the peak went.*wait for the next row"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(flopwatch, tmp_path, story, words):
    write_run(tmp_path / "a", 100, story)
    status, out, err = flopwatch("why", str(tmp_path / "a"))
    assert (status, out) == (2, "")
    assert re.search(words, err)
    assert "Traceback" not in err


def test_a_run_without_rows_says_when_the_first_comes(flopwatch, tmp_path):
    (tmp_path / "a").mkdir()
    write_log(tmp_path / "a" / "training_log.jsonl", records_of(SECONDS)[:2])
    status, _, err = flopwatch("why", str(tmp_path / "a"))
    assert status == 2
    assert "has no row of metrics yet; the first one is written after log_every steps" in err


# A real training


def test_a_real_training_adds_up(why, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainingMonitor(str(tmp_path / "a"), quiet=True, log_every=5, strict=True, peak_flops_per_s=1e12) as monitor:
        monitor.set_model(model)
        for _ in range(30):
            batch = torch.randn(32, 64)
            with monitor.step(batch):
                model(batch).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    content = json.loads(why(str(tmp_path / "a"), "--json"))
    points = {loss["key"]: loss["points"] for loss in content["losses"]}
    assert sum(points.values()) + content["mfu_percent"] == pytest.approx(100, abs=0.1)
    assert points["optimizer"] > 0
    assert min(points.values()) > 0
    assert content["steps"] == 30
    assert "Why the MFU of" in why(str(tmp_path / "a"))


# In `flopwatch watch`


# In `flopwatch compare`


def test_compare_names_the_loss_that_shrank(flopwatch, tmp_path):
    a = write_ledger(tmp_path / "a", SECONDS)
    faster = {**SECONDS, "wall": 1130.0, "train": 1070.0, "input_wait": 108.0}
    b = write_ledger(tmp_path / "b", faster)
    status, out, _ = flopwatch("compare", a, b)
    assert status == 0
    table = out[out.index("ms per step") :]
    cell = r" +(-?[\d.,]+)"
    rows = re.findall(rf"^([a-zA-Z].*?){cell}{cell} +([+-]?[\d.]+)$", table, re.MULTILINE)
    assert rows[0] == ("input wait", "608.0", "108.0", "-500.0")
    assert rows[-1] == ("together", "1,630.0", "1,130.0", "-500.0")
    told = " ".join(out.split())
    assert "Most of the change: input wait shrank from 608 ms to 108 ms." in told
    assert "MFU of the whole run rose from 30.7 % to 44.2 %." in told


def test_compare_has_the_change_in_json_and_it_adds_up(flopwatch, tmp_path):
    a = write_ledger(tmp_path / "a", SECONDS)
    b = write_ledger(tmp_path / "b", {**SECONDS, "wall": 2000.0, "eval": 385.0})
    found = json.loads(flopwatch("compare", a, b, "--json")[1])
    change = found["per_step"]
    assert change["parts"][0]["key"] == "eval"
    assert sum(part["change_ms"] for part in change["parts"]) == pytest.approx(change["b_ms"] - change["a_ms"])
    assert found["whole_run"].startswith("MFU of the whole run fell from 30.")


def test_a_trace_of_one_run_only_does_not_look_like_a_loss_that_shrank(flopwatch, tmp_path, traces):
    traces.setattr(splits, "newest_traces", lambda run_dir: (TRACE,) if run_dir.endswith("b") else ())
    a, b = (write_ledger(tmp_path / name, SECONDS) for name in "ab")
    _, out, _ = flopwatch("compare", a, b, "--json")
    assert all(part["change_ms"] == 0 for part in json.loads(out)["per_step"]["parts"])


def test_times_at_the_logged_peak_are_not_shown_below_another_one(flopwatch, tmp_path):
    """The log has no FLOPs of its timed steps, so that nothing is known about the peak that is given."""
    run = write_ledger(tmp_path, SECONDS)
    assert "30.7 %" in flopwatch("why", run)[1]
    status, out, _ = flopwatch("why", run, "--peak-tflops", "1979")
    assert (status, out.startswith("Where the time of")) == (0, True)
    assert "30.7" not in out


def test_training_steps_are_without_stalls_compilation_and_the_time_between_passes(flopwatch, tmp_path):
    seconds = {"wall": 1000.0, "start_up": 10.0, "train": 900.0, "input_wait": 0.0, "warm_up": 60.0, "compile": 50.0}
    seconds |= {"stall": 250.0, "divided": 500.0, "optimizer": 20.0, "passes_timed": 500.0, "outside_passes": 100.0}
    watched = " ".join(flopwatch("watch", write_ledger(tmp_path, seconds), "--once")[1].split())
    # 900 s without 50 and 250 are 600, of which a fifth is outside of the passes.
    for name, share in (("training steps", "48 %"), ("stalled steps", "25 %"), ("between the passes", "12 %")):
        assert re.search(rf"{name} {share[:-2]}(\.0)? %", watched), watched

"""`flopwatch compare`: the arithmetic is exact, noise is called noise, and a gate never passes unseen."""

import json
import random
import re
import time
from dataclasses import replace

import pytest
import torch

import flopwatch as package
from flopwatch.records.metrics import goodput_of
from flopwatch.records.run import Provenance, Row, RunStart, Summary
from support.ledgers import records_of
from support.make_run_log import PEAK, Accounts, Story, session, summary_of, write_log, write_run
from testbeds.made_up_sweep import write_sweep

LOG = "training_log.jsonl"
START = RunStart("one", 1.0, "runs/one", environment={"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0"})
PROVENANCE = Provenance(0, "smart", "trace", True, "full", 1.0, peak={**PEAK, "flops_per_s": 4e12})


def rows_of(seconds, window=10, **columns):
    """Windows of steps with these times; a column is one value for every step, or a list."""
    cells = {name: value if isinstance(value, list) else [value] * len(seconds) for name, value in columns.items()}
    cells = {"step": list(range(len(seconds))), "seconds": list(seconds), **cells}
    for first in range(0, len(seconds), window):
        steps = {name: column[first : first + window] for name, column in cells.items()}
        yield Row(steps["step"][-1], 2.0, {}, steps=steps)


@pytest.fixture
def write(tmp_path):
    """Writes a run of steps with these times; returns its folder."""

    def write(name, seconds, *, start=START, provenance=PROVENANCE, summary=None, **columns):
        (tmp_path / name).mkdir()
        rows = [replace(row, exact=provenance and provenance.exact) for row in rows_of(seconds, **columns)]
        records = [start, *([provenance] if provenance else []), *rows]
        write_log(tmp_path / name / LOG, [*records, *([summary] if summary else [])])
        return str(tmp_path / name)

    return write


@pytest.fixture
def compared(flopwatch):
    """Key to line of the JSON."""

    def compared(a, b):
        status, out, err = flopwatch("compare", a, b, "--json")
        assert (status, err) == (0, "")
        return {line["key"]: line for line in json.loads(out)["lines"]}

    return compared


def noisy(seed, steps, seconds=1.0, spread=0.02):
    chance = random.Random(seed)
    return [seconds * (1 + chance.gauss(0, spread)) for _ in range(steps)]


def with_slow_stretch(seconds):
    return [*seconds[:40], *[1.5] * 10, *seconds[50:]]


@pytest.mark.requirement("R18")
def test_values_and_changes_are_exact(write, compared):
    work = {"tokens": 1000, "samples": 4, "model_flops": 10**12, "hardware_flops": 12 * 10**11}
    a = write("a", [0.5] * 40, input_wait_seconds=0.05, real_tokens=800, **work)
    b = write("b", [0.4] * 30, input_wait_seconds=0.02, real_tokens=900, **work)
    lines = compared(a, b)

    expected = {
        "step_time_median": (0.5, 0.4, -20.0, "faster"),
        "step_time_p90": (0.5, 0.4, -20.0, "faster"),
        "step_time_p90_over_median": (1.0, 1.0, 0.0, "no measurable difference"),
        "steps_per_second": (2.0, 2.5, 25.0, "faster"),
        "tokens_per_second": (2000.0, 2500.0, 25.0, "faster"),
        "real_tokens_per_second": (1600.0, 2250.0, 40.625, "faster"),
        "samples_per_second": (8.0, 10.0, 25.0, "faster"),
        "mfu_percent": (50.0, 62.5, 25.0, "higher"),
        "hfu_percent": (60.0, 75.0, 25.0, "higher"),
        "input_wait_percent": (10.0, 5.0, -5.0, "lower"),
        "padding_percent": (20.0, 10.0, -10.0, "lower"),
        "tokens_per_step": (1000.0, 1000.0, 0.0, None),
    }
    for key, (in_a, in_b, change, verdict) in expected.items():
        line = lines[key]
        assert (line["a"], line["b"]) == pytest.approx((in_a, in_b)), key
        assert line["change"] == pytest.approx(change, abs=1e-9), key
        assert line["verdict"] == verdict, key
        if verdict:
            assert (line["low"], line["high"]) == pytest.approx((change, change), abs=1e-9), "steps without a spread"


def test_percentiles_are_of_the_steps_outside_warm_up(write, compared):
    seconds = [None, 90.0, 80.0, *(float(number) for number in range(1, 101))]
    warm_up = [False, True, True, *[False] * 100]
    line = compared(write("a", seconds, warm_up=warm_up), write("b", [50.0] * 50))

    assert (line["step_time_median"]["a"], line["step_time_p90"]["a"]) == (50.5, pytest.approx(90.1))
    assert line["steps_per_second"]["a"] == pytest.approx(100 / 5050)


def test_rates_are_over_the_steps_that_know_them(write, compared):
    a = write("a", [1.0] * 20 + [3.0] * 20, tokens=[100] * 20 + [None] * 20)
    assert compared(a, write("b", [1.0] * 40, tokens=100))["tokens_per_second"]["a"] == 100.0


@pytest.mark.requirement("R18")
def test_a_difference_larger_than_the_noise_is_told(write, compared):
    lines = compared(write("a", noisy(1, 100)), write("b", noisy(2, 100, seconds=1.05)))
    assert lines["step_time_median"]["verdict"] == lines["steps_per_second"]["verdict"] == "slower"
    assert lines["steps_per_second"]["low"] < 100 / 1.05 - 100 < lines["steps_per_second"]["high"] < 0


def test_equal_runs_are_seldom_told_apart(write, compared):
    pairs = [(write(f"a{seed}", noisy(seed, 60)), write(f"b{seed}", noisy(1000 + seed, 60))) for seed in range(12)]
    told = [compared(a, b)["steps_per_second"]["verdict"] for a, b in pairs]
    assert told.count("no measurable difference") >= 10, "99 % of draws; 3 to 6 % are expected to go wrong"


def test_one_slow_stretch_is_not_a_slower_run(write, compared):
    scattered = noisy(1, 100)
    scattered[::10] = [1.5] * 10
    a = write("a", noisy(2, 100))
    assert (
        compared(a, write("b", with_slow_stretch(noisy(1, 100))))["steps_per_second"]["verdict"]
        == "no measurable difference"
    )
    assert compared(a, write("c", scattered))["steps_per_second"]["verdict"] == "slower", "every block has one"


def test_too_few_steps_have_values_and_no_verdict(write, compared):
    line = compared(write("a", [1.0] * 24), write("b", [2.0] * 100))["step_time_median"]
    assert (line["a"], line["b"], line["change"], line["low"]) == (1.0, 2.0, 100.0, None)
    assert line["verdict"] == "too few steps"


@pytest.mark.requirement("R18")
def test_what_differs_is_listed_before_the_numbers(flopwatch, write):
    other = replace(
        PROVENANCE,
        mode="estimate",
        method="estimate",
        exact=False,
        attention="causal",
        coverage=None,
        peak={**PEAK, "device": "A100 SXM4 80GB", "dtype": "fp16", "flops_per_s": 312e12},
    )
    a = write("a", [1.0] * 30)
    b = write("b", [1.0] * 30, start=replace(START, world_size=8), provenance=other)
    _, out, _ = flopwatch("compare", a, b)

    listed = out[out.index("The runs differ in these") : out.index("step time, median")]
    facts = {
        "device": ("H100 SXM5 80GB", "A100 SXM4 80GB"),
        "world size": ("1", "8"),
        "dtype": ("bf16", "fp16"),
        "peak FLOP/s": ("4e+12", "3.12e+14"),
        "attention": ("full", "causal"),
        "mode": ("smart", "estimate"),
        "method": ("trace", "estimate"),
        "exact": ("yes", "no"),
        "coverage": ("1", "–"),
    }
    for what, (in_a, in_b) in facts.items():
        pattern = rf"^{what} +{re.escape(in_a)}  +{re.escape(in_b)}  +affects "
        assert re.search(pattern, listed, re.MULTILINE), (what, listed)
    assert listed.count("affects") == len(facts)
    assert "With several ranks, rates and shares are those of the rank that writes the log." in out


def test_totals_are_those_of_the_run_also_of_one_that_was_killed(compared, tmp_path):
    ended = write_run(tmp_path / "a", 100, Story(pads=False), ended=True)
    ledger = {"steps": 7, "totals": {"tokens": 70}, "seconds": {"train": 30.0, "eval": 10.0}}
    rows = [replace(row, ledger=ledger, values={"perf/goodput_percent": 75.0}) for row in rows_of([1.0] * 30)]
    killed = write_log(tmp_path / "b.jsonl", [START, *rows])
    lines = compared(str(ended), str(killed))

    assert (lines["total/steps"]["a"], lines["total/steps"]["b"]) == (100, 7)
    assert (lines["total/tokens"]["a"], lines["total/tokens"]["b"]) == (100 * 8 * 2048, 70)
    assert lines["total/model_flops"]["b"] is None
    assert lines["time/train_seconds"]["b"] == 30.0
    assert (lines["perf/goodput_percent"]["a"], lines["perf/goodput_percent"]["b"]) == (None, 75.0)
    assert lines["total/steps"]["verdict"] is None, "a longer run is not a faster one"


def test_recomputation_is_weighted_by_what_was_executed(write, compared, tmp_path):
    first, second, third = rows_of([1.0] * 30, hardware_flops=[100] * 10 + [300] * 20)
    told = [
        replace(first, values={"perf/recompute_percent": 10.0}),
        replace(second, values={"perf/recompute_percent": 20.0}),
    ]
    a = write_log(tmp_path / "a.jsonl", [START, *told, third])
    assert compared(str(a), write("b", [1.0] * 30))["recompute_percent"]["a"] == pytest.approx(17.5)


@pytest.mark.requirement("R18")
@pytest.mark.parametrize(("allowed", "status", "word"), [("2", 1, "failed"), ("10", 0, "passed")])
def test_the_gate_fails_where_b_is_slower_by_more_than_allowed(flopwatch, write, allowed, status, word):
    a, b = write("a", noisy(1, 100), tokens=10), write("b", noisy(2, 100, seconds=1.05), tokens=10)
    ended, out, err = flopwatch("compare", a, b, "--json", "--fail-if-slower", allowed)
    assert ended == status
    assert re.fullmatch(rf"{word}: tokens/s -4\.\d % \(slower\), and {allowed} % slower is allowed\n", err)
    assert json.loads(out)["lines"], "stdout stays JSON"
    assert flopwatch("compare", b, a, "--fail-if-slower", allowed)[0] == 0, "faster is allowed"


def test_the_gate_does_not_fail_on_noise(flopwatch, write):
    a, b = write("a", noisy(2, 100)), write("b", with_slow_stretch(noisy(1, 100)))
    status, _, err = flopwatch("compare", a, b, "--fail-if-slower", "1")
    assert status == 0
    assert re.fullmatch(r"passed: steps/s -[345]\.\d % \(no measurable difference\), and 1 % .*\n", err)


def test_the_gate_goes_by_work_that_counts(flopwatch, write):
    """Without padding a step has fewer positions; fewer positions per second are no loss if more of them are real."""
    a, b = write("a", [1.0] * 30, tokens=1000, real_tokens=500), write("b", [1.0] * 30, tokens=600, real_tokens=600)
    status, _, err = flopwatch("compare", a, b, "--fail-if-slower", "1")
    assert (status, "real tokens/s +20.0 %" in err) == (0, True)


def test_a_gate_that_cannot_judge_does_not_pass(flopwatch, write):
    status, _, err = flopwatch("compare", write("a", [1.0] * 10), write("b", [1.0] * 99), "--fail-if-slower", "5")
    assert status == 2
    assert "needs 25 timed steps after warm-up in each run, but A has 10 and B has 99" in err


def test_a_resumed_run_is_compared_by_the_steps_that_count(flopwatch, tmp_path):
    accounts = Accounts()
    path = write_log(tmp_path / LOG, session(Story(), 1, 60, accounts))
    write_log(path, session(Story(), 41, 80, accounts, 40), append=True)
    write_log(path, [summary_of(accounts, 80)], append=True)
    _, out, _ = flopwatch("compare", str(path), str(path), "--json")
    run = json.loads(out)["a"]
    assert (run["compared"], run["left_out"]) == (74, 6), "of 80 steps, three at the start of each session"


@pytest.mark.slow
@pytest.mark.requirement("R18")
def test_two_real_runs_of_which_one_waits_during_most_of_each_step(compared, tmp_path):
    """The wait is many times a step, and the other run has many steps, so that a busy machine changes no verdict."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    batch = torch.randn(16, 128)

    def train(name, steps, wait_seconds):
        with package.TrainingMonitor(
            tmp_path / name, model=model, peak_flops_per_s=1e12, quiet=True, strict=True
        ) as monitor:
            for _ in range(steps):
                with monitor.step(batch):
                    model(batch).sum().backward()
                    time.sleep(wait_seconds)
        return monitor.summary.values

    plain, slow = train("a", 400, 0.0), train("b", 40, 0.1)
    lines = compared(str(tmp_path / "a"), str(tmp_path / "b"))

    assert lines["step_time_median"]["verdict"] == lines["samples_per_second"]["verdict"] == "slower"
    assert lines["mfu_percent"]["verdict"] == "lower"
    for side, values in (("a", plain), ("b", slow)):
        assert lines["samples_per_second"][side] == pytest.approx(values["perf/samples_per_second"], rel=1e-6)
        assert lines["mfu_percent"][side] == pytest.approx(values["perf/mfu_percent"], rel=1e-6)
        assert lines["input_wait_percent"][side] == pytest.approx(values["perf/input_wait_percent"], rel=1e-3)
        assert lines["total/model_flops"][side] == values["total/model_flops"]


def test_goodput_is_told_to_contain_an_input_wait_that_is_unknown(flopwatch, write):
    summary = Summary(19, 3.0, {"perf/goodput_percent": 80.0})
    unknown = write("unknown", [0.1] * 20, summary=summary)
    known = write("known", [0.1] * 20, summary=summary, input_wait_seconds=0.0)
    sentence = "The input wait (–) is unknown, and counts as productive in goodput."
    assert sentence in flopwatch("compare", unknown, known)[1]
    assert sentence not in flopwatch("compare", known, known)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "what"), [(1000, "MFU; step times and rates are those of different"), (2000, "MFU and rates, not step")]
)
def test_runs_that_do_other_work_are_said_to_before_any_figure(flopwatch, write, tokens, what):
    a = write("a", noisy(1, 40), tokens=1000, model_flops=10**12)
    b = write("b", noisy(2, 40), tokens=tokens, model_flops=2 * 10**12)
    words = " ".join(flopwatch("compare", a, b)[1].replace("\n! ", "\n").split())
    said = (
        f"These runs do not do the same work: a step has 1.0 TFLOP in A and 2.0 TFLOP in B (+100.0 %). Compare {what}"
    )
    assert -1 < words.find(said) < words.find("step time, median")
    assert "do not do the same work" not in flopwatch("compare", a, a)[1]


def test_a_sweep_is_refused_with_what_to_use_instead(flopwatch, write, tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [])
    status, out, err = flopwatch("compare", str(write("a", [0.1] * 10)), str(sweep))
    assert (status, out) == (2, "")
    assert "`compare` compares two runs" in err
    assert "flopwatch report DIR --csv FILE" in err


@pytest.mark.requirement("R18")
def test_the_first_line_says_how_steps_changed_and_what_the_run_does_once(flopwatch, tmp_path):
    """A compiled run has faster steps, and a start of minutes, which the time per step of a short run hides."""
    plain = {"wall": 300.0, "start_up": 20.0, "train": 280.0, "model_at_peak": 3.0, "hardware_at_peak": 3.0}
    compiled = {**plain, "wall": 400.0, "compile_outside": 100.0, "compile": 30.0}
    folders = []
    for name, uses, seconds in (("plain", plain, 0.3), ("compiled", compiled, 0.2)):
        rows = list(rows_of([seconds] * 60, model_flops=10**10))
        rows[-1] = replace(rows[-1], ledger={"steps": 60, "totals": {"model_flops": 6e11}, "seconds": uses})
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / LOG, [START, PROVENANCE, *rows])
        folders.append(str(tmp_path / name))
    _, out, _ = flopwatch("compare", *folders)
    told = " ".join(out.split())
    assert told.startswith(
        "Two runs Steps take 33.3 % less time in B: 200 ms instead of 300 ms. MFU of the steps rises from 0.83 % to "
        "1.25 %. What a run does once (start-up, compilation, counting FLOPs) takes 2 min 10 s more in B."
    )
    assert "MFU of the whole run fell from 1.0 % to 0.75 %." in told, "0.25 points are a quarter"


def test_goodput_is_not_compared_if_it_leaves_out_the_time_in_which_a_loader_may_wait(flopwatch, tmp_path):
    quick = {"wall": 100.0, "train": 80.0, "passes_timed": 80.0, "outside_passes": 4.0}
    slow = {**quick, "wall": 180.0, "train": 160.0, "passes_timed": 160.0, "outside_passes": 84.0}
    logs = []
    for name, uses in (("quick", quick), ("slow", slow)):
        start, provenance, row = records_of(uses)
        (tmp_path / name).mkdir()
        row = replace(row, values={"perf/goodput_percent": 100 * goodput_of(uses).share})
        write_log(tmp_path / name / LOG, [start, provenance, row])
        logs.append(str(tmp_path / name))
    _, out, _ = flopwatch("compare", *logs, "--json")
    goodput = next(line for line in json.loads(out)["lines"] if line["key"] == "perf/goodput_percent")
    assert goodput["change"] is None
    assert "so it is not compared here" in " ".join(flopwatch("compare", *logs)[1].split())


def test_an_argument_of_the_script_is_not_said_to_affect_every_number(flopwatch, write):
    starts = [replace(START, what_ran={"arguments": [f"--max_iters={n}"]}) for n in (100, 200)]
    a, b = (write(name, [0.1] * 40, start=start) for name, start in zip("ab", starts, strict=True))
    line = next(line for line in flopwatch("compare", a, b)[1].splitlines() if "--max_iters" in line)
    assert line.split() == ["argument", "--max_iters", "100", "200"]

"""`flopwatch compare SWEEP_A SWEEP_B`: terminal, JSON, Markdown, the gate, and what cannot be compared."""

import json
import re
from dataclasses import replace

import pytest

from support.few_results import ended, ran
from support.hostile_sweep import hostile_results
from support.make_run_log import write_run
from testbeds.made_up_sweep import example_specs, make_result, write_sweep

SPECS = example_specs()[:12]


def slowed(result, factor):
    steps = result.measured.steps
    steps = replace(steps, median=steps.median * factor, low=steps.low * factor, high=steps.high * factor)
    return replace(
        result, measured=replace(result.measured, steps=steps), environment={**result.environment, "torch": "2.14.0"}
    )


@pytest.fixture
def sweeps(tmp_path):
    """The same matrix twice, the second time 1.5 times as slow; one trial more in each."""
    results = [make_result(spec, with_accidents=False) for spec in SPECS]
    before = write_sweep(tmp_path / "before", results[:-1])
    after = write_sweep(tmp_path / "after", [slowed(result, 1.5) for result in results[1:]])
    return str(before), str(after)


def test_text_tells_the_ratio_the_verdict_and_what_differs(flopwatch, sweeps):
    status, out, err = flopwatch("compare", *sweeps)
    assert (status, err) == (0, "")
    assert re.search(r"torch +2\.13\.0 +2\.14\.0", out)
    assert "10 of 10 pairs ran to their end in both" in out
    said = " ".join(out.split())
    assert "all time 1.500× 0 faster, 10 slower, 0 without a measurable difference" in said
    assert "Only in A, 1" in out
    assert "Only in B, 1" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_and_markdown_hold_the_same(flopwatch, sweeps, tmp_path):
    file = tmp_path / "c.md"
    status, out, err = flopwatch("compare", *sweeps, "--json", "--md", str(file))
    assert (status, err) == (0, f"Written: {file}\n")
    content = json.loads(out)
    assert content["overall"]["time"]["mean_ratio"] == pytest.approx(1.5)
    assert [pair["ratios"]["time"]["verdict"] for pair in content["pairs"]] == ["worse"] * 10
    assert file.read_text().count("**slower**") == 10


def test_markdown_goes_to_standard_output_for_a_dash(flopwatch, sweeps):
    status, out, _ = flopwatch("compare", *sweeps, "--md", "-")
    assert status == 0
    assert out.startswith("## Two sweeps compared")


def test_json_and_markdown_do_not_share_standard_output(flopwatch, sweeps):
    status, out, err = flopwatch("compare", *sweeps, "--json", "--md", "-")
    assert (status, out) == (2, "")
    assert "would both write to standard output" in err


def test_a_sweep_is_not_told_apart_from_itself(flopwatch, sweeps):
    status, out, _ = flopwatch("compare", sweeps[0], sweeps[0], "--fail-if-slower", "0")
    assert status == 0
    assert "The compared trials have the same settings" in out
    assert "0 faster, 0 slower, 11 without a measurable difference" in " ".join(out.split())


def test_the_gate_fails_for_slower_pairs_and_passes_what_is_allowed(flopwatch, sweeps):
    status, _, err = flopwatch("compare", *sweeps, "--fail-if-slower", "20")
    assert (status, "failed: 10 trials slower by more than 20 %" in err) == (1, True)
    status, _, err = flopwatch("compare", *sweeps, "--fail-if-slower", "60")
    assert (status, "passed: of 10 trials" in err) == (0, True)


def test_the_gate_fails_for_what_no_longer_runs_and_never_passes_unseen(flopwatch, tmp_path):
    a = [ran("standard", batch, 64) for batch in (1, 2)]
    write_sweep(tmp_path / "a", a)
    write_sweep(tmp_path / "b", [a[0], ended("standard", 2, 64, "error")])
    write_sweep(tmp_path / "c", [ended("standard", 2, 64, "error")])
    status, _, err = flopwatch("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-if-slower", "5")
    assert (status, "no longer ok" in err) == (1, True)
    status, _, err = flopwatch("compare", str(tmp_path / "a"), str(tmp_path / "c"), "--fail-if-slower", "5")
    assert (status, "needs a trial that both sweeps measured" in err) == (2, True)


def test_a_run_and_a_sweep_are_refused_in_both_orders(flopwatch, sweeps, tmp_path):
    write_run(tmp_path / "run", 20)
    for pair in ((sweeps[0], str(tmp_path / "run")), (str(tmp_path / "run"), sweeps[0])):
        status, out, err = flopwatch("compare", *pair)
        assert (status, out) == (2, "")
        assert "name two sweeps, or two runs" in err


def test_two_runs_are_compared_as_markdown_too(flopwatch, tmp_path):
    write_run(tmp_path / "run", 20)
    status, out, _ = flopwatch("compare", str(tmp_path / "run"), str(tmp_path / "run"), "--md", "-")
    assert status == 0
    assert "| step time, median |" in out


def test_hostile_text_is_shown_as_text_and_keeps_to_the_screen(flopwatch, tmp_path):
    # A trial's name is that of a folder, so it has no slash and no null.
    named = [
        replace(result, name=f"{place}{result.name}".replace("/", "|").replace("\0", "").replace("\ud83d", "")[:60])
        for place, result in enumerate(hostile_results())
    ]
    write_sweep(tmp_path / "a", named)
    write_sweep(tmp_path / "b", [replace(result, outcome="lost", name=result.name[::-1]) for result in named])
    status, out, err = flopwatch("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (status, err) == (0, "")
    assert "7 lost" in " ".join(out.split())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", out)
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_damaged_is_told(flopwatch, sweeps, tmp_path):
    with open(f"{sweeps[0]}/results.jsonl", "a") as stream:
        stream.write("{}\nnot json\n")
    assert "2 lines of results.jsonl cannot be read" in " ".join(flopwatch("compare", *sweeps)[1].split())
    _, _, err = flopwatch("report", sweeps[0], "--csv", str(tmp_path / "a.csv"))
    assert "2 lines of results.jsonl cannot be read" in err


def test_sweeps_with_different_axes_and_empty_ones_end_with_status_0(flopwatch, tmp_path, sweeps):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "sweep.json").write_text("{}")
    other = write_sweep(
        tmp_path / "other", [ran("mine:T", 7, 9, options={"a": 1}), ran("mine:T", 7, 9, options={"a": [2]}, seed=4)]
    )
    for one in (str(tmp_path / "empty"), str(other)):
        for pair in ((one, sweeps[0]), (sweeps[0], one), (one, one)):
            for words in ([], ["--json"], ["--md", "-"]):
                status, out, _ = flopwatch("compare", *pair, *words)
                assert status == 0
                assert out

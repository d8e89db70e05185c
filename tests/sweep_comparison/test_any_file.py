"""Whatever a damaged results file holds, table, comparison and tracked runs are made of what is left of it."""

import json
import random

import pytest

from flopwatch.cli.trials.tracking import trial_run
from flopwatch.present.json_form import to_json
from flopwatch.present.markdown import to_markdown
from flopwatch.report.capture import capture_sweep
from flopwatch.report.compared import sweeps_compared
from flopwatch.report.comparison import compare_sweeps
from flopwatch.report.table import make_table, table_csv, table_parquet
from testbeds.made_up_sweep import example_specs, make_result, write_sweep

VALUES = (
    None, True, -1, 0, 0.0, 1e308, -1e308, 5e-324, 10**400, 2**63, float("nan"), float("inf"), "", "4", "=1", "\ud83d",
    "[/x]", "\x1b[31m", [], [1], {}, {"a": {"b": [None]}}, {"": 1}, "x" * 10_000,
)  # fmt: skip


def spoiled(chance, content):
    """One or two values anywhere in it replaced, dropped, or added to."""
    for _ in range(chance.randint(1, 2)):
        place, key = content, chance.choice(list(content))
        while isinstance(place[key], dict) and place[key] and chance.random() < 0.8:
            place, key = place[key], chance.choice(list(place[key]))
        deed = chance.random()
        if deed < 0.15:
            del place[key]
        elif deed < 0.3:
            place[chance.choice(["new", "", "[/x]", "\ud83d"])] = chance.choice(VALUES)
        else:
            place[key] = chance.choice(VALUES)
        if not content:
            return content
    return content


@pytest.mark.parametrize("seed", range(4))
def test_nothing_in_a_results_file_ends_in_a_traceback(tmp_path, seed):
    chance = random.Random(seed)
    good = [make_result(spec).to_json() for spec in chance.sample(example_specs(), 40)]
    for result in good:
        result["spec"]["options"] = {"lr": 0.1, "layers": [1, 2]}
        result["earlier_attempts"] = [{"outcome": "lost"}]
        result["measured"]["privacy"] = {
            "epsilon": 1.0,
            "delta": 1e-5,
            "noise_multiplier": 1.0,
            "sample_rate": 0.1,
            "steps": 9,
            "accountant": "rdp",
        }
    whole = write_sweep(tmp_path / "whole", [])
    (whole / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in good))
    folder = write_sweep(tmp_path / "spoiled", [])
    lines = [json.dumps(spoiled(chance, json.loads(json.dumps(result)))) for result in good]
    (folder / "results.jsonl").write_text("\n".join(lines))
    a, b = capture_sweep(whole), capture_sweep(folder)
    assert len(a.results) == 40
    assert b.results
    for capture in (a, b):
        table = make_table(capture)
        table_csv(table).encode("utf-8")
        table_parquet(table)
        assert len(table.to_pandas()) == len(capture.results)
        json.dumps([trial_run(result, "s", None).config for result in capture.results.values()], allow_nan=False)
    for found in (compare_sweeps(a, b), compare_sweeps(b, a), compare_sweeps(b, b)):
        json.loads(to_json(found))
        to_markdown(sweeps_compared(found)).encode("utf-8")


def test_a_name_of_half_a_character_damages_its_own_line_only(tmp_path):
    folder = write_sweep(tmp_path, [make_result(spec) for spec in example_specs()[:2]])
    with (folder / "results.jsonl").open("a") as stream:
        stream.write(json.dumps({"name": "\ud83d", "outcome": 3}) + "\n")
    assert len(capture_sweep(folder).results) == 2

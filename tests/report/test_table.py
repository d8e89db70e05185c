"""The flat table of a sweep: one row per trial, as rows, as a data frame, as CSV."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch import report
from flopwatch.errors import InputError
from flopwatch.records.privacy import PrivacySpent
from flopwatch.records.trial import MemoryUse, TrialSpec
from flopwatch.report.capture import Capture
from flopwatch.report.table import make_table, table_csv
from support.few_results import ended, ran
from support.hostile_sweep import hostile_results
from testbeds.made_up_sweep import example_specs, make_result, write_sweep


def table_of(*results, missing=()):
    planned = {f"missing_{place}": spec for place, spec in enumerate(missing)}
    return make_table(Capture(Path("a-sweep"), {result.name: result for result in results}, planned))


def read_csv(table):
    return list(csv.DictReader(io.StringIO(table_csv(table))))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    specs = example_specs()
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "a sweep", [make_result(spec) for spec in specs[:-2]], specs)


def test_every_trial_is_a_row_with_the_numbers_that_stand_in_its_file(sweep):
    table = report.load(sweep)
    written = {line["name"]: line for line in map(json.loads, (sweep / "results.jsonl").read_text().splitlines())}
    assert len(table) == 240
    assert [row["outcome"] for row in table].count("missing") == 2
    for row in table:
        assert tuple(row) == table.columns
        if row["outcome"] == "ok":
            measured = written[row["trial"]]["measured"]
            assert row["step_seconds_median"] == measured["steps"]["median"]
            assert row["step_seconds_low"] == measured["steps"]["low"]
            assert row["peak_bytes"] == measured["memory"]["reserved_bytes"]
            assert row["model_flops"] == measured["cost"]["model_flops"]
            assert row["mfu"] == measured["cost"]["mfu"]
            assert (row["host"], row["torch"]) == ("node-a", "2.13.0")


def test_a_data_frame_is_made_from_the_table_itself(sweep):
    pandas = pytest.importorskip("pandas")
    table = report.load(sweep)
    frame = pandas.DataFrame(table)
    assert list(frame.columns) == list(table.columns)
    best = frame[frame["outcome"] == "ok"].groupby("trainer")["tokens_per_s"].max()
    for trainer in ("standard", "ghost"):
        assert best[trainer] == max(row["tokens_per_s"] or 0 for row in table if row["trainer"] == trainer)


def test_an_empty_sweep_has_all_columns_and_no_rows(tmp_path):
    (tmp_path / "sweep.json").write_text('{"format": 1, "trials": []}')
    table = report.load(tmp_path)
    assert len(table) == 0
    assert len(table_csv(table).splitlines()) == 1


def test_csv_gives_back_what_the_rows_hold(sweep):
    pandas = pytest.importorskip("pandas")
    table = report.load(sweep)
    by_csv = pandas.read_csv(io.StringIO(table_csv(table)), dtype={"key": str})
    assert list(by_csv.columns) == list(table.columns)
    for name in table.columns:
        for row, found in zip(table, by_csv[name], strict=True):
            assert (row[name] is None and pandas.isna(found)) or row[name] == found, name


def test_a_sweep_s_options_and_reported_numbers_have_columns_of_their_own_after_the_others():
    few = [
        ran("standard", 4, 64, options={"lr": 0.1, "rank": 8, "on": True, "layers": [1, 2]}),
        ended("standard", 8, 64, "error", options={"lr": 1, "mode": "fast"}),
        ran("standard", 16, 64, options={"mode": 3}),
    ]
    few[0] = replace(few[0], measured=replace(few[0].measured, extra={"loss": 2.5}))
    table = table_of(*few)
    assert table.columns[-6:] == (
        "options.layers",
        "options.lr",
        "options.mode",
        "options.on",
        "options.rank",
        "extra.loss",
    )
    assert [row["options.lr"] for row in table] == [0.1, 1, None]
    assert table[0]["options.layers"] == "[1, 2]"
    assert [row["options.mode"] for row in read_csv(table)] == ["", "fast", "3"]
    assert table.columns[: len(report.COLUMNS)] == tuple(column.name for column in report.COLUMNS)


def test_only_ok_trials_have_figures_and_privacy_and_attempts_are_told():
    good = ran("ghost", 4, 64, gib=1, mfu=0.5)
    spent = PrivacySpent(1.5, 1e-5, 1.1, 0.01, 1000, "rdp")
    good = replace(good, measured=replace(good.measured, privacy=spent), earlier_attempts=({"outcome": "lost"},))
    failed = replace(good, outcome="oom_device", name="failed")
    not_run = ended("ghost", 8, 64, "oom_inferred", unix_time=None, seconds=None)
    ok, oom, inferred = table_of(good, failed, not_run)
    assert (ok["epsilon"], ok["delta"], ok["noise_multiplier"], ok["privacy_steps"]) == (1.5, 1e-5, 1.1, 1000)
    assert (ok["attempts"], inferred["attempts"]) == (2, 0)
    assert (ok["peak_bytes"], ok["mfu"]) == (2**30, 0.5)
    assert [oom[name] for name in ("peak_bytes", "mfu", "step_seconds_median", "reserved_bytes", "epsilon")] == [
        None
    ] * 5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "4", [4], {"a": 1}, True])
def test_what_is_no_number_is_not_known(value):
    good = ran("standard", 4, 64, gib=1)
    measured = replace(good.measured, parameters=value, phase_seconds={"forward": value}, extra={"x": value})
    table = table_of(replace(good, measured=measured, seconds=value, spec=replace(good.spec, threads=value)))
    (row,) = table
    assert [row[name] for name in ("parameters", "forward_seconds", "total_seconds", "threads")] == [None] * 4
    table_csv(table)


def test_an_epsilon_without_noise_is_infinite_and_not_unknown():
    good = ran("dpsgd", 4, 64)
    table = table_of(
        replace(good, measured=replace(good.measured, privacy=PrivacySpent(math.inf, 1e-5, 0, 0.01, 9, "rdp")))
    )
    assert table[0]["epsilon"] == math.inf
    assert read_csv(table)[0]["epsilon"] == "inf"


@pytest.mark.parametrize(
    "text",
    [
        "=1+1",
        "+1",
        "-x",
        "@SUM(A1)",
        "\t=1",
        " \n=cmd|' /C calc'!A0",
        "\r=1",
        "＝1",
        "a;=1",
        "a; =1",
        "a\t@x",
        "a\n+1",
        "\x1b[31m=1",
    ],
)
def test_no_cell_of_a_csv_is_a_formula(text):
    result = ended("standard", 4, 64, "error", reason=text, options={"a": text, text: 1})
    table = table_of(result)
    (row,) = read_csv(table)
    # Some spreadsheets end a cell at a semicolon, and do not see quotes that are not at its beginning.
    for part in re.split("[;\t\n]", "\n".join([*row, *row.values()])):
        assert not part.strip().startswith(("=", "+", "-", "@", "＝")), part
    assert table[0]["reason"] == text


def test_negative_numbers_are_numbers_and_not_formulas():
    (row,) = read_csv(table_of(ended("standard", 4, 64, "error", options={"bias": -0.5}, seed=-3)))
    assert (row["options.bias"], row["seed"]) == ("-0.5", "-3")


def test_hostile_text_keeps_to_its_cell():
    pytest.importorskip("pandas")
    results = hostile_results()
    results.append(ended("standard", 4, 64, "error", reason='quote " and, comma\nand a new line;\ttab \ud83d \x00'))
    table = table_of(*results)
    text = table_csv(table)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", text)
    rows = read_csv(table)
    assert len(rows) == len(results)
    assert all(None not in row and None not in row.values() for row in rows)
    assert rows[-1]["reason"].startswith('quote " and, comma\nand a new line;\ttab \\ud83d')


def test_a_plan_of_many_kinds_of_options_misses_nothing():
    spec = TrialSpec("standard", "tiny", 4, 64, options={"lr": None})
    (row,) = table_of(missing=[spec])
    assert (row["outcome"], row["options.lr"], row["reason"], row["attempts"]) == ("missing", None, None, None)


def test_a_folder_that_is_no_sweep_is_told(tmp_path):
    with pytest.raises(InputError, match="not the folder of a sweep"):
        report.load(tmp_path)


def test_loading_a_sweep_loads_neither_torch_nor_pandas(sweep):
    code = (
        f"import sys, flopwatch\nassert len(flopwatch.report.load({str(sweep)!r})) == 240\n"
        "print([name for name in ('torch', 'pandas', 'rich.console') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_column_stands_in_the_documentation_in_its_order():
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    table = page[page.index("| columns, always in this order") :]
    found = re.findall(r"`([a-z0-9_]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert found[: len(report.COLUMNS)] == [column.name for column in report.COLUMNS]


def test_host_memory_says_how_it_was_counted_and_what_was_not_measured_is_told():
    good = ran("standard", 4, 64)
    uses = [MemoryUse(host_bytes=7, host_method="rss"), MemoryUse(host_bytes=5, host_method="samples"), MemoryUse()]
    results = [
        replace(good, name=str(place), measured=replace(good.measured, memory=memory, not_measured={"flops": "killed"}))
        for place, memory in enumerate(uses)
    ]
    rows = table_of(*results)
    assert [(row["host_bytes"], row["host_method"]) for row in rows] == [(7, "rss"), (5, "samples"), (None, None)]
    assert rows[0]["not_measured"] == "flops: killed"

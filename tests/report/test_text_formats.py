"""Markdown that nothing in it breaks, JSON that any parser takes."""

import json
import math
import re
from dataclasses import replace

import pytest

from flopwatch.present.markdown import escaped, fenced, to_markdown
from flopwatch.report.sweep.document import sweep_document, sweep_json
from support.few_results import ended, ran, summary_of
from support.hostile_sweep import hostile_results
from testbeds.made_up_sweep import example_specs, make_result


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_json_has_every_trial_and_the_whole_summary():
    results = [make_result(spec) for spec in example_specs()]
    content = json.loads(sweep_json(summary_of(*results)), parse_constant=refuse)
    assert {row["name"] for row in content["trials"]} == {result.name for result in results}
    assert content["totals"]["trials"] == len(results)
    assert {"groups", "failures", "trainers", "environments", "warnings"} <= content.keys()
    assert {"choices", "frontier", "cells"} <= content["groups"][0].keys()


def test_what_is_not_finite_is_null_in_json():
    good = ran("standard", 4, 64, gib=1)
    steps = replace(good.measured.steps, median=math.nan, low=-math.inf, high=math.inf)
    odd = replace(good, measured=replace(good.measured, steps=steps, tokens_per_s=math.nan), seconds=math.inf)
    odd = replace(odd, outcome="error", evidence={"load": math.nan})
    broken_but_ok = replace(odd, outcome="ok", name="second")
    content = json.loads(sweep_json(summary_of(odd, broken_but_ok)), parse_constant=refuse)
    assert content["failures"][0]["evidence"] == {"load": None}
    assert content["trials"][0]["measured"]["seconds"] is None


def test_json_keeps_text_as_it_was():
    content = json.loads(sweep_json(summary_of(*hostile_results())))
    assert any("\u202eevil" in row["name"] for row in content["trials"])


def test_every_markdown_table_has_as_many_cells_in_each_row_as_in_its_head():
    for results in ([make_result(spec) for spec in example_specs()], hostile_results()):
        text = to_markdown(sweep_document(summary_of(*results)))
        text = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
            cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(cells) == 1, table


def test_hostile_markdown_stays_text():
    text = to_markdown(sweep_document(summary_of(*hostile_results())))
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<script", outside)
    assert not re.search(r"(?<!\\)\]\(http", outside)
    assert "@somebody" not in outside
    text.encode("utf-8")


def test_a_fence_is_longer_than_any_fence_in_its_text():
    assert fenced("a\n`````\nb").startswith("``````text\n")


def test_markup_is_escaped():
    assert escaped("a_b*c|d") == r"a\_b\*c\|d"


@pytest.mark.parametrize("results", [[], [ended("standard", 4, 64, "error")], [ended("standard", 4, 64, "ok")]])
def test_bare_sweeps_make_markdown_and_json(results):
    summary = summary_of(*results)
    assert ("What to run" if results else "has no trials") in to_markdown(sweep_document(summary))
    assert json.loads(sweep_json(summary))["totals"]["trials"] == len(results)

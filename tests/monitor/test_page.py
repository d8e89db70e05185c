"""What docs/reference/settings.md says of presets is what the code says, and every metric has a description."""

import re
from pathlib import Path

import pytest
import yaml

from flopwatch.monitor.config import PRESETS, read_config
from flopwatch.records.metrics import METRICS, find_metric

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
YAML = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", [block for block in YAML if block.startswith("# ")])
def test_the_presets_are_what_the_page_says(block):
    name = block.splitlines()[0].removeprefix("# ")
    assert read_config(yaml.safe_load(block))[0] == read_config(None, name)[0]


def test_every_preset_is_on_the_page():
    assert {block.splitlines()[0] for block in YAML} >= {f"# {name}" for name in PRESETS}


def test_every_key_has_a_unit_or_is_a_plain_number_and_a_sentence():
    for metric in METRICS.values():
        assert metric.description.endswith("."), metric
        assert metric.group in {"training", "perf", "counters", "total", "time", "ranks"}
        assert find_metric(metric.key) is metric

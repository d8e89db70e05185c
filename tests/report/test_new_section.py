"""The new section that CONTRIBUTING.md shows as a diff takes few lines and is in every form of the report."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.report.sweep import document
from support.few_results import summary_of
from testbeds.documents import document_text
from testbeds.made_up_sweep import example_specs, make_result

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
MOST_LINES = 20


@pytest.fixture
def lines():
    block = re.search(r"```diff\n(.*?)  ```", CONTRIBUTING.read_text(), re.DOTALL)[1]
    return [line[2:] for line in block.splitlines()]


def test_the_diff_has_few_lines(lines):
    assert 5 < sum(line.startswith("+") for line in lines) <= MOST_LINES


def test_every_form_shows_the_section_once_the_diff_is_applied(lines, monkeypatch):
    source = Path(document.__file__).read_text()
    for hunk in "\n".join(lines).split("\n@@\n"):
        before = "\n".join(line[1:] for line in hunk.splitlines() if line.startswith(" "))
        context = [line for line in hunk.splitlines() if line.startswith(" ")]
        after = "\n".join(line[1:] for line in hunk.splitlines())
        assert all(source.count(line[1:]) == 1 for line in context), before
        source = source.replace(before, after)
    changed = ModuleType("changed_document")
    monkeypatch.setitem(sys.modules, "changed_document", changed)
    exec(compile(source, "changed_document", "exec"), changed.__dict__)
    results = [make_result(spec) for spec in example_specs()]
    longest = max(results, key=lambda result: result.seconds or 0).name
    made = changed.sweep_document(summary_of(*results))
    for form in (document_text(made, 100), to_markdown(made).replace("\\", ""), to_page(made)):
        _, _, section = form.rpartition("The longest trials")
        assert longest in section[:3000]

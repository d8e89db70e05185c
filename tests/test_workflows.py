"""The workflows of GitHub: none has run yet, so what can be checked without GitHub is checked here."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_its_commit_and_names_its_release(workflow):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", action), action


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_says_more(workflow):
    permissions = yaml.safe_load(workflow.read_text())["permissions"]
    assert permissions in ({"contents": "read"}, "read-all")


def test_every_target_that_ci_calls_is_in_the_makefile():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = re.findall(r"\bmake ([\w-]+)", (ROOT / ".ci" / "run").read_text())
    assert called
    assert set(called) <= set(targets)


def test_every_line_of_the_campaigns_list_names_a_test():
    for line in (ROOT / "tests" / "campaign.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            file, _, names = re.split(r"\[| 1/", line)[0].partition("::")
            source = (ROOT / file).read_text()
            assert all(re.search(rf"\b(def|class) {name}\b", source) for name in filter(None, names.split("::"))), line


def test_a_share_is_one_of_the_cases_that_nothing_else_leaves_out(monkeypatch):
    spec = importlib.util.spec_from_file_location("conftest_of_the_root", ROOT / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    monkeypatch.setattr(conftest, "_ONE_OF", {"test_a.py::test_a": 3})
    monkeypatch.setattr(conftest, "_LISTED", {"test_a.py::test_a[1]"})
    added = {}

    def item(case):
        closest = "a mark" if case == "2" else None
        added[case] = []
        return SimpleNamespace(
            nodeid=f"test_a.py::test_a[{case}]",
            get_closest_marker=lambda name: closest,
            add_marker=added[case].append,
        )

    for case in "0123456789":
        conftest.pytest_itemcollected(item(case))
    assert [case for case in added if not added[case] and case != "2"] == ["0", "5", "8"]

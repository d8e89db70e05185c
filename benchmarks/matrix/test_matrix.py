"""Tests the matrix without building an environment: what it reads, passes on and writes."""

import re
from pathlib import Path

import pytest

from matrix import environments, rows, suite, tables
from matrix.__main__ import RESULTS

REPORT = """<testsuites><testsuite time="12.5"><properties>
<property name="missing" value="no `_a`: by step&#9;no `_b`"/>
</properties>
<testcase classname="tests.flops.t" name="test_a_count_equals_the_truth_to_the_flop[llama]">
<properties><property name="architecture" value="llama"/><property name="method" value="trace"/></properties>
</testcase>
<testcase classname="tests.flops.t" name="test_a_count_equals_the_truth_to_the_flop[mixtral]">
<properties><property name="architecture" value="mixtral"/><property name="method" value="step"/></properties>
</testcase>
<testcase classname="tests.flops.t" name="test_a_count_equals_the_truth_to_the_flop[gpt2]">
<properties><property name="architecture" value="gpt2"/><property name="method" value="trace"/></properties>
<failure message="1 != 2"/></testcase>
<testcase classname="tests.flops.t" name="test_a_count_equals_the_truth_to_the_flop[qwen9]">
<skipped message="transformers 4 has no Qwen9"/></testcase>
<testcase classname="tests.x" name="test_compiled"><skipped message="this torch cannot compile"/></testcase>
</testsuite></testsuites>"""


def outcome_of(tmp_path: Path) -> suite.Outcome:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    outcome = suite.Outcome(
        "torch2.6.0-py3.10",
        "3.10.13",
        day="2026-11-18",
        commit="abc1234",
        versions={"torch": "2.6.0+cu124", "numpy": "1.26.4"},
    )
    suite._read(report, outcome)
    return outcome


def test_a_wrong_count_is_failed_and_an_absent_architecture_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path)

    assert outcome.equal_architectures == ["llama", "mixtral"]
    assert outcome.counted_by_step == ["mixtral"]
    assert outcome.absent_architectures == ["qwen9"]
    assert (outcome.passed, len(outcome.failed), outcome.is_green) == (2, 1, False)


def test_the_table_says_what_failed_and_what_is_lacking(tmp_path: Path) -> None:
    row = tables.long_table([outcome_of(tmp_path)]).splitlines()[-1]

    assert "| 2.6.0 | 3.10.13 |" in row
    assert "2 passed, **1 failed**: test_a_count_equals_the_truth_to_the_flop[gpt2]" in row
    assert "| 2 / 3 |" in row
    assert "transformers has no qwen9; counted by a real step: mixtral; this torch cannot compile; no `_a`" in row
    assert ": by step; no `_b` | 2026-11-18, `abc1234` |" in row


@pytest.mark.skipif(not (environments.ROOT / ".git").exists(), reason="this is no clone of the repository")
def test_the_commit_of_every_row_is_in_the_repository() -> None:
    if (
        environments.run(["git", "-C", str(environments.ROOT), "rev-parse", "--is-shallow-repository"]).stdout
        != "false\n"
    ):
        pytest.skip("this clone has only the newest commits")
    for outcome in suite.read_results(RESULTS).values():
        if outcome.commit:
            known = environments.run(
                ["git", "-C", str(environments.ROOT), "cat-file", "-e", outcome.commit], check=False
            )
            assert known.returncode == 0, f"{outcome.name} ran at {outcome.commit}, which is not in the repository"


def test_a_package_that_the_install_changed_makes_the_row_red() -> None:
    environment = environments.Environment(
        Path(), {"numpy": "1.26.4", "torch": "2.6.0"}, {"numpy": "2.1.0", "rich": "1"}
    )

    assert environment.changes() == ["numpy 1.26.4 -> 2.1.0", "torch 2.6.0 -> removed"]
    assert not suite.Outcome("x", "3", passed=40, changed_packages=environment.changes()).is_green


def test_what_pip_is_configured_with_is_passed_on_to_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/wheels /other/wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    environments.pip_settings.cache_clear()
    try:
        assert environments.pip_sources() == [
            "--find-links=/some/wheels",
            "--find-links=/other/wheels",
            "--index-url=https://index.example/simple",
            "--index-strategy=unsafe-best-match",
        ]
    finally:
        environments.pip_settings.cache_clear()


def test_rows_are_chosen_by_torch_by_python_and_by_age() -> None:
    assert [row.name for row in rows.chosen(["2.15-py3.13", "oldest"])] == ["torch2.15.0-py3.13", "torch2.6.0-py3.10"]
    assert rows.chosen(["2.6-py3.10-lowest"]) == rows.chosen(["lowest"]) != rows.chosen(["2.6-py3.10"])
    with pytest.raises(SystemExit, match=r"There is no row '2\.1'"):
        rows.chosen(["2.1"])


def test_the_workflow_runs_every_row() -> None:
    workflow = (environments.ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = re.findall(r"- (2\.\d+\.\d+-py\S+)", workflow)

    assert [f"torch{name}" for name in listed] == [row.name for row in rows.ROWS]

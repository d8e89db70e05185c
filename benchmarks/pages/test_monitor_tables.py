"""The tables in docs/monitoring.md are those that the command writes."""

from pages.monitor_tables import PAGE, page_with_tables


def test_the_tables_are_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(text) == text, "run: python benchmarks/pages/monitor_tables.py"

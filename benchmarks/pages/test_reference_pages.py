"""The tables in the docs that come from the code are those that the command writes."""

import pytest

from pages.reference_pages import DOCS, TABLES, with_tables


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_of_a_page_are_up_to_date(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert with_tables(page, text) == text, "run: make pages"

"""A document says the same in a terminal, in Markdown and on a page, and no text of a user becomes markup."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.present.document import (
    Bar,
    Bars,
    Cell,
    Document,
    Facts,
    Grid,
    Head,
    Items,
    Most,
    Only,
    Section,
    Several,
    Text,
    Tiles,
    Verbatim,
    numbers,
)
from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from testbeds.documents import document_text

EVIL = "<script>alert(1)</script> [red] **b** `x` |\x1b[31m\u202e @user"


def forms(*parts, **settings):
    document = Document("runs/a", parts, kind="Sweep", **settings)
    return document_text(document), to_markdown(document), to_page(document)


def many_parts(text):
    table = Grid((text, *numbers("seq")), [(Cell(text, "best", detail=text), "1")], title=text, note=text)
    return [
        Text(text, "warn"),
        Tiles([(text, text)]),
        Section(
            text,
            [Items([text]), Facts([(text, text)]), Verbatim(text, title=text), table],
            lead=[Cell(text, "chip")],
            remark=text,
            is_open=False,
        ),
        Bars([Bar(text, 0.2, 0.7, text, "loss", tip=text)], title=text),
        Several([Text(text)] * 3, Most(1, 1, 1), text, names=[text] * 3),
    ]


@pytest.mark.slow
@given(st.text(max_size=40))
def test_any_text_can_be_shown_in_every_form(text):
    assert all(forms(*many_parts(text), lead=[text]))


def test_no_text_becomes_markup_or_steers_the_terminal():
    terminal, markdown, page = forms(*many_parts(EVIL), lead=[EVIL])
    assert "\x1b" not in terminal + markdown + page
    assert "\u202e" not in terminal + markdown + page
    assert "<script>alert" not in page
    outside_of_blocks = re.sub(r"(?s)```text.*?```", "", markdown)
    assert "<script>" not in outside_of_blocks.replace("\\<", "")
    assert "[red]" in terminal


def test_a_page_may_load_nothing_and_runs_its_own_script_only():
    page = forms(Text("a"))[2]
    assert "default-src 'none'" in page
    assert "http://" not in page
    assert "https://" not in page


@pytest.mark.parametrize(("form", "shown"), [(0, 2), (1, 3), (2, 4)])
def test_each_medium_shows_as_many_rows_as_it_can_and_says_how_many_are_left_out(form, shown):
    table = Grid(numbers("n"), [[f"row{place}"] for place in range(9)], most=Most(2, 3, 4))
    said = forms(table)[form]
    assert len(re.findall(r"row\d", said)) == shown
    assert f"{shown} of 9 rows are shown; " in said


def test_rows_that_are_spaced_have_the_first_and_the_last():
    table = Grid(numbers("n"), [[f"row{place}"] for place in range(9)], most=Most(3, 3, 3), is_spaced=True)
    for said in forms(table):
        assert re.findall(r"row\d", said) == ["row0", "row4", "row8"]
        assert "3 of 9 rows are shown, evenly spaced" in said


def test_a_narrow_terminal_gets_a_wide_table_in_pieces_that_repeat_what_names_the_row():
    columns = numbers("seq", *(f"trainer {place}" for place in range(9)))
    said = document_text(Document("a", [Grid(columns, [["512", *(f"value {place}" for place in range(9))]])]), 40)
    assert max(map(len, said.splitlines())) <= 40
    assert all(f"value {place}" in said for place in range(9))
    assert said.count("512") > 2


def test_a_column_may_be_for_one_medium_only():
    table = Grid(["a", Head("verdict", only=("html",))], [["x", "it is faster"]])
    terminal, markdown, page = forms(table)
    assert "it is faster" not in terminal + markdown
    assert "it is faster" in page


def test_equal_texts_of_the_first_column_are_not_repeated_where_rows_are_merged():
    table = Grid(numbers("seq", "batch"), [["512", "1"], ["512", "2"], ["1024", "1"]], merges=True)
    terminal, markdown, page = forms(table)
    assert [text.count("512") for text in (terminal, markdown)] == [1, 2]
    assert page.count(">512<") == 1


def test_parts_may_be_for_some_media_only():
    terminal, markdown, page = forms(Only(("terminal", "html"), [Text("look")]))
    assert "look" in terminal
    assert "look" in page
    assert "look" not in markdown


def test_what_a_medium_leaves_out_is_named_and_it_says_what_has_it():
    sections = [Section(f"group {place}", [Text("a")]) for place in range(9)]
    terminal, markdown, page = forms(Several(sections, Most(2, 3, 4), "more groups", [one.title for one in sections]))
    assert "7 more groups (group 2; group 3; group 4; group 5; ...); --html and --json have all" in " ".join(
        terminal.split()
    )
    assert "6 more groups; the HTML and JSON reports have all." in markdown
    assert "5 more groups; the JSON report has all." in page


def test_sections_with_a_key_are_linked_from_the_top_of_the_page():
    page = forms(Section("What to run", key="run"), Section("A long title", key="b", link="Short"))[2]
    assert '<nav><a href="#run">What to run</a><a href="#b">Short</a></nav>' in page


def test_a_long_word_is_not_broken_so_that_it_can_be_copied():
    path = "/very" * 40
    assert path in document_text(Document("a", [Text(f"Look into {path} for more")]), 60)

"""The tables in the docs that come from the code are those that the command writes."""

import shutil

import pytest

from pages.reference_pages import DOCS, TABLES, with_tables, write

SETTINGS = "reference/settings.md"


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_of_a_page_are_up_to_date(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert with_tables(page, text) == text, "run: make pages"


@pytest.mark.parametrize("page", sorted(TABLES.keys() - {"design.md"}))
def test_the_chinese_tables_are_up_to_date(page, copy, capsys):
    write(page, copy)

    assert (copy / "zh" / page).read_text("utf-8") == (DOCS / "zh" / page).read_text("utf-8"), "run: make pages"
    assert "stays as it is" not in capsys.readouterr().out


def test_what_has_changed_comes_into_the_chinese_page(copy):
    for path in (copy / SETTINGS, copy / "zh" / SETTINGS):
        lines = path.read_text("utf-8").replace("| `10.0` |", "| `9.0` |").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.startswith("| `mode`")), "utf-8")

    write(SETTINGS, copy)

    assert (copy / "zh" / SETTINGS).read_text("utf-8") == (DOCS / "zh" / SETTINGS).read_text("utf-8")


def test_a_description_that_is_translated_anew_comes_into_the_chinese_page(copy):
    path = copy / "zh" / SETTINGS
    path.write_text(path.read_text("utf-8").replace("怎样得到 FLOPs。", "旧的译文。"), "utf-8")

    write(SETTINGS, copy)

    assert path.read_text("utf-8") == (DOCS / "zh" / SETTINGS).read_text("utf-8")


@pytest.fixture
def copy(tmp_path):
    for page in TABLES.keys() - {"design.md"}:
        for path in (page, f"zh/{page}"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(DOCS / path, tmp_path / path)
    return tmp_path

"""What a command writes into an English page comes into its Chinese page too."""

from pathlib import Path

import pytest

from pages.chinese_tables import carry_over, translated

DOCS = Path(__file__).parents[2] / "docs"
OLD = "Made on 2026-11-15 with 3 of 4 tools.\n\n| tool | exact |\n| --- | --- |\n| one | exact |\n| two | 3 of 4 |"
OLD_CHINESE = "2026-11-15 生成，用了 3 / 4 个工具。\n\n| 工具 | 精确 |\n| --- | --- |\n| one | exact |\n| two | 3 / 4 |"
NEW = (
    "Made on 2026-12-01 with 5 of 6 tools.\n\n| tool | exact |\n| --- | --- |\n| two | 5 of 6 |\n| three | none of 6 |"
)
NEW_CHINESE = (
    "2026-12-01 生成，用了 5 / 6 个工具。\n\n| 工具 | 精确 |\n| --- | --- |\n| two | 5 / 6 |\n| three | none of 6 |"
)


def test_known_words_are_translated_with_the_new_numbers_and_others_stay_english():
    assert translated(NEW, OLD, OLD_CHINESE) == NEW_CHINESE


def test_numbers_in_another_order_are_not_guessed():
    assert translated("7 of 9", "3 of 4", "4 个中 3 个") == "7 of 9"
    assert translated("3 of 4", "3 of 4", "4 个中 3 个") == "4 个中 3 个"


def test_only_what_is_between_the_markers_changes(tmp_path):
    page = _pages(tmp_path, f"# 页\n\n<!-- a -->\n\n{OLD_CHINESE}\n\n<!-- b -->\n\n完。\n")
    carry_over(page, OLD, NEW, ("<!-- a -->", "<!-- b -->"))
    assert _chinese(page) == f"# 页\n\n<!-- a -->\n\n{NEW_CHINESE}\n\n<!-- b -->\n\n完。\n"


def test_a_whole_page_keeps_its_last_comment(tmp_path):
    page = _pages(tmp_path, f"{OLD_CHINESE}\n\n<!-- translated from 1234 -->\n")
    carry_over(page, OLD, NEW)
    assert _chinese(page) == f"{NEW_CHINESE}\n\n<!-- translated from 1234 -->\n"


def test_a_page_of_another_structure_stays_as_it_is(tmp_path, capsys):
    page = _pages(tmp_path, "一段。\n")
    carry_over(page, OLD, NEW)
    assert _chinese(page) == "一段。\n"
    assert "stays as it is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("accuracy.md", "<!-- table: python benchmarks/accuracy/accuracy_table.py -->", "<!-- end -->"),
        ("overhead.md", "<!-- table: python benchmarks/overhead/monitor_overhead.py -->", "<!-- end -->"),
        ("scale.md", "<!-- growth -->", "<!-- /growth -->"),
        ("scale.md", "<!-- simulate -->", "<!-- /simulate -->"),
        ("loops.md", "# ", None),
        ("zoo.md", "# ", None),
    ],
)
def test_the_parts_of_the_pages_have_the_same_structure(name, start, end):
    english, chinese = ((DOCS / folder / name).read_text(encoding="utf-8") for folder in ("", "zh"))
    english, chinese = (text.split(start, 1)[1].partition(end or "\n<!--")[0].strip() for text in (english, chinese))
    assert translated(english, english, chinese) == chinese


def _pages(folder: Path, chinese: str) -> Path:
    (folder / "zh").mkdir()
    (folder / "zh" / "page.md").write_text(chinese, encoding="utf-8")
    return folder / "page.md"


def _chinese(page: Path) -> str:
    return (page.parent / "zh" / page.name).read_text(encoding="utf-8")

"""docs/requirements.md and the marks on the tests say the same."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def rows() -> dict[str, str]:
    text = (ROOT / "docs" / "requirements.md").read_text()
    return dict(re.findall(r"^\| (R\d+) \|(.*)$", text, re.MULTILINE))


def marked() -> dict[str, set[str]]:
    """Rows named in marks, with the test files that carry them."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for row in re.findall(r'@pytest\.mark\.requirement\("(R\d+)"\)', path.read_text()):
            found.setdefault(row, set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_row_is_listed_once() -> None:
    assert list(rows()) == [f"R{number}" for number in range(1, 28)]


def test_every_marked_test_stands_on_its_row() -> None:
    for row, files in marked().items():
        for file in files:
            assert file in rows()[row], f"{file} is marked {row} but its row does not name it"


def test_every_file_a_row_names_exists() -> None:
    for row, text in rows().items():
        for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / file).exists(), f"{row}: {file}"
            assert row in (ROOT / file).read_text(), f"{file} does not carry the mark {row}"

"""docs/requirements.md and the marks on the tests name each other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TEST_FILE = re.compile(r"`((?:tests|benchmarks)/[\w/]+\.py)`")


def rows() -> dict[str, str]:
    text = (ROOT / "docs" / "requirements.md").read_text()
    return dict(re.findall(r"^\| (R\d+) \|(.*)$", text, re.MULTILINE))


def requirement_marks(code: str) -> Iterator[str]:
    """Every row named in a call of `pytest.mark.requirement`, on whatever it stands and however many rows it names."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requirement":
            yield from (ast.literal_eval(row) for row in node.args)


def marked() -> dict[str, set[str]]:
    """By row, the test files that carry its mark."""
    found: dict[str, set[str]] = {}
    for folder in ("tests", "benchmarks"):
        for path in (ROOT / folder).rglob("test_*.py"):
            for row in requirement_marks(path.read_text()):
                found.setdefault(row, set()).add(str(path.relative_to(ROOT)))
    return found


def test_marks_are_found_with_several_rows_on_modules_and_on_single_cases() -> None:
    code = """
pytestmark = [pytest.mark.slow, pytest.mark.requirement("R1")]
@pytest.mark.requirement("R2", "R3")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.requirement("R4"))])
def test_something(x): "not R5"
"""
    assert sorted(requirement_marks(code)) == ["R1", "R2", "R3", "R4"]


def test_every_row_is_listed_once() -> None:
    assert list(rows()) == [f"R{number}" for number in range(1, 28)]


def test_every_marked_test_stands_on_its_row() -> None:
    for row, files in marked().items():
        named = set(_TEST_FILE.findall(rows()[row]))
        assert files <= named, f"marked {row}, but its row does not name them: {sorted(files - named)}"


def test_every_file_a_row_names_exists_and_carries_its_mark() -> None:
    marks = marked()
    for row, text in rows().items():
        for file in _TEST_FILE.findall(text):
            assert (ROOT / file).exists(), f"{row}: {file}"
            assert file in marks.get(row, set()), f"{file} does not carry the mark {row}"

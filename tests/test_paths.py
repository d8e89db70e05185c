"""Every path of the repository that a page or conftest.py names is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "flopwatch"
FOLDERS = (ROOT, PACKAGE, ROOT / "benchmarks")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
HOUSE = ROOT / "docs" / "house.md"
"""Its bare names are all of files of flopwatch; other pages name `train.py` too."""
NOT_HERE = {"benchmarks/.rivals-venv", "tests/traces"}
"""Made by a command; of another project."""
_PATH = re.compile(r"`(?:(?:PYTHONPATH=\S+ )?python )?((?:tests|testbeds|benchmarks|examples|src|docs)/[\w./-]+)")
_BARE = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py|[a-z_]+(?:/[a-z_]+)*/)`")


def missing(page: Path) -> Iterator[str]:
    text = page.read_text("utf-8")
    for path in _PATH.findall(text):
        if not (ROOT / path).exists() and path.rstrip("/") not in NOT_HERE:
            yield path
    for path in _BARE.findall(text) if page == HOUSE else ():
        if not any((folder / path).exists() for folder in FOLDERS) and not list(PACKAGE.rglob(path)):
            yield path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert list(missing(page)) == []


def test_every_file_that_is_sorted_by_name_exists() -> None:
    named = re.findall(r'"((?:tests|benchmarks)/[^"]*\.py)"', (ROOT / "conftest.py").read_text("utf-8"))
    assert [path for path in named if not (ROOT / path).is_file()] == []

"""Every snippet in README and docs runs, prints what the page says it prints, and every link leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.warm_python import TRANSFORMERS, start_warm

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)

with_id = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    yield from _BLOCK.findall(page.read_text(encoding="utf-8"))


def snippets_with_output(page: Path) -> Iterator[tuple[str, str | None]]:
    """Python blocks, each with the text block that follows it as its expected output."""
    found = list(blocks(page))
    for index, (language, code) in enumerate(found):
        if language == "python":
            following = found[index + 1] if index + 1 < len(found) else ("", "")
            yield code, following[1] if following[0] == "text" else None


@pytest.mark.slow
@with_id
def test_python_snippets_run_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    snippets = list(snippets_with_output(page))
    if page.name == "README.zh-CN.md":
        pytest.skip("the same code as README.md: see below")
    if not snippets:
        pytest.skip("no python on this page")
    # One process per page: later snippets build on earlier ones, as a reader's session does.
    script = "\n".join(f"{code}\nprint({_MARK!r}, flush=True)" for code, _ in snippets)
    quiet = "import warnings; warnings.simplefilter('ignore')\n"
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    process = start_warm(quiet + script, cwd=tmp_path, env=environment, modules=TRANSFORMERS)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    for (_, expected), printed in zip(snippets, out.split(_MARK + "\n"), strict=False):
        if expected is not None:
            assert printed.strip() == expected.strip()


_MARK = "--- end of snippet ---"


@pytest.mark.slow
@with_id
def test_console_snippets_print_what_the_page_says(page: Path) -> None:
    sessions = [text for language, text in blocks(page) if language == "console"]
    if not sessions:
        pytest.skip("no console session on this page")
    for command, expected in (step for session in sessions for step in _steps(session)):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,  # commands may name examples/; those of the docs write nothing
            check=False,
            env={**os.environ, "COLUMNS": "100", "TRANSFORMERS_VERBOSITY": "error"},
        )
        printed = "\n".join(line.rstrip() for line in (done.stdout + done.stderr).strip().splitlines())
        assert printed == expected, command


def _steps(session: str) -> Iterator[tuple[str, str]]:
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, _, output = step.partition("\n")
        assert command.startswith("flopwatch ")
        yield command, output.strip("\n")


@with_id
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(_BLOCK, "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_both_readmes_show_the_same_code() -> None:
    english, chinese = (list(blocks(ROOT / name)) for name in ("README.md", "README.zh-CN.md"))

    assert english == chinese


def test_the_version_is_the_newest_in_the_changelog() -> None:
    from flopwatch import __version__

    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_the_ways_through_the_house_name_files_that_exist_and_are_short() -> None:
    """docs/house.md, "Follow a batch" and "Follow a trial": at most 10 and 14 files."""
    text = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    for name, most in (("batch", 10), ("trial", 14)):
        table = text.split(f"<!-- way of a {name} -->")[1].split("<!-- end -->")[0]
        files = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", table, re.MULTILINE)
        assert 5 < len(files) <= most
        assert [file for file in files if not (ROOT / "src/flopwatch" / file).is_file()] == []

"""The review's table of the house, made again from its files: size of files and functions, comments, folders, the way.

    python benchmarks/house/side_by_side.py               # writes the table into docs/house.md
    python benchmarks/house/side_by_side.py --no-page     # only prints it

The first columns are the commit that the review read and the one from which issue 12 started, both taken from git; a
shallow clone does not have them, and then they are left out. The figures of the other projects are those of the review:
this command does not have their files.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "house.md"
BEGIN, END = "<!-- side_by_side: begin -->", "<!-- side_by_side: end -->"
EARLIER_COMMITS = {"a71ac01": "22 / about 30", "d9c885c": ""}
"""What the review read, with its count of the files that a batch and a trial cross, and what issue 12 started from."""
MOST_FILES_IN_A_FOLDER = 12
SHORT_LINES, SINGLE_IMPORTER_LINES = 50, 70
OTHERS = {
    "httpx": ("23", "248", "2,019", "5.1"),
    "submitit": ("18", "92", "993", "8.7"),
    "hyperfine": ("37", "67", "597", "2.2"),
    "pyinstrument": ("27", "116", "684", "6.4"),
}
"""Files, median lines, longest file and comments per 100 lines of the projects the review read beside this one."""
_DIRECTIVE = re.compile(r"#\s*(type:|noqa|fmt:|pragma)")


@dataclass(frozen=True, slots=True)
class House:
    """Figures of one source tree.

    Attributes:
        file_lines: Lines of every file.
        single_importer_files: Files below 70 lines that exactly one other file imports.
        comment_lines: Lines with a comment that is not for a tool.
        function_lines: Lines of every function and method, nested ones included.
        files_by_folder: Python files directly in each folder.
    """

    file_lines: tuple[int, ...]
    single_importer_files: int
    comment_lines: int
    function_lines: tuple[int, ...]
    files_by_folder: dict[str, int]


def read_house(source: Path) -> House:
    """The figures of a `src` folder."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    importers = importers_of({module_name(source, path): tree for path, tree in trees.items()})
    single = [
        path
        for path, count in lines.items()
        if count < SINGLE_IMPORTER_LINES and len(importers[module_name(source, path)]) == 1
    ]
    return House(
        file_lines=tuple(lines.values()),
        single_importer_files=len(single),
        comment_lines=sum(map(count_comment_lines, texts.values())),
        function_lines=tuple(length for tree in trees.values() for length in function_lengths(tree)),
        files_by_folder=dict(Counter(str(path.parent.relative_to(source)) for path in texts)),
    )


def module_name(source: Path, path: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def importers_of(trees: dict[str, ast.Module]) -> defaultdict[str, set[str]]:
    """By module, the modules that import it, be it at the top, in a function or for type checking."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for importer, tree in trees.items():
        for name in imported_names(tree):
            # `from package import module` names the module; `from module import function` names what is in it.
            imported = name if name in trees else name.rpartition(".")[0]
            if imported in trees and imported != importer:
                found[imported].add(importer)
    return found


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def count_comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string) for token in tokens)


def function_lengths(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1


def files_on_the_way(page: str, heading: str) -> int | None:
    """Files in the numbered rows of the table under this heading, each once; None without such a heading."""
    found = re.search(rf"^#+ {heading}[^\n]*\n(.*?)(?=^#+ |\Z)", page, re.DOTALL | re.MULTILINE)
    if found is None:
        return None
    steps = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", found[1], re.MULTILINE)
    return len(set(steps))


def ninth_decile(values: tuple[int, ...]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[8]


def rows(house: House) -> dict[str, str]:
    """The table's cells that come from the files alone."""
    total = sum(house.file_lines)
    crowded = [name for name, count in house.files_by_folder.items() if count > MOST_FILES_IN_A_FOLDER]
    return {
        "files": str(len(house.file_lines)),
        "median lines of a file": f"{statistics.median(house.file_lines):.0f}",
        "longest file": f"{max(house.file_lines):,}",
        "comments per 100 lines": f"{100 * house.comment_lines / total:.1f}",
        f"files below {SHORT_LINES} lines": str(sum(count < SHORT_LINES for count in house.file_lines)),
        f"files below {SINGLE_IMPORTER_LINES} lines with a single importer": str(house.single_importer_files),
        "lines of a function, median / 9 in 10 below": (
            f"{statistics.median(house.function_lines):.0f} / {ninth_decile(house.function_lines):.0f}"
        ),
        f"folders with more than {MOST_FILES_IN_A_FOLDER} files": str(len(crowded)),
        "lines in src": f"{total:,}",
    }


def table(now: House, earlier: dict[str, House], page: str) -> str:
    way = "files a batch / a trial crosses"
    columns = {
        f"flopwatch at {commit}": rows(house) | {way: EARLIER_COMMITS[commit]} for commit, house in earlier.items()
    }
    batch, trial = files_on_the_way(page, "Follow a batch"), files_on_the_way(page, "Follow a trial")
    columns["flopwatch now"] = rows(now) | {way: f"{batch or '?'} / {trial or '?'}"}
    names = list(columns["flopwatch now"])
    columns |= {other: dict(zip(names, cells, strict=False)) for other, cells in OTHERS.items()}
    lines = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |" for name in names]
    return "\n".join(lines)


def read_commit(commit: str) -> House | None:
    """The house at a commit; None if git does not have it."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        return read_house(Path(folder) / "src")


def page_with_table(page: str, content: str) -> str:
    """The page with the table between its marks, at the end if the marks are not there yet."""
    block = f"{BEGIN}\nWritten by `python benchmarks/house/side_by_side.py`.\n\n{content}\n{END}"
    if BEGIN not in page:
        return f"{page.rstrip()}\n\n## Side by side\n\n{block}\n".lstrip()
    return re.sub(f"{BEGIN}.*{END}", lambda _: block, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-page", action="store_true", help="print the table and write nothing")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# The house\n"
    house = read_house(ROOT / "src")
    read = {commit: read_commit(commit) for commit in EARLIER_COMMITS}
    content = table(house, {commit: earlier for commit, earlier in read.items() if earlier is not None}, page)
    print(content)
    for folder, count in sorted(house.files_by_folder.items()):
        if count > MOST_FILES_IN_A_FOLDER:
            print(f"{folder}: {count} files")
    if not options.no_page:
        PAGE.write_text(page_with_table(page, content), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

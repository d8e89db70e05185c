"""Every snippet of README and docs runs and prints what the page says, both READMEs agree, and links lead somewhere.

A block that cannot run here has a line `<!-- not run: reason -->` above it, and is listed in `NOT_RUN` below.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml

from support.warm_python import TRANSFORMERS, start_warm

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CHINESE_PAGES = {ROOT / "README.zh-CN.md", *ROOT.glob("docs/zh/**/*.md")}
_BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n)?```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = {
    "CONTRIBUTING.md": ["the targets of the Makefile, run by CI"],
    "README.md": ["installs packages"],
    "README.zh-CN.md": ["installs packages"],
    "docs/accuracy.md": ["takes minutes and installs other tools", "takes hours"],
    "docs/doctor.md": ["takes long, and needs an accelerator"],
    "docs/index.md": ["installs packages"],
    "docs/overhead.md": ["takes half an hour and installs other tools"],
    "docs/versions.md": ["builds environments for hours"],
    "docs/why.md": ["needs a training that runs meanwhile"],
}
NOT_RUN |= {
    chinese: reasons
    for page, reasons in NOT_RUN.items()
    if (ROOT / (chinese := page.replace("docs/", "docs/zh/"))) in CHINESE_PAGES
}
RUN_ELSEWHERE = {
    "flopwatch sweep ": "tests/sweep/test_page.py",
    "flopwatch trial ": "tests/sweep/test_page.py",
    "flopwatch fit ": "tests/sweep/test_page.py",
    "torchrun --nproc-per-node=4 train.py": "tests/monitor/ranks/test_page.py",
}
"""Beginnings of shell commands of the pages, with the tests that run them in smaller sizes."""

with_id = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    """A fenced block of a page; `not_run` is the reason why it cannot run here."""

    not_run: str
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    found = (Block(*match) for match in _BLOCK.findall(page.read_text(encoding="utf-8")))
    return [block._replace(language=block.language.partition(" ")[0]) for block in found]


def snippets_with_output(page: Path) -> Iterator[tuple[str, str | None]]:
    """Python blocks, each with the text block that follows it as its expected output."""
    found = blocks(page)
    for block, following in zip(found, [*found[1:], Block("", "", "")], strict=False):
        if block.language == "python" and not block.not_run:
            yield block.code, following.code if following.language == "text" else None


def test_blocks_that_are_not_run_are_those_of_the_list() -> None:
    found = {str(page.relative_to(ROOT)): [block.not_run for block in blocks(page) if block.not_run] for page in PAGES}
    assert {page: reasons for page, reasons in found.items() if reasons} == NOT_RUN


@with_id
def test_every_block_is_of_a_kind_that_is_run(page: Path) -> None:
    kinds = {block.language for block in blocks(page) if not block.not_run}
    only_on_ranks = {"py"} if page.name == "ranks.md" else set()  # tests/monitor/ranks/test_page.py
    assert kinds <= {"python", "console", "bash", "yaml", "text"} | only_on_ranks


@pytest.mark.slow
@with_id
def test_python_snippets_run_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    snippets = list(snippets_with_output(page))
    if page in CHINESE_PAGES:
        pytest.skip("the same code as on the English page: see below")
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
    sessions = [block.code for block in blocks(page) if block.language == "console"]
    if not sessions or page in CHINESE_PAGES:
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


TRAINING = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""The script that the pages call train.py."""


STORED = ROOT / "benchmarks" / "pages" / "recorded" / "flopwatch-sweep"


def shell_commands() -> list[str]:
    """Every different line of the shell blocks on all pages that is run here."""
    lines = [line for page in PAGES for block in blocks(page) if block.language == "bash" and not block.not_run
             for line in block.code.splitlines()]  # fmt: skip
    return [line for line in dict.fromkeys(lines) if not line.startswith(tuple(RUN_ELSEWHERE))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the pages name: scripts, a run, and sweeps."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "my_package").mkdir()
    for script in ("train.py", "my_package/train.py"):
        (folder / script).write_text(TRAINING)
    first, second = (folder / "flopwatch-runs" / f"train-20261116-{time}" for time in ("211500", "213543"))
    command = [sys.executable, "-m", "flopwatch", "run", "--quiet", "--output-dir", str(first), "train.py"]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200)
    shutil.copytree(first, second)
    shutil.copy(ROOT / "tests" / "data" / "gpu_traces" / "tl_mi300_resnet_ac.json.gz", folder / "trace.json.gz")
    for name in ("flopwatch-sweep", "flopwatch-quick", "before", "after"):
        shutil.copytree(STORED, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("line", shell_commands())
def test_shell_commands_run(place: Path, line: str) -> None:
    # Two ranks are enough for what the pages start on more.
    line = re.sub(
        r"^torchrun --nproc-per-node=\d+", f"{sys.executable} -m torch.distributed.run --nproc-per-node=2", line
    )
    line = re.sub(r"^flopwatch ", f"{sys.executable} -m flopwatch ", line)
    assert line.startswith(sys.executable), "mark this block: <!-- not run: reason -->"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        line, shell=True, cwd=place, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    if " run " in line:
        assert "MFU" in done.stderr


@with_id
def test_yaml_is_understood(page: Path, tmp_path: Path) -> None:
    """A matrix by the sweep, everything else by the monitor."""
    from flopwatch.monitor.config import read_config
    from flopwatch.sweep.spec.matrix import expand, read_matrix

    for block in blocks(page):
        if block.language != "yaml":
            continue
        content = yaml.safe_load(block.code)
        if page.name == "sweep.md":
            (tmp_path / "sweep.yaml").write_text(block.code)
            assert expand(read_matrix(tmp_path / "sweep.yaml", {}))
        else:
            assert read_config(content)[1] == []


@with_id
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(_BLOCK, "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)", text):
        if target.startswith(("http", "mailto:")):
            assert target.startswith("mailto:") or "." in urlsplit(target).netloc, f"{page.name}: {target}"
            continue
        file, _, anchor = target.partition("#")
        other = page.parent / file if file else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor and other.suffix == ".md":
            assert anchor in _anchors(other), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(_BLOCK, "", page.read_text(encoding="utf-8"))
    headings, named = (
        re.findall(r"^#+ (.*)$", text, re.MULTILINE),
        re.findall(r'^<a id="([^"]*)"></a>$', text, re.MULTILINE),
    )
    return {*named} | {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(CHINESE_PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_has_the_headings_code_and_pictures_of_the_english_one(page: Path) -> None:
    english = ROOT / str(page.relative_to(ROOT)).replace("README.zh-CN", "README").replace("docs/zh/", "docs/")

    assert _outline(english) == _outline(page)
    assert _numbers(english) == _numbers(page) or page.name != "README.zh-CN.md"


def _outline(page: Path) -> list[str]:
    """In their order: the levels of headings, code without comments, and pictures."""
    parts = re.findall(
        r"^(#+) |^```(\w+)\n(.*?)^```$|\]\((?:\.\./)*((?:docs/)?pictures/[^)]*)\)",
        page.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    return [level or picture or language + re.sub(r"\s*# .*", "", code) for level, language, code, picture in parts]


def _numbers(page: Path) -> Counter[str]:
    """The numbers in the text, apart from those in words such as 'two', which Chinese writes as digits."""
    text = re.sub(_BLOCK, "", page.read_text(encoding="utf-8"))
    return Counter(number for number in re.findall(r"\d[\d,.]*\d|\d", text) if len(number) > 1)


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


@pytest.mark.parametrize("page", ["docs/index.md", "docs/zh/index.md"])
def test_the_index_names_the_commands_that_read_a_run(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [
        name
        for name in ("why", "watch", "explain", "compare", "trace")
        if f"`{name}`" not in text.replace("flopwatch ", "")
    ] == []

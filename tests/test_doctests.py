"""Every example in a docstring of the package runs and prints what it says it prints."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import flopwatch

PACKAGE = Path(flopwatch.__file__).parent
_PROMPT = re.compile(r"^\s*>>> (?!.*doctest: \+SKIP)", re.MULTILINE)


def modules_with_examples() -> list[str]:
    """Names relative to the package of all its modules in which a prompt of the interpreter stands."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if _PROMPT.search(file.read_text(encoding="utf-8"))]
    return [".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for file in files]


@pytest.mark.parametrize("module", modules_with_examples())
def test_the_examples_of_a_module_are_true(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # measured peaks change what other tests see

    result = doctest.testmod(import_module(f"flopwatch.{module}"), optionflags=doctest.NORMALIZE_WHITESPACE)

    assert result.attempted > 0
    assert result.failed == 0, capsys.readouterr().out

"""Private names of other libraries live in the `*_internals` modules, where each has its reason and its fallback."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flopwatch
from flopwatch.torch_internals import PRIVATE_NAMES, autograd, modules, ops  # noqa: F401  # they declare the names

SOURCE = Path(flopwatch.__file__).parent
INTERNALS = {*SOURCE.rglob("*_internals.py"), *SOURCE.rglob("*_internals/*.py")}
DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace", "_thread"}
"""By Python, despite their underscore."""
OWN_MARK = "_flopwatch_"
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
Found = Iterator[tuple[str, int]]


def is_private(name: object) -> bool:
    is_name = isinstance(name, str) and name.isidentifier() and name.strip("_") != "" and name not in DOCUMENTED
    return is_name and str(name).startswith("_") and not str(name).startswith(("__", OWN_MARK))


def uses(tree: ast.AST) -> Found:
    """Private names that are imported, read from an object, or given as a text to what looks a name up."""
    for node in ast.walk(tree):
        parts: list[object] = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("flopwatch", "__future__")):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            parts = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in BY_NAME:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            parts = [part for text in texts for part in str(text).split(".")]
        yield from ((str(part), getattr(node, "lineno", 0)) for part in parts if is_private(part))


def defined(tree: ast.AST) -> set[str]:
    """Private names of this file's own functions, classes and attributes."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    return own


@cache
def known() -> set[str]:
    """All that the `*_internals` modules use: such a name is foreign even where a class of ours has one like it."""
    trees = [ast.parse(file.read_text()) for file in INTERNALS]
    return {name for tree in trees for name, _ in uses(tree)} - set().union(*map(defined, trees)) | set(PRIVATE_NAMES)


def strays(text: str) -> list[tuple[str, int]]:
    tree = ast.parse(text)
    own = defined(tree) - known()
    return [(name, line) for name, line in uses(tree) if name not in own]


@pytest.mark.slow
def test_no_private_name_of_another_library_is_used_outside_the_internals_modules() -> None:
    files = [file for file in sorted(SOURCE.rglob("*.py")) if file not in INTERNALS]
    found = [f"{file.relative_to(SOURCE)}:{line}: {name}" for file in files for name, line in strays(file.read_text())]
    assert not found, "move them into an `*_internals` module, with the reason:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    ["from torch._ops import OpOverload", "import torch._dynamo", "task = torch._C", "getattr(model, '_hidden', None)"],
)
def test_a_planted_private_name_is_found(planted: str) -> None:
    assert strays((SOURCE / "flops" / "count.py").read_text() + "\n" + planted + "\n")


def test_names_of_our_own_and_of_pythons_documentation_are_not_reported() -> None:
    assert not strays("class Own:\n    def __init__(self):\n        self._own = 1\n\n\nvalue = Own()._own")
    assert not strays("frame = sys._getframe(1)\nlater = step._replace(loss=1)")


def test_no_more_private_names_of_torch_are_used() -> None:
    assert len(PRIVATE_NAMES) <= 22

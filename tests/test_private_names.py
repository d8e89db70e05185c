"""Private names of other libraries live in the `*_internals` modules, where each has its reason and its fallback."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flopwatch
from flopwatch.torch_internals import PRIVATE_NAMES, autograd, modules, ops  # noqa: F401  # they declare the names

SOURCE = Path(flopwatch.__file__).parent

# Python documents these despite their underscore.
DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace", "_thread"}
OWN_MARK = "_flopwatch_"
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
KNOWN_STRAYS: set[str] = set()
"""`file: name` of private names outside the `*_internals` modules, each with the reason why it stays there."""


def is_private(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.startswith("_")
        and not name.startswith(("__", OWN_MARK))
        and name.isidentifier()
        and name.strip("_") != ""
        and name not in DOCUMENTED
    )


def names_by_text(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Private names that are written as strings, where Python looks a name up by its string."""
    for node in ast.walk(tree):
        strings: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of_dict = isinstance(node.func, ast.Attribute) and is_dict(node.func.value)
            strings = list(node.args) if called in BY_NAME or of_dict else []
        elif isinstance(node, ast.Subscript) and is_dict(node.value):
            strings = [node.slice]
        for string in strings:
            if isinstance(string, ast.Constant):
                yield from ((part, string.lineno) for part in str(string.value).split(".") if is_private(part))


def is_dict(node: ast.AST) -> bool:
    is_vars = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars"
    return is_vars or (isinstance(node, ast.Attribute) and node.attr == "__dict__")


def names_imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("flopwatch", "__future__")):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((part, node.lineno) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((part, node.lineno) for part in parts if is_private(part))


def names_defined(tree: ast.AST) -> set[str]:
    """Private names of this file's own functions, classes and attributes."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            own.add(node.attr)
    return own


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            yield node.attr, node.lineno


def known_private_names(internals: list[str]) -> set[str]:
    """All that the `*_internals` modules use: such a name is foreign even where a class of ours has one like it."""
    names: set[str] = set()
    for text in internals:
        tree = ast.parse(text)
        names |= {name for find in (names_by_text, names_imported, attributes) for name, _ in find(tree)}
        names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and is_private(node.value)}
    return names


def strays(text: str, known: set[str]) -> list[tuple[str, int]]:
    """The private names of other libraries in one file, with their lines."""
    tree = ast.parse(text)
    own = names_defined(tree) - known
    found = [*names_imported(tree), *names_by_text(tree), *attributes(tree)]
    found += [
        (node.value, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and is_private(node.value) and node.value in known
    ]
    return sorted({(name, line) for name, line in found if name not in own}, key=lambda each: each[1])


def internals_files() -> list[Path]:
    return sorted([*SOURCE.rglob("*_internals.py"), *SOURCE.rglob("*_internals/*.py")])


def known_in_tree() -> set[str]:
    return known_private_names([file.read_text() for file in internals_files()])


@pytest.mark.slow
def test_no_private_name_of_another_library_is_used_outside_the_internals_modules():
    known = known_in_tree()
    found = {
        f"{file.relative_to(SOURCE)}: {name}": line
        for file in sorted(SOURCE.rglob("*.py"))
        if file not in internals_files()
        for name, line in strays(file.read_text(), known)
    }
    new = [f"{stray} (line {line})" for stray, line in found.items() if stray not in KNOWN_STRAYS]
    assert not new, "move them into an `*_internals` module, with the reason:\n" + "\n".join(new)
    assert found.keys() >= KNOWN_STRAYS, "these are gone: take them off the list"


PLANTED = {
    "an import": "from torch._ops import OpOverload",
    "an import of a module": "import torch._dynamo",
    "a private class": "from torch.nn.modules.batchnorm import _BatchNorm",
    "an attribute of a module": "task = torch._C",
    "an attribute of an object": "number = node._sequence_nr()",
    "an attribute that a class of ours has too": "class Own:\n    _schema = ()\n\ntable = op._schema",
    "getattr": "value = getattr(model, '_hidden', None)",
    "setattr": "setattr(model, '_hidden', 1)",
    "attrgetter": "get = attrgetter('_schema.name')",
    "a key of __dict__": "hooks = module.__dict__['_hidden']",
    "a key of vars()": "hooks = vars(module).get('_hidden')",
    "a known name in a table": "TABLE = {'_schema'}",
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_private_name_is_found(planted):
    file = SOURCE / "flops" / "count.py"
    assert strays(file.read_text() + "\n" + planted + "\n", known_in_tree())


@pytest.mark.parametrize(
    "harmless",
    [
        "class Own:\n    def __init__(self):\n        self._own = 1\n\n\nvalue = Own()._own",
        "def f(self):\n    return self._anything",
        "later = step._replace(loss=1)",
        "frame = sys._getframe(1)",
        "name = key + '_seconds'",
        "setattr(tensor, '_flopwatch_origin', 1)",
    ],
)
def test_names_of_our_own_and_of_pythons_documentation_are_not_reported(harmless):
    assert not strays(harmless, known_in_tree())


LIBRARY_NAMES = {
    "_run_epoch",  # transformers
    "_logger_connector",  # Lightning
    "_get_latest_active_run",  # MLflow
}
DOCUMENTED_BY_LIBRARY = {"_values"}
"""Names that the documentation of torch ("torch.sparse") shows."""
PATH_PARTS = {"_C", "_autograd", "_dynamo", "_library", "_ops", "_python_dispatch", "_subclasses"}
"""Modules on the way to a name, which are not counted beside the name itself."""
REGISTERED_OPS = {
    *("_ctc_loss", "_ctc_loss_backward", "_fused_sdp_choice", "_grouped_mm", "_pin_memory", "_to_copy"),
}


def test_no_more_than_25_private_names_are_left_each_counted_once():
    """Counted: what begins with an underscore, or comes from a module that does, unless the library documents it."""
    counted = set(PRIVATE_NAMES) | LIBRARY_NAMES
    found = {
        name
        for file in internals_files()
        for name in known_private_names([file.read_text()]) - names_defined(ast.parse(file.read_text()))
    }
    assert found - PATH_PARTS - REGISTERED_OPS - DOCUMENTED_BY_LIBRARY <= counted
    assert found >= LIBRARY_NAMES
    assert (len(PRIVATE_NAMES), len(counted)) == (22, 25)

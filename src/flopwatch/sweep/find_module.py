"""Whether `package.module:name` can be there, without importing it: that would run the user's code, and load torch."""

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.plain_text import one_line
from flopwatch.sweep.spelling import did_you_mean

_LARGEST_SOURCE = 1_000_000


def check_attribute(what: str, name: str) -> None:
    """Raise InputError when it is certain that there is no such thing.

    Args:
        what: `trainer`, `model`, for the message.
        name: `package.module:name`; looked for in the working directory first, as the trial does.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = _find(what, name, module)
    finally:
        sys.path.pop(0)
    if found is not None and found.origin and found.origin.endswith(".py"):
        _check_source(what, name, Path(found.origin), attribute.partition(".")[0])


def _find(what: str, name: str, module: str) -> ModuleSpec | None:
    """None when only importing would tell."""
    place: Any = None
    found: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        part = ".".join(parts[:count])
        try:
            found = _asked(part, place)
        except Exception:  # a finder of somebody else
            return None
        if found is None:
            where = f"in {one_line(os.getcwd())} or on Python's path" if count == 1 else f"in {parts[count - 2]}"
            raise InputError(
                f"{what} {one_line(name, 200)!r} cannot be loaded: there is no module {part!r} {where}; correct the "
                "name, start from the folder it lies in, or set PYTHONPATH"
            )
        place = found.submodule_search_locations
        if place is None and count < len(parts):
            return None  # `os.path` is a module of a module
    return found


def _asked(module: str, place: Any) -> ModuleSpec | None:
    for finder in sys.meta_path:
        ask = getattr(finder, "find_spec", None)
        found: ModuleSpec | None = ask(module, place) if ask else None
        if found is not None:
            return found
    return None


def _check_source(what: str, name: str, file: Path, attribute: str) -> None:
    try:
        text = file.read_text(encoding="utf-8") if file.stat().st_size <= _LARGEST_SOURCE else ""
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{what} {name!r} cannot be loaded: {file}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError):
        return
    names = set(_defined(tree.body))
    if text and attribute not in names and not names & {"*", "__getattr__"} and "globals()" not in text:
        told = did_you_mean(attribute, sorted(known for known in names if not known.startswith("_"))[:20])
        raise InputError(f"{what} {name!r} cannot be loaded: {file} defines no {attribute!r}{told}")


def _defined(body: Iterable[ast.AST]) -> Iterator[str]:
    """Names a module has after its import, those in `if`, `try` and `with` too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:
            yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
            yield from _defined(child for child in ast.walk(node) if isinstance(child, _STATEMENTS))


_STATEMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)

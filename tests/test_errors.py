"""The tree drawn in errors.py is the tree of the classes."""

import ast
import re
from pathlib import Path

from flopwatch import errors

SOURCE = Path(errors.__file__).parent


def drawn() -> set[tuple[str, str]]:
    """Pairs (class, parent) of the drawing: a level is four characters deep."""
    assert errors.__doc__ is not None
    path: list[str] = []
    pairs = set()
    for line in errors.__doc__.splitlines():
        found = re.match(r"^((?:[│ ]   )*)(├── |└── )?([A-Z]\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4 + (found[2] is not None)
            path[depth:] = [found[3]]
            if depth:
                pairs.add((found[3], path[depth - 1]))
    return pairs


def written() -> set[tuple[str, str]]:
    """Pairs (class, base) of all classes in the package that descend from FlopwatchError."""
    bases: dict[str, list[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    ours = {"FlopwatchError"}
    while more := {name for name, parents in bases.items() if ours.intersection(parents)} - ours:
        ours |= more
    return {(name, parent) for name in ours for parent in bases[name] if parent in ours}


def test_every_error_of_ours_is_drawn_under_its_parent() -> None:
    assert drawn() == written()

"""The texts in the source that a person may be shown: what the table of a language must have.

python -m support.texts          # in tests/: adds new texts to the table, without translation, and drops old ones
"""

import ast
import itertools
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "flopwatch"
TABLE = SOURCE / "translations" / "zh.json"
_FORMAT_FIELD = re.compile(r"\{[a-z_]\w*(?:[.:][^{}\s]*)?\}")
_WORDS = re.compile(r"(?<![\w/.{<$-])[A-Za-z][a-z]+(?![\w/}>=]|-\w)")


def texts(source: Path = SOURCE) -> dict[str, str]:
    """Each text, with values as {0}, {1}, and the file that has it."""
    found: dict[str, str] = {}
    for file in sorted(source.rglob("*.py")):
        for text in _texts_of(file):
            found.setdefault(text, str(file.relative_to(source)))
    return found


def _texts_of(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text("utf-8"))
    inner = _docstrings(tree) | _pieces(tree)
    if file.parts[-2] == "cli" or "cli" in file.parts:
        yield from _help_texts(tree)
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "plural":
            yield from _plurals(node)
        text = _text(node)
        if text is not None and is_sentence(text):
            yield from filter(is_sentence, (part.strip() for part in text.split("\n")))


def is_sentence(text: str) -> bool:
    """At least two words of a sentence.

    >>> is_sentence("{0} of {1} trials"), is_sentence("--log-every"), is_sentence("SELECT"), is_sentence("outcome")
    (True, False, False, False)
    """
    return len(_WORDS.findall(text)) > 1 and " " in text.strip()


def _docstrings(tree: ast.Module) -> set[int]:
    """Also those below a field or a constant."""
    return {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }


def _pieces(tree: ast.Module) -> set[int]:
    """The literal pieces of f-strings, which are read with their f-string."""
    return {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}


@cache
def _commands() -> frozenset[str]:
    return frozenset(re.findall(r'^    "(\w+)": \("', (SOURCE / "cli" / "app.py").read_text("utf-8"), re.MULTILINE))


def _help_texts(tree: ast.Module) -> Iterator[str]:
    """The docstrings of commands, by paragraph as `--help` shows them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in _commands() and (text := ast.get_docstring(node)):
            parts = (" ".join(part.split()) for part in text.split("\n\n"))
            yield from (part for part in parts if not part.startswith((">>>", "Args:", "Returns:")))


def _plurals(node: ast.Call) -> Iterator[str]:
    word = node.args[1]
    for noun in ast.walk(word):
        if isinstance(noun, ast.Constant) and isinstance(noun.value, str):
            yield from (f"{{0}} {noun.value}", f"{{0}} {noun.value}s")


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        numbers = itertools.count()
        return _FORMAT_FIELD.sub(lambda _: f"{{{next(numbers)}}}", node.value)
    if not isinstance(node, ast.JoinedStr):
        return None
    text, holes = "", 0
    for piece in node.values:
        if isinstance(piece, ast.Constant):
            text += str(piece.value)
        else:
            text, holes = f"{text}{{{holes}}}", holes + 1
    return text


def update() -> None:
    old = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {"texts": {}, "words": {}, "headings": {}}
    found = texts()
    new = {text: old["texts"].get(text, "") for text in sorted(found, key=lambda text: (found[text], text))}
    sys.stdout.write(f"{len(new)} texts, {sum(own == '' for own in new.values())} without a translation\n")
    TABLE.write_text(json.dumps({**old, "texts": new}, ensure_ascii=False, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    update()
    sys.exit(0)

"""Draws comments, docstrings and messages at random from src, for a reader who does not know the code.

    python benchmarks/house/language_sample.py --count 30 --seed 1
    python benchmarks/house/language_sample.py --all --below sinks

Each is printed with its place and the code that a reader sees beside it: the line of a comment and the two that follow,
or the line that a docstring belongs to. A message stands alone, as on a screen. The three kinds are drawn in equal
numbers, since there are far more docstrings than comments. A message is a text that a person may be shown: what is
raised, warned, logged or printed, and the help of an option. Texts of fewer than four words are left out.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ("comment", "docstring", "message")
FEWEST_WORDS = 4
_DIRECTIVE = re.compile(r"#\s*(type:|noqa|fmt:|pragma|!)")
_SHOWN_BY = {
    "print",
    "warn",
    "warning",
    "info",
    "error",
    "exception",
    "debug",
    "echo",
    "notice",
    "say",
    "Option",
    "Argument",
    "flag",
}
"""Last part of the name of functions whose text arguments a person sees, besides exceptions."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text and where it stands."""

    kind: str
    place: str
    words: str
    code: str = ""


def comments(text: str, place: str) -> Iterator[Text]:
    """Comments. Whole-line comments on lines that follow each other are one."""
    held: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        is_alone = token.line.lstrip().startswith("#")
        if held and not (is_alone and token.start[0] == last + 1):
            yield Text("comment", f"{place}:{first}", " ".join(held))
            held = []
        if not held:
            first = token.start[0]
        held.append(token.string.lstrip("# "))
        last = token.start[0] if is_alone else -1
    if held:
        yield Text("comment", f"{place}:{first}", " ".join(held))


def docstrings(tree: ast.Module, place: str) -> Iterator[Text]:
    """Docstrings of modules, classes and functions, and the strings below constants and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                words = statement.value.value
                if isinstance(words, str):
                    yield Text("docstring", f"{place}:{statement.lineno}", words)


def messages(tree: ast.Module, place: str) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_shown(node.func):
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if words := literal(value):
                    yield Text("message", f"{place}:{value.lineno}", words)


def _is_shown(function: ast.expr) -> bool:
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name in _SHOWN_BY or name.endswith(("Error", "Warning", "Exit"))


def literal(node: ast.expr) -> str:
    """The text of a string, with the code in braces where an f-string has some; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or f"{{{ast.unparse(part).strip('{}')}}}" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return ""


def texts(source: Path, below: str = "") -> list[Text]:
    """All texts of the package in the file or folder named by `below`."""
    found: list[Text] = []
    for path in sorted(source.rglob("*.py")):
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(source.parent))
        if place.startswith(f"src/flopwatch/{below}"):
            tree = ast.parse(text)
            all_kinds = [*comments(text, place), *docstrings(tree, place), *messages(tree, place)]
            found += [replace(one, code=_beside(one, text.splitlines())) for one in all_kinds]
    return [text for text in found if len(text.words.split()) >= FEWEST_WORDS]


def _beside(text: Text, lines: list[str]) -> str:
    number = int(text.place.rpartition(":")[2]) - 1
    if text.kind == "comment":
        code = [line for line in lines[number : number + 12] if not line.lstrip().startswith("#")]
        return "\n".join(code[:3])
    if text.kind == "docstring":
        before = [line for line in lines[:number] if line.strip()]
        return before[-1] if before else ""
    return ""


def draw(found: list[Text], count: int, seed: int) -> list[Text]:
    """So many texts, the three kinds in equal numbers, in random order."""
    rng = random.Random(seed)
    shuffled = {
        kind: rng.sample(of_kind, len(of_kind)) for kind in KINDS if (of_kind := [t for t in found if t.kind == kind])
    }
    drawn = [shuffled[KINDS[number % len(KINDS)]].pop() for number in range(count)]
    return rng.sample(drawn, len(drawn))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="print every text instead of drawing some")
    parser.add_argument("--below", default="", help="a file or folder below src/flopwatch")
    options = parser.parse_args()
    found = texts(ROOT / "src", options.below)
    for number, text in enumerate(found if options.all else draw(found, options.count, options.seed), 1):
        words = "\n    ".join(line.strip() for line in text.words.strip().splitlines())
        code = "".join(f"    | {line}\n" for line in text.code.splitlines())
        print(f"{number}. {text.kind}, {text.place}\n{code}    {words}\n")


if __name__ == "__main__":
    main()
